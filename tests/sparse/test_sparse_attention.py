"""Token-sparse attention: values and gradients in every dtype beside dense attention with the same mask in float64."""

import math

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.support import options_cases
from tests.support.testing import DTYPES, LAYOUTS, LSE_DTYPE, pairs, poison_memory, random_tensor, row_id, threads

SHARED = ("is_causal", "causal_alignment", "key_lengths", "softcap", "sinks", "scale", "enable_gqa")


def make_indices(shape, kv_len, dtype=torch.int64, seed=7, twice=False, holes=True):
    """Distinct keys in random order, some of them -1; or the first one twice."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*shape[:-1], max(1, kv_len), generator=generator).argsort(-1)[..., : shape[-1]]
    indices = torch.nn.functional.pad(order, (0, shape[-1] - order.shape[-1]), value=-1)
    if holes:
        indices = indices.masked_fill(torch.rand(shape, generator=generator) < 0.2, -3)
    if twice and shape[-1] > 1:
        indices[..., -1] = indices[..., 0]
    return (indices if kv_len else indices.fill_(-1)).to(dtype)


def counts(query, key, indices, query_block_size=1):
    """(B, H, L, S): how often each row names each key."""
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    own = (indices if indices.dim() == 4 else indices[:, None]).long().expand(batch, kv_heads, -1, -1)
    own = own[:, :, torch.arange(q_len) // query_block_size]
    found = torch.zeros(batch, kv_heads, q_len, kv_len + 1)
    found.scatter_add_(3, own.masked_fill(own < 0, kv_len), torch.ones(own.shape))
    return found[..., :kv_len].repeat_interleave(heads // kv_heads, 1)


def masked(query, key, value, *, indices, query_block_size=1, **options):
    """Arguments of dense attention that sees the same pairs: log(count) is what a key that is named twice weighs."""
    times = counts(query, key, indices, query_block_size)
    twice = bool((times > 1).any())
    mask = times.double().log().to(LSE_DTYPE.get(query.dtype, torch.float32)) if twice else times > 0
    return {**options, "attn_mask": mask}, twice


def dense(query, key, value, **options):
    options, twice = masked(query, key, value, **options)
    if twice:
        options["attn_mask"] = options["attn_mask"].to(query.dtype)
    return reference.attention(query, key, value, **options)


def plain(tensors, options, gradients, ulps):
    options, twice = masked(*tensors, **options)
    results = options_cases.plain_attention(tensors, options, gradients, ulps)
    return tuple(x[:5] + x[6:] for x in results) if twice else results


def check(tensors, options, label=""):
    __tracebackhide__ = True
    return options_cases.check(tensors, options, attnjourney.sparse_attention, dense, plain, label)


OPTIONS = [
    (),
    ("causal",),
    ("causal", "bottom_right"),
    ("key_lengths",),
    ("causal", "key_lengths", "bottom_right"),
    ("softcap", "sinks"),
    ("causal", "softcap", "scale"),
    ("sinks", "causal", "bottom_right"),
]
ROWS = pairs(
    dtype=DTYPES,
    heads=[(4, 4), (4, 1), (6, 2), (24, 1)],
    lengths=[(1, 40), (9, 11), (70, 150), (33, 5)],
    k=[1, 3, 16, 40],
    dims=[(16, 16), (20, 33), (72, 40), (3, 5)],
    names=OPTIONS,
    block=[1, 4, 50],
    per_head=[False, True],
    index=[torch.int64, torch.int32],
    twice=[False, True],
    layout=["contiguous", "transposed", "packed", "offset", "columns"],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    (heads, kv_heads), (q_len, kv_len), (dim, v_dim) = row["heads"], row["lengths"], row["dims"]
    sizes = dict(q_heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, dim=dim, v_dim=v_dim)
    *tensors, options = options_cases.make(row["names"], row["dtype"], **sizes)
    blocks = -(-q_len // row["block"])
    shape = (2, kv_heads, blocks, row["k"]) if row["per_head"] else (2, blocks, row["k"])
    options["indices"] = make_indices(shape, kv_len, row["index"], twice=row["twice"])
    poison_memory()
    check([LAYOUTS[row["layout"]](x) for x in tensors], {**options, "query_block_size": row["block"]}, row_id(row))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k, count", [(300, 1), (700, 2), (2500, 3)])
def test_many_keys(dtype, k, count):
    """Several chunks of keys, by one thread or more, together with rows that are not."""
    sizes = dict(batch=1, q_heads=6, kv_heads=1, q_len=count, kv_len=3000, dim=24, v_dim=16)
    *tensors, options = options_cases.make(("sinks",), dtype, **sizes)
    options["indices"] = make_indices((1, count, k), 3000)
    with threads(count):
        check(tensors, options)
    options |= dict(indices=make_indices((1, 1, k), 3000), query_block_size=count, is_causal=True)
    with threads(count):
        check(tensors, {**options, "causal_alignment": "bottom_right"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, block", [(16, 1), (40, 4)])
def test_values_that_are_a_part_of_the_keys(dtype, heads, block):
    """Latents: the gradient of each is the sum of both."""
    latents = random_tensor((2, 1, 90, 40), dtype, 1, outliers=False)
    query = random_tensor((2, heads, 9, 40), dtype, 2, outliers=False)
    indices = make_indices((2, -(-9 // block), 33), 90)
    options = dict(indices=indices, query_block_size=block, is_causal=True, causal_alignment="bottom_right")
    options["enable_gqa"] = True
    for key, value in ((latents, latents[..., :32]), (latents, latents[..., 8:])):
        check([query, key, value], options)
    leaf = latents.clone().requires_grad_()
    grad_out = random_tensor((2, heads, 9, 32), dtype, 3, outliers=False)
    (both,) = torch.autograd.grad(attnjourney.sparse_attention(query, leaf, leaf[..., :32], **options), leaf, grad_out)
    apart = [latents.clone().requires_grad_(), latents[..., :32].clone().requires_grad_()]
    g = torch.autograd.grad(attnjourney.sparse_attention(query, *apart, **options), apart, grad_out)
    expected = g[0] + torch.nn.functional.pad(g[1], (0, 8))
    torch.testing.assert_close(both, expected, rtol=0, atol=0)


def test_the_reference_equals_dense_attention():
    for names in OPTIONS:
        *tensors, options = options_cases.make(names, q_len=9, kv_len=30)
        options |= dict(indices=make_indices((2, 2, 3, 8), 30, twice=True), query_block_size=4)
        ours, _ = options_cases.run(reference.sparse_attention, tensors, options)
        theirs, _ = options_cases.run(dense, tensors, options)
        for name, x in ours.items():
            torch.testing.assert_close(x, theirs[name], rtol=1e-10, atol=1e-10, msg=f"{names} {name}")


@pytest.mark.parametrize("block", [1, 4])
def test_rows_that_see_no_key_are_exact_zeros(block):
    *tensors, options = options_cases.make(("causal",), torch.float32, q_len=8, kv_len=30)
    indices = make_indices((2, 8 // block, 5), 30, holes=False)
    indices[:, 0], indices[0, 1] = 20, -1
    options |= dict(indices=indices, query_block_size=block)
    results = check(tensors, options)
    seen = ((counts(*tensors[:2], indices, block) > 0) & torch.ones(8, 30).tril().bool()).any(-1)
    assert not seen[:, :, :block].any() and seen.any()
    for name in ("out", "grad_query"):
        assert torch.equal(results[name][~seen], torch.zeros_like(results[name][~seen]))
    assert torch.equal(results["lse"] == -math.inf, ~seen)


@pytest.mark.parametrize("empty", ["batch", "rows", "keys", "indices"])
@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_there(empty, sinks):
    batch, rows, keys, k = (0 if empty == name else n for name, n in dict(batch=2, rows=3, keys=5, indices=4).items())
    names = ("sinks",) if sinks else ()
    *tensors, options = options_cases.make(names, torch.float32, batch=batch, q_len=rows, kv_len=keys)
    options["indices"] = make_indices((batch, rows, k), keys)
    results, _ = options_cases.run(attnjourney.sparse_attention, tensors, options)
    for name, x in results.items():
        if name not in ("lse", "grad_sinks"):
            assert torch.equal(x, torch.zeros_like(x)), name
    expected = options["sinks"].reshape(1, -1, 1).expand_as(results["lse"]) if sinks else -math.inf
    assert (results["lse"] == expected).all()


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads(heads, dtype):
    sizes = dict(batch=2, q_heads=heads[0], kv_heads=heads[1], q_len=70, kv_len=1500, dim=40, v_dim=24)
    *tensors, options = options_cases.make(("causal", "bottom_right", "sinks"), dtype, **sizes)
    options |= dict(indices=make_indices((2, 35, 600), 1500, twice=True), query_block_size=2)
    found = []
    for count in (1, 2, 5):
        with threads(count):
            results, _ = options_cases.run(attnjourney.sparse_attention, tensors, options)
            again, _ = options_cases.run(attnjourney.sparse_attention, tensors, options)
        assert all(torch.equal(x, again[name]) for name, x in results.items())
        found.append(results)
    for other in found[1:]:
        assert torch.equal(other["out"], found[0]["out"]) and torch.equal(other["lse"], found[0]["lse"])
    with threads(5):
        check(tensors, options)


@pytest.mark.parametrize("block", [1, 6])
@pytest.mark.parametrize("bad", ["key", "value", "query", "grad_out"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(bad, number, block):
    *tensors, options = options_cases.make(("causal",), torch.float32, q_len=12, kv_len=12, q_heads=6, kv_heads=1)
    at = 7
    indices = torch.arange(12).expand(2, 12 // block, 12).clone()
    if block == 1:
        indices[:, 9] = torch.where(indices[:, 9] == at, -1, indices[:, 9])  # row 9 does not name it
    options |= dict(indices=indices, query_block_size=block)
    grad_out = torch.ones(2, 6, 12, 3)
    given = dict(zip(("query", "key", "value"), tensors), grad_out=grad_out)
    given[bad][0, 0, at, 0] = number
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attnjourney.sparse_attention(*leaves, **options)
    grads = dict(zip(("query", "key", "value"), torch.autograd.grad(out, leaves, grad_out)))

    def rows(x, head=0):
        return (~x.detach()[0, head].isfinite()).any(-1).nonzero().flatten().tolist()

    sees = [i for i in range(at, 12) if block > 1 or i != 9]
    own = [at] if bad in ("query", "grad_out") else sees
    if bad == "query" and number == math.inf:
        assert set(rows(out)) <= {at}  # a softmax of infinities alone need not be NaN
    elif bad == "key" and number == math.inf:
        assert set(rows(out)) <= set(sees)  # weights of -inf are 0
    else:
        assert rows(out) == ([] if bad == "grad_out" else own)
        assert rows(grads["query"]) == own
    for name in ("key", "value"):
        assert set(rows(grads[name])) <= set(range(12)) and not grads[name][1].isnan().any()
        if bad in ("query", "grad_out") and number != number:
            assert [j for j in rows(grads[name]) if j > at] == []  # row 7 hides them
    for x in (out, grads["query"]):
        assert x[1].isfinite().all()
        if bad in ("query", "grad_out"):
            assert x[0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [1, 3])
def test_the_mean_of_large_values_is_finite(dtype, block):
    """Their sum is not."""
    *tensors, options = options_cases.make(("causal", "sinks"), dtype, q_len=6, kv_len=300, q_heads=4, kv_heads=2)
    options |= dict(indices=make_indices((2, 6 // block, 100), 300), query_block_size=block)
    options |= dict(causal_alignment="bottom_right")
    tensors[2] = torch.full_like(tensors[2], 2e38)
    out = attnjourney.sparse_attention(*tensors, **options)
    wide = {**options, "sinks": options["sinks"].double()}
    expected = reference.sparse_attention(*(x.double() for x in tensors), **wide)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=0)


def test_large_scores_give_the_gradients_of_their_own_weights():
    *tensors, options = options_cases.make((), torch.float32, q_len=5, kv_len=40, dim=16, v_dim=8)
    options["indices"] = make_indices((2, 5, 20), 40)
    check([tensors[0] * 300, *tensors[1:]], options)


def test_an_index_past_the_keys_is_named_and_nothing_is_written():
    *tensors, options = options_cases.make((), torch.float32, q_len=9, kv_len=30)
    for dtype in (torch.int32, torch.int64):
        indices = make_indices((2, 9, 8), 30, dtype, holes=False)
        indices[1, 4, 3] = 30
        with pytest.raises(
            ValueError, match=r"indices: .* below the number of keys, 30 .* got 30 at number 3 of row 13"
        ):
            attnjourney.sparse_attention(*tensors, indices, enable_gqa=True)
    indices[1, 4, 3] = 2**40
    with pytest.raises(ValueError, match=r"got 1099511627776 at number 3 of row 13"):
        attnjourney.sparse_attention(*tensors, indices, enable_gqa=True)
    with pytest.raises(ValueError, match=r"key_lengths: expected numbers from 0 to 30, got 31 at 1"):
        attnjourney.sparse_attention(
            *tensors, indices.clamp(max=29), enable_gqa=True, key_lengths=torch.tensor([3, 31])
        )


def test_many_indices_are_checked_in_order():
    query, key = torch.zeros(1, 1, 3000, 4), torch.zeros(1, 1, 9, 4)
    indices = torch.zeros(1, 3000, 60, dtype=torch.int64)
    indices[0, 2000:, 7], indices[0, 2999, 2] = 11, 10
    with threads(4), pytest.raises(ValueError, match="got 11 at number 7 of row 2000"):
        attnjourney.sparse_attention(query, key, key, indices)


def test_memory_follows_the_visible_pairs():
    query = torch.randn(1, 1, 20_000, 8).requires_grad_()
    key = torch.randn(1, 1, 20_000, 8).requires_grad_()
    indices = make_indices((1, 20_000 // 10, 4), 200, torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved = []
        out = attnjourney.sparse_attention(query, key, key, indices, query_block_size=10)
    assert sum(t.numel() for t in saved) <= 4 * 20_000 * 8 + 3 * 20_000 + indices.numel()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key)))
