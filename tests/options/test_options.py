"""Every option of `attention`, alone and in pairs: values in all dtypes, gradcheck, random combinations."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnjourney
from tests.attention.test_fuzz import FIXED
from tests.support.options_cases import OPTIONS, check, compatible, leaves_of, make
from tests.support.testing import DTYPES, poison_memory, threads

PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if compatible(pair)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dtype):
    *tensors, arguments = make([name], dtype, q_len=70, kv_len=150, dim=24, v_dim=17)
    check(tensors, arguments, label=name)


@pytest.mark.parametrize("i", range(len(PAIRS)), ids=["-".join(p) for p in PAIRS])
def test_values_and_gradients_of_pairs(i):
    dtype = DTYPES[i % 4]
    q_len, kv_len = [(9, 11), (33, 20), (50, 170)][i % 3]
    *tensors, arguments = make(PAIRS[i], dtype, q_len=q_len, kv_len=kv_len, dim=16, v_dim=8)
    check(tensors, arguments, label=PAIRS[i])


def gradcheck(names, **sizes):
    *tensors, arguments = make(names, q_len=4, kv_len=6, q_heads=2, kv_heads=1, dim=3, v_dim=2, **sizes)
    tensors, arguments, leaves = leaves_of(tensors, arguments)

    def function(*inputs):
        call = {**arguments, **dict(zip(leaves, inputs))}
        q, k, v = (call.pop(name) for name in ("query", "key", "value"))
        out, lse = attnjourney.attention(q, k, v, return_lse=True, **call)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    torch.autograd.gradcheck(function, tuple(leaves.values()), fast_mode=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    gradcheck([name])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_gradcheck_of_pairs(pair):
    gradcheck(pair)


@settings(FIXED, max_examples=120)
@given(
    st.sets(st.sampled_from(sorted(OPTIONS)), max_size=6).filter(compatible),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 5, 17, 49, 97]),
    st.sampled_from([0, 1, 7, 31, 65, 145, 200]),
    st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    st.integers(1, 3),
)
def test_random_combinations(names, dtype, q_len, kv_len, heads, batch):
    *tensors, arguments = make(sorted(names), dtype, batch, *heads, q_len, kv_len, 8, 5)
    check(tensors, arguments, label=f"{sorted(names)} {dtype} {q_len} {kv_len}")


@pytest.mark.parametrize("names", [("mask", "dropout"), ("alibi", "sinks", "key_lengths"), ("prefix",), ("row_mask",)])
def test_threads(names):
    # the forward gives the same bits for any number of threads, the backward for a fixed one
    *tensors, arguments = make(names, torch.float32, batch=2, q_len=150, kv_len=310, dim=16, v_dim=16)
    results = []
    for count in (1, 2, 2):
        poison_memory()
        with threads(count):
            results.append(check(tensors, arguments, label=f"{names} {count} threads"))
    for name in results[0]:
        assert torch.equal(results[1][name], results[2][name]), name
        if name in ("out", "lse"):
            assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.parametrize("row", [("mask",), ("row_mask",), ("column_mask",), ("sinks",), ("alibi",)], ids="-".join)
def test_only_the_option_needs_a_gradient(row):
    q, k, v, arguments = make(row)
    name = next(n for n in ("attn_mask", "sinks", "alibi_slopes") if n in arguments)
    whole = leaves_of((q, k, v), arguments)
    attnjourney.attention(*whole[0], **whole[1]).square().sum().backward()
    arguments[name] = arguments[name].clone().requires_grad_()
    attnjourney.attention(q, k, v, **arguments).square().sum().backward()
    assert torch.equal(arguments[name].grad, whole[2][name].grad)
