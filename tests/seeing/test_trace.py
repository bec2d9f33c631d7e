"""attnjourney.trace: every stage equals the reference's, and the last one what the fused operator gives."""

import math

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.reference.dropout import dropout_keep_mask
from tests.support.options_cases import OPTIONS, make
from tests.support.testing import DTYPES, assert_close_to_reference, plain_run, random_tensor

SCORES = torch.tensor(
    [
        [-0.012167113, -0.55046248, -0.37711906, 0.39070404],
        [0.3097055, -0.17063819, -0.31822443, -0.48890033],
        [-0.088825345, 0.17663771, 0.49089196, -0.4052847],
        [-0.2706871, 0.59133291, 0.0097594587, 0.29229057],
    ],
    dtype=torch.float64,
)


def worked_example(**options):
    """One head, four tokens, d = 4: q = 2 * scores and k = 1, so that q k^T / sqrt(4) are the scores."""
    eye = torch.eye(4, dtype=torch.float64)[None, None]
    return attnjourney.trace(2 * SCORES[None, None], eye, eye, **options)


def test_the_worked_example_digit_by_digit():
    seen = worked_example(is_causal=True)
    assert torch.equal(seen.scores[0, 0], SCORES)
    assert torch.equal(seen.mask[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert torch.equal(seen.masked_scores[0, 0], SCORES.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf))
    expected = [
        ["1.0000000", "0.0000000", "0.0000000", "0.0000000"],
        ["0.6178290", "0.3821710", "0.0000000", "0.0000000"],
        ["0.2445246", "0.3188685", "0.4366069", "0.0000000"],
        ["0.1550976", "0.3672617", "0.2053059", "0.2723348"],
    ]
    assert [[f"{n:.7f}" for n in row] for row in seen.weights[0, 0].tolist()] == expected
    assert torch.equal(seen.output, seen.weights)  # the values are the identity


def test_inverted_mask_polarity():
    """The signature of a mask of True = hidden given where True = visible is meant: row i attends to what follows it,
    the last row, which sees nothing then, is not uniform but 0, and gives no NaN."""
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    wrong = worked_example(attn_mask=hidden)
    row = wrong.weights[0, 0, 0]
    by_dropout = [n / 0.9 for n in row.tolist()]  # where dropout .1 keeps them
    assert [f"{n:.7f}" for n in by_dropout[:3]] == ["0.0000000", "0.2338077", "0.2780615"]
    assert f"{by_dropout[3]:.6f}" == "0.599242"
    assert wrong.weights[0, 0, 2].tolist() == [0, 0, 0, 1] and f"{1 / 0.9:.7f}" == "1.1111111"
    assert not wrong.weights[0, 0, 3].any() and not wrong.output[0, 0, 3].any()
    assert wrong.lse[0, 0, 3] == -math.inf
    # what code without an empty-row rule gives there: softmax over four equal scores
    assert [f"{n / 0.9:.7f}" for n in torch.full((4,), -1e9).softmax(-1).tolist()] == ["0.2777778"] * 4
    assert torch.equal(worked_example(attn_mask=~hidden).weights, worked_example(is_causal=True).weights)
    # the layer of torch.nn.MultiheadAttention has the other polarity, and its module too
    x = random_tensor((1, 4, 8), torch.float64, 1, outliers=False)
    layer = attnjourney.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    _, weights = layer(x, x, x, attn_mask=hidden)
    assert not weights[0][hidden].any() and weights[0][~hidden].all()


@pytest.mark.parametrize("name", [*OPTIONS, "sinks query_lengths", "alibi bottom_right key_lengths"])
def test_every_option(name):
    for dtype in DTYPES:
        q, k, v, arguments = make(name.split(), dtype)
        out, lse = attnjourney.attention(q, k, v, return_lse=True, **arguments)
        seen = attnjourney.trace(q, k, v, **arguments)
        wide = {n: double(x) for n, x in arguments.items()}
        exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), return_lse=True, **wide)
        plain, rounding = plain_of(q, k, v, arguments)
        for mine in (seen.output, out):
            assert mine.dtype == dtype
            assert_close_to_reference(mine, plain[0], exact, name=f"output, {name}", rounding=rounding[0])
        for mine in (seen.lse, lse):
            assert_close_to_reference(mine, plain[1].to(mine.dtype), exact_lse, name="lse", rounding=rounding[1])
        no_dropout = {n: x for n, x in wide.items() if not n.startswith("dropout")}
        weights = reference.attention_weights(q.double(), k.double(), **no_dropout)
        torch.testing.assert_close(
            seen.weights.double(), weights, atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=0
        )
        assert torch.equal(seen.mask, weights > 0)
        if "kept" in seen:
            assert torch.equal(seen.kept, dropout_keep_mask(arguments["dropout_seed"], 2, 4, 9, 11, 0.25))


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def plain_of(q, k, v, arguments):
    arguments = dict(arguments)
    keep = None
    if "dropout_seed" in arguments:
        keep = dropout_keep_mask(arguments.pop("dropout_seed"), 2, 4, 9, 11, arguments["dropout_p"])
    mask = arguments.pop("attn_mask", None)
    return plain_run((q, k, v, mask), torch.zeros_like(q[..., : v.shape[-1]]), keep=keep, **arguments)


