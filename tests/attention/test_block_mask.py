"""attention under a BlockMask: values, gradients and second derivatives beside the dense mask in float64."""

import math

import pytest
import torch

import attnjourney
from attnjourney import BlockMask, reference
from tests.support.block_patterns import PATTERNS, case, check_blocks, dense
from tests.support.derivative_checks import check as check_derivatives
from tests.support.testing import DTYPES, pairs, random_tensor, row_id, threads

OPTION_SETS = [
    (),
    ("bottom_right", "sinks"),
    ("prefix", "softcap", "key_lengths"),
    ("window", "alibi", "query_lengths"),
    ("dropout", "causal"),
    ("scale", "alibi_per_item", "dropout"),
]
ROWS = pairs(
    pattern=PATTERNS,
    block_size=(16, 64, 128, 208),
    dtype=DTYPES,
    lengths=((150, 310), (333, 97), (1, 300), (128, 256)),
    options=OPTION_SETS,
    broadcast=((1, 1), (2, 1), (1, 4), (2, 4)),
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    (batch, heads), (q_len, kv_len) = row["broadcast"], row["lengths"]
    sizes = dict(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, dim=12, v_dim=20)
    check_blocks(*case(row["pattern"], row["block_size"], row["options"], row["dtype"], **sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_rows_of_many_blocks(pattern, dtype):
    """More blocks than one step of the kernels holds, and more rows than one work item."""
    sizes = dict(heads=2, q_heads=2, kv_heads=1, q_len=520, kv_len=700, dim=8, v_dim=8)
    check_blocks(*case(pattern, 32, ("causal",), dtype, **sizes))


@pytest.mark.parametrize("names", [(), ("softcap", "sinks", "alibi"), ("window", "dropout"), ("key_lengths", "prefix")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_derivatives(names, dtype):
    tensors, arguments, mask = case("ragged", 16, names, dtype, dim=5, v_dim=4)
    check_derivatives(tensors, arguments, in_plain={"attn_mask": mask})


def test_gradcheck_and_gradgradcheck():
    tensors, arguments, _ = case("ragged", 16, ("sinks", "alibi"), q_len=19, kv_len=35, dim=3, v_dim=2)
    leaves = [*tensors, arguments.pop("sinks"), arguments.pop("alibi_slopes")]
    leaves = [x[:1].clone().requires_grad_() if x.dim() == 4 else x.clone().requires_grad_() for x in leaves]
    arguments["attn_mask"] = BlockMask.from_dense(arguments["attn_mask"].to_dense()[:1], 16)

    def call(q, k, v, sinks, slopes):
        return attnjourney.attention(q, k, v, sinks=sinks, alibi_slopes=slopes, **arguments)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_any_key(dtype):
    tensors, arguments, mask = case("ragged", 16, dtype=dtype)
    mask[:, :, 16:48] = False  # two rows of blocks, and row 50
    mask[:, 1, 50] = False
    arguments["attn_mask"] = BlockMask.from_dense(mask, 16)
    results = check_blocks(tensors, arguments, mask)
    empty = ~mask.any(-1)
    assert empty[:, :, 16:48].all() and not empty.all()
    for name in ("out", "grad_query"):
        assert (results[name][empty] == 0).all(), name
    assert (results["lse"][empty] == -math.inf).all()


@pytest.mark.parametrize("fill", (math.nan, math.inf))
@pytest.mark.parametrize("block_size", (16, 64))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_does_not_leak(dtype, block_size, fill):
    """In keys and values that no row sees nothing changes; in two that one row each sees, these rows show it alone."""
    q, k, v = (random_tensor((1, 2, 130, 16), dtype, seed) for seed in (1, 2, 3))
    i, j = torch.arange(130)[:, None], torch.arange(130)
    mask = (i // block_size >= j // block_size) & (j // block_size != 1) & ((j % 5 != 0) | (j == i))
    mask[:, 7] = False
    mask = BlockMask.from_dense(mask, block_size)

    def run(k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attnjourney.attention(*leaves, mask)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    def filled(x, keys):
        return x.index_fill(2, keys, fill)

    clean, hidden = run(k, v), (~mask.to_dense()[0, 0].any(0)).nonzero().flatten()
    assert 7 in hidden and set(range(block_size, min(130, 2 * block_size))) <= set(hidden.tolist())
    for dirty, before in zip(run(filled(k, hidden), filled(v, hidden)), clean):
        torch.testing.assert_close(dirty, before)  # around a NaN the order of additions is another one
    rows = torch.tensor([5, 125 if block_size == 16 else 5])
    others = torch.ones(130, dtype=torch.bool).index_fill(0, rows, False)
    out = run(filled(k, rows), filled(v, rows))[0]
    torch.testing.assert_close(out[:, :, others], clean[0][:, :, others])
    assert not out[:, :, rows].isfinite().any()


@pytest.mark.parametrize("names", [(), ("causal", "alibi", "sinks"), ("softcap", "key_lengths", "query_lengths")])
def test_weights(names):
    (q, k, _), arguments, mask = case("ragged", 16, names)
    rows, heads = torch.tensor([3, 14, 15, 16, 17, 18, 60, 5]), [2, 0]
    ours = attnjourney.attention_weights(q, k, rows=rows, heads=heads, **arguments)
    arguments["attn_mask"] = mask
    theirs = reference.attention_weights(q, k, rows=rows, heads=heads, **arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_reference_takes_it():
    tensors, arguments, mask = case("document", 16, ("causal",))
    ours = reference.attention(*tensors, **arguments)
    arguments["attn_mask"] = mask
    assert torch.equal(ours, reference.attention(*tensors, **arguments))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_number_of_threads(pattern):
    (q, k, v), arguments, _ = case(pattern, 16, (), torch.float32, q_len=300, kv_len=300, dim=32, v_dim=32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for count in (1, 2, 3):
        with threads(count):
            out = attnjourney.attention(*leaves, **arguments)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        for a, b in zip(other[1:], results[0][1:]):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rank", (2, 3, 5))
def test_other_ranks(rank):
    shape = ((), (4,), (2, 3, 4))[rank - 2 if rank < 5 else 2]
    batch, heads = (6, 4) if rank == 5 else (1, 4 if rank == 3 else 1)
    q, k, v = (random_tensor((*shape, n, 8), torch.float64, s) for s, n in enumerate((40, 50, 50)))
    seen = PATTERNS["ragged"](16, 40, 50)
    mask = BlockMask.from_function(lambda b, h, i, j: seen(b, h, i, j) & (j % 6 != b), batch, heads, 40, 50, 16)
    expected = mask.to_dense().reshape(*shape, 40, 50)
    for function in (attnjourney.attention, reference.attention):
        ours = function(q, k, v, mask)
        torch.testing.assert_close(ours, reference.attention(q, k, v, expected), rtol=1e-12, atol=1e-12)
    one = BlockMask.from_function(seen, 1, 1, 40, 50, 16)  # broadcasts over all of them
    expected = reference.attention(q, k, v, dense(seen, 1, 1, 40, 50)[0, 0])
    torch.testing.assert_close(attnjourney.attention(q, k, v, one), expected, rtol=1e-12, atol=1e-12)
