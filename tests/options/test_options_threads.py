"""Every option on several threads: the same bits forward for any number, backward for a fixed one, and right."""

import pytest
import torch

import attnjourney
from tests.support.options_cases import OPTIONS, check, make
from tests.support.testing import poison_memory, random_tensor, threads

# (batch, query heads, key/value heads): one that the threads share by blocks of keys; three, of which one is left over
HEADS = {"split": (1, 2, 1), "left over": (3, 1, 1)}
NARROW = ("causal", "window", "left", "prefix")  # too little work here for more than one thread
CASES = [("split", name) for name in OPTIONS if name not in NARROW]
CASES += [
    ("left over", name) for name in ("mask", "row_mask", "column_mask", "alibi_per_item", "key_lengths", "dropout")
]


@pytest.mark.parametrize("heads, name", CASES, ids=["-".join(case) for case in CASES])
def test_same_bits_and_right(heads, name):
    dtype = (torch.float32, torch.float64, torch.bfloat16)[(list(OPTIONS).index(name) + len(heads)) % 3]
    q, k, v, arguments = make([name], dtype, *HEADS[heads], q_len=100, kv_len=400, dim=32, v_dim=24)
    results = []
    for count in (1, 2, 2):
        poison_memory()
        with threads(count):
            plan = attnjourney.explain(q, k, v, **{n: x for n, x in arguments.items() if n != "dropout_seed"})
            assert plan["backward"]["threads"] == plan["forward"]["threads"] == count
            results.append(check((q, k, v), arguments, label=f"{name} {heads} {count} threads"))
    assert torch.equal(results[0]["out"], results[1]["out"]) and torch.equal(results[0]["lse"], results[1]["lse"])
    for name in results[1]:
        assert torch.equal(results[1][name], results[2][name]), name


@pytest.mark.parametrize("shape", ((160, 200), (1, 200), (160, 1), (2, 1, 160, 200)), ids=str)
def test_heads_that_share_a_trained_mask(shape):
    # each of its gradient's elements is a sum over heads that run at the same time
    q, k, v = (random_tensor((2, 8, n, 8), seed=s, outliers=False) for s, n in enumerate((160, 200, 200)))
    arguments = dict(attn_mask=random_tensor(shape, seed=3, outliers=False))
    with threads(2):
        first = check((q, k, v), arguments)
        for _ in range(3):
            again = check((q, k, v), arguments)
            assert torch.equal(first["grad_attn_mask"], again["grad_attn_mask"])