@pytest.mark.parametrize(
    "names", [("dropout", "mask", "sinks", "alibi_per_item", "query_lengths"), ("bool_mask", "left")]
)
def test_chosen_rows_and_heads(names):
    q, k, v, arguments = make(names)
    whole = attnjourney.trace(q, k, v, **arguments)
    part = attnjourney.trace(q, k, v, rows=[-1, 3, 0], heads=[3, 1], **arguments)
    assert part.rows.tolist() == [8, 3, 0] and part.heads.tolist() == [3, 1]
    assert list(part) == list(whole)
    for name, x in whole.items():
        expected = x if name in ("key", "value") else x.index_select(2, part.rows)
        torch.testing.assert_close(part[name], expected.index_select(1, part.heads), atol=1e-14, rtol=1e-13)


def test_dropout_follows_manual_seed():
    q = random_tensor((2, 3, 20, 8), seed=1, outliers=False)
    torch.manual_seed(4)
    out = attnjourney.attention(q, q, q, dropout_p=0.4)
    torch.manual_seed(4)
    seen = attnjourney.trace(q, q, q, dropout_p=0.4, rows=range(5, 9))
    torch.testing.assert_close(seen.output, out[:, :, 5:9])
    assert torch.equal(seen.kept, seen.dropped_weights > 0)


def test_shapes():
    """Every rank, broadcast heads and batches, no keys, no rows; NaN in a hidden key and value stays hidden."""
    x = random_tensor((5, 4), torch.float64, 1, outliers=False)
    for shape_q, shape_k in (
        ((), ()),
        ((3,), (3,)),
        ((3,), (1,)),
        ((2, 3), (1, 3)),
        ((2, 2, 4), (2, 2, 1)),
        ((1,), (3,)),
    ):
        q, k = x.expand(*shape_q, 5, 4), x.expand(*shape_k, 5, 4)
        seen = attnjourney.trace(q, k, k, is_causal=True)
        out = attnjourney.attention(q, k, k, is_causal=True)
        torch.testing.assert_close(seen.output, out, atol=1e-14, rtol=1e-13)
    for keys, rows in ((0, 5), (5, 0)):
        out = attnjourney.trace(x[:rows], x[:keys], x[:keys]).output
        assert torch.equal(out, torch.zeros(rows, 4, dtype=torch.float64))
    k = x.clone()
    k[3:] = math.nan
    seen = attnjourney.trace(x, k, k, is_causal=True)
    assert seen.output[:3].isfinite().all() and seen.output[3:].isnan().all()


def test_the_result_as_mapping_and_table():
    seen = worked_example(is_causal=True, softcap=5.0)
    assert list(seen)[:5] == ["query", "key", "value", "scores", "softcapped"] and len(seen) == len(seen.as_dict())
    assert seen["lse"] is seen.lse is seen.as_dict()["lse"] and "weights" in dir(seen)
    with pytest.raises(KeyError, match="alibi.*expected a stage"):
        seen["alibi"]
    with pytest.raises(AttributeError, match="alibi.*expected a stage"):
        seen.alibi  # noqa: B018
    lines = str(worked_example(is_causal=True)).splitlines()
    row = next(i for i, line in enumerate(lines) if "│ weights " in line and "0 │" in line)
    assert [cell.strip() for cell in lines[row + 2].split("│")[2:-1]] == ["2", "0.2445", "0.3189", "0.4366", "·"]
    assert any("●" in line for line in lines) and any("(1, 1, 4, 4)" in line for line in lines)
    html = seen._repr_html_()  # a notebook shows the same
    assert html.startswith("<pre") and "●" in html and "softcapped" in html
    big = torch.zeros(1, 8, 40, 16)
    text = str(attnjourney.trace(big, big, big))
    assert "ask for rows= and heads=" in text and "0 .. 39" in text and len(text.splitlines()) < 20
    assert repr(seen).startswith("Trace(attention: query (1, 1, 4, 4), key")


def test_errors():
    q = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="rows: expected numbers from -5 to 4, got 5"):
        attnjourney.trace(q, q, q, rows=[5])
    with pytest.raises(ValueError, match="key: expected the head_dim of query"):
        attnjourney.trace(q, q[..., :2], q)
    with pytest.raises(RuntimeError, match="dtype"):
        attnjourney.trace(q, q.double(), q)
    with pytest.raises(ValueError, match="dropout_p"):
        attnjourney.trace(q, q, q, dropout_p=2.0)
    with pytest.raises(ValueError, match="causal_alignment"):
        attnjourney.trace(q, q, q, causal_alignment="middle")


def test_memory_follows_the_rows():
    q = torch.randn(1, 2, 32768, 16)
    mask = torch.zeros(32768, dtype=torch.bool)
    with torch.profiler.profile(profile_memory=True) as profile:
        seen = attnjourney.trace(q, q, q, mask, 0.1, rows=[-1, 7], heads=[1])
    assert seen.weights.shape == (1, 1, 2, 32768)
    assert max(e.self_cpu_memory_usage for e in profile.events()) < 64 * 2**20  # N x N bits alone would be 128 MiB


@pytest.mark.cuda
def test_on_a_device():
    q, k, v, arguments = make(["causal", "key_lengths"], torch.bfloat16, dim=32, v_dim=32)
    q, k, v = (x.cuda() for x in (q, k, v))
    arguments["key_lengths"] = arguments["key_lengths"].cuda()
    with attnjourney.capture(None, rows=[-1, 2]) as captured:
        out = attnjourney.attention(q, k, v, **arguments)
    seen = attnjourney.trace(q, k, v, rows=[-1, 2], **arguments)
    torch.testing.assert_close(seen.output, out[:, :, [8, 2]])
    torch.testing.assert_close(captured[0].weights, seen.weights.bfloat16())
