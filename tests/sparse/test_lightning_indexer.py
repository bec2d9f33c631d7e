"""The lightning indexer: the keys it chooses, and the loss that trains it, beside the formulas in float64."""

import math

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.reference.sparse_attention import indexer_scores
from tests.sparse.test_sparse_attention import make_indices
from tests.support.testing import (
    DTYPES,
    GRADIENT_FACTOR,
    LAYOUTS,
    OUTPUT_FACTOR,
    assert_close_to_reference,
    pairs,
    random_tensor,
    row_id,
    threads,
)


def whole_numbers(*shape, seed, dtype, low=-3, high=3):
    """Scores of them are exact in every dtype, and many are equal."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_inputs(dtype, batch=2, heads=3, rows=9, keys=40, dim=8):
    return (
        whole_numbers(batch, heads, rows, dim, seed=1, dtype=dtype),
        whole_numbers(batch, keys, dim, seed=2, dtype=dtype),
        whole_numbers(batch, heads, rows, seed=3, dtype=dtype),
    )


ROWS = pairs(
    dtype=DTYPES,
    heads=[1, 3, 8, 13],
    lengths=[(1, 40), (9, 9), (70, 700), (33, 5), (130, 130), (1, 5000), (3, 4500)],
    dim=[1, 16, 33, 128],
    topk=[1, 7, 64, 1000],
    is_causal=[False, True],
    causal_alignment=["top_left", "bottom_right"],
    key_lengths=[False, True],
    layout=["contiguous", "transposed", "packed", "offset", "columns"],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_the_keys_chosen(row):
    row = dict(row)
    (rows, keys), layout = row.pop("lengths"), LAYOUTS[row.pop("layout")]
    inputs = exact_inputs(row.pop("dtype"), 2, row.pop("heads"), rows, keys, row.pop("dim"))
    topk, lengths = row.pop("topk"), row.pop("key_lengths")
    options = {**row, "scale": 0.5, "key_lengths": torch.tensor([keys, keys // 2]) if lengths else None}
    expected = reference.lightning_indexer(*inputs, topk, return_scores=True, **options)
    with threads(3):
        found = attnjourney.lightning_indexer(*(layout(x) for x in inputs), topk, return_scores=True, **options)
    assert found[0].dtype == torch.int32 and found[1].dtype == expected[1].dtype
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_the_reference_takes_the_highest():
    query, key, weights = exact_inputs(torch.float64)
    indices, found = reference.lightning_indexer(query, key, weights, 5, is_causal=False, return_scores=True)
    scores = indexer_scores(query, key, weights)
    assert torch.equal(found.sort(-1, descending=True).values, scores.topk(5).values)
    assert torch.equal(scores.gather(-1, indices.long()), found) and (indices.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_any_numbers(dtype):
    query, key = (random_tensor(s, dtype, i, outliers=False) for i, s in enumerate([(2, 5, 20, 72), (2, 300, 72)]))
    weights = random_tensor((2, 5, 20), dtype, 3, outliers=False)
    indices, scores = attnjourney.lightning_indexer(query, key, weights, 40, scale=0.3, return_scores=True)
    exact = indexer_scores(query.double(), key.double(), weights.double(), scale=0.3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = indexer_scores(query.to(wide), key.to(wide), weights.to(wide), scale=0.3)
    there = indices >= 0
    exact, plain = (x.gather(-1, indices.clamp(min=0).long())[there] for x in (exact, plain))
    rounding = 8 * torch.finfo(wide).eps * exact.abs().max().expand_as(exact)
    assert_close_to_reference(scores[there], plain, exact, OUTPUT_FACTOR, "scores", rounding)
    assert (scores[~there] == -math.inf).all()


def test_numbers_that_are_not_finite():
    """A NaN shows: its key is chosen first. A minus infinity is a score, too."""
    query, key, weights = exact_inputs(torch.float32, rows=1, keys=5000)
    key[0, 4321, 3], weights[1] = math.nan, -weights[1].abs() - 1
    key[1, 77] = query[1, :, 0].sum(0) * math.inf
    key = key.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    key[0, 4321, 3] = math.nan
    options = dict(is_causal=False, return_scores=True)
    for topk in (1, 5, 4999, 5000):
        found = attnjourney.lightning_indexer(query, key, weights, topk, **options)
        expected = reference.lightning_indexer(query, key, weights, topk, **options)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
        assert 4321 in found[0][0]


@pytest.mark.parametrize("rows, keys", [(1, 20_000), (150, 3000)])
def test_any_number_of_threads(rows, keys):
    inputs = [random_tensor(s, torch.float32, i) for i, s in enumerate([(1, 4, rows, 32), (1, keys, 32), (1, 4, rows)])]
    found = []
    for count in (1, 2, 5):
        with threads(count):
            found.append(
                attnjourney.lightning_indexer(*inputs, 300, causal_alignment="bottom_right", return_scores=True)
            )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0]))


@pytest.mark.parametrize("empty", ["batch", "heads", "rows", "keys"])
def test_nothing_there(empty):
    batch, heads, rows, keys = (0 if empty == n else 3 for n in ("batch", "heads", "rows", "keys"))
    inputs = exact_inputs(torch.float32, batch, heads, rows, keys)
    found = attnjourney.lightning_indexer(*inputs, 2, is_causal=False, return_scores=True)
    expected = reference.lightning_indexer(*inputs, 2, is_causal=False, return_scores=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


# ---------------------------------------------------------------------------------------------------- the loss

NAMES = ("index_query", "index_key", "weights")
LOSS_ROWS = pairs(
    dtype=DTYPES,
    index_heads=[1, 3, 8, 13],
    heads=[(4, 4), (4, 1), (6, 2), (140, 1)],
    lengths=[(1, 40), (9, 11), (30, 300)],
    dims=[(8, 16), (33, 20), (64, 3)],
    k=[1, 3, 32],
    index=[torch.int64, torch.int32],
    layout=["contiguous", "transposed", "packed", "columns"],
)


def loss_inputs(dtype, index_heads=3, heads=(4, 2), lengths=(9, 11), dims=(8, 16), layout="contiguous"):
    (rows, keys), (index_dim, dim) = lengths, dims
    shapes = [
        (2, index_heads, rows, index_dim), (2, keys, index_dim), (2, index_heads, rows), (2, heads[0], rows, dim),
        (2, heads[1], keys, dim),
    ]  # fmt: skip
    return [random_tensor(s, dtype, i, layout, outliers=False) for i, s in enumerate(shapes)]


def loss_run(function, inputs, indices, dtype=None, **options):
    tensors = [x.detach().to(dtype or x.dtype) for x in inputs]
    leaves = [x.requires_grad_() for x in tensors[:3]]
    loss = function(*leaves, *tensors[3:], indices, enable_gqa=True, **options)
    grad = random_tensor(loss.shape, torch.float64, 9, outliers=False).to(loss.dtype)
    grads = torch.autograd.grad(loss, leaves, grad)
    return {"loss": loss.detach(), **{f"grad_{name}": g for name, g in zip(NAMES, grads)}}


def check_loss(inputs, indices, **options):
    dtype, wide = inputs[0].dtype, torch.promote_types(inputs[0].dtype, torch.float32)
    actual = loss_run(attnjourney.lightning_indexer_loss, inputs, indices, **options)
    exact = loss_run(reference.lightning_indexer_loss, inputs, indices, torch.float64, **options)
    plain = loss_run(reference.lightning_indexer_loss, inputs, indices, wide, **options)
    ulps = 40 * torch.finfo(wide).eps
    for name, x in actual.items():
        assert x.dtype == (wide if name == "loss" else dtype)
        factor = OUTPUT_FACTOR if name == "loss" else GRADIENT_FACTOR
        rounding = exact[name].abs() * 4 * torch.finfo(x.dtype).eps + ulps * exact[name].abs().max().clamp_min(1.0)
        assert_close_to_reference(x, plain[name], exact[name], factor, name, rounding)
    return actual


@pytest.mark.parametrize("row", LOSS_ROWS, ids=row_id)
def test_loss_and_gradients(row):
    row = dict(row)
    k, index = row.pop("k"), row.pop("index")
    rows, keys = row["lengths"]
    check_loss(loss_inputs(**row), make_indices((2, rows, k), keys, index), index_scale=0.4, scale=0.3)


def test_the_loss_is_the_divergence_of_the_two_distributions():
    """Written once more, from dense attention."""
    inputs = loss_inputs(torch.float64, lengths=(9, 30))
    indices = make_indices((2, 9, 12), 30)
    index_query, index_key, weights, query, key = inputs
    seen = torch.zeros(2, 9, 31, dtype=torch.bool).scatter_(2, indices.masked_fill(indices < 0, 30), True)[..., :30]
    attention = reference.attention_weights(query, key, seen[:, None], enable_gqa=True)
    target = attention.sum(1) / attention.sum((1, 3))[..., None]
    logits = indexer_scores(index_query, index_key, weights).masked_fill(~seen, -math.inf).log_softmax(-1)
    expected = torch.nn.functional.kl_div(logits, target, reduction="none").nan_to_num(0.0).masked_fill(~seen, 0.0)
    for function in (attnjourney, reference):
        loss = function.lightning_indexer_loss(*inputs, indices, enable_gqa=True)
        torch.testing.assert_close(loss, expected.sum(-1), rtol=1e-10, atol=1e-12)


def test_the_loss_teaches_the_indexer_what_attention_attends_to():
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 64, 16), torch.randn(1, 1, 64, 16)
    indices = torch.arange(64).expand(1, 64, 64).tril().masked_fill(torch.ones(64, 64).triu(1).bool(), -1)
    leaves = [torch.randn(s).mul_(0.3).requires_grad_() for s in ((1, 4, 64, 16), (1, 64, 16), (1, 4, 64))]
    optimizer, losses = torch.optim.Adam(leaves, 0.05), []
    for _ in range(60):
        loss = attnjourney.lightning_indexer_loss(*leaves, query, key, indices, enable_gqa=True).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    chosen = attnjourney.lightning_indexer(*leaves, 8)[0, 63]
    weights = attnjourney.attention_weights(query, key.expand(1, 4, 64, 16))[0, :, 63].mean(0)
    assert weights[chosen.long()].sum() > 0.8 * weights.topk(8).values.sum()


@pytest.mark.parametrize("empty", ["rows", "keys", "indices", "all"])
def test_the_loss_of_nothing(empty):
    rows, keys, k = (0 if empty == n else 5 for n in ("rows", "keys", "indices"))
    indices = make_indices((2, rows, k), keys, holes=False)
    if empty == "all":
        indices[:, 2] = -1
    results = loss_run(attnjourney.lightning_indexer_loss, loss_inputs(torch.float32, lengths=(rows, keys)), indices)
    for name, x in results.items():
        nothing = (
            x if empty != "all" else x[:, 2] if name == "loss" else x[:, :, 2] if name != "grad_index_key" else x[:0]
        )
        assert torch.equal(nothing, torch.zeros_like(nothing)), name


def test_gradients_of_the_loss_on_any_number_of_threads():
    inputs = loss_inputs(torch.float32, index_heads=8, heads=(8, 1), lengths=(200, 600), dims=(32, 32))
    indices = make_indices((2, 200, 150), 600)
    for count in (1, 2, 5):
        with threads(count):
            results = check_loss(inputs, indices)
            again = loss_run(attnjourney.lightning_indexer_loss, inputs, indices)
            assert all(torch.equal(x, again[name]) for name, x in results.items())


def test_query_and_key_are_constants_of_the_loss():
    inputs = [x.requires_grad_() for x in loss_inputs(torch.float32)]
    loss = attnjourney.lightning_indexer_loss(*inputs, make_indices((2, 9, 4), 11), enable_gqa=True)
    loss.sum().backward()
    assert [x.grad is None for x in inputs] == [False] * 3 + [True] * 2
