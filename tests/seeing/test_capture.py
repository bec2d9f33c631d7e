"""attnjourney.capture of every operator, against the fp64 reference of its own softmax."""

import sys

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.sparse.test_sparse_attention import make_indices, masked
from tests.support.decode_checks import dense_cache, paged
from tests.support.options_cases import OPTIONS, make
from tests.support.testing import DTYPES, assert_close_to_reference, random_tensor

MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)


def weights_of(run):
    """The weights in `run`, a call of the reference in float64: what its only softmax multiplies the values with."""
    seen = []
    original = reference.attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        seen.append(reference.attention_weights(query, key, attn_mask, is_causal, **options))
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("mha", "gpt_attention", "gqa", "mla"):
            patch.setattr(sys.modules[f"attnjourney.reference.{module}"], "attention", spy)
        run()
    return seen[-1]


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def double(x):
    return x.double() if is_floating(x) else x


def tree(to, options):
    return {name: to(x) for name, x in options.items()}


def layers(dtype=torch.float64):
    """name -> (operator's name, its arguments): the layers as bare operators."""
    x, other = (random_tensor(shape, dtype, s, outliers=False) for s, shape in enumerate([(2, 7, 16), (2, 9, 16)]))
    w = [random_tensor((n, m), dtype, 10 + i, outliers=False) / 4 for i, (n, m) in enumerate([(48, 16), (16, 16)])]
    half = [random_tensor((8, 16), dtype, 20 + i, outliers=False) / 4 for i in range(2)]
    cos, sin = (f(torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.1])).to(dtype) for f in (torch.cos, torch.sin))
    blocked = random_tensor((7, 9), seed=3, outliers=False) > 1
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    floating = random_tensor((8, 7, 9), dtype, 4, outliers=False)
    mla = (x, 4, 4, 4, 4, None, None, w[0][:32], w[0][:12], w[0][0, :8], w[0][:32, :8], w[1])
    return {
        "mha, self": ("mha", (x, x, x, 4, w[0], None, w[1], None), {"is_causal": True}),
        "mha, cross": ("mha", (x, other, other, 4, w[0], w[0][:, 0], w[1], None), {"attn_mask": blocked}),
        "mha, three": ("mha", (x, other, 2 * other, 4, w[0], None, w[1], None), {"attn_mask": floating}),
        "mha, value": ("mha", (x, x, 2 * x, 4, w[0], None, w[1], None), {}),
        "mha, padding": ("mha", (x, other, other, 4, w[0], None, w[1], None), {"key_padding_mask": padding}),
        "mha, masks": (
            "mha",
            (x, other, other, 4, w[0], None, w[1], None),
            {"attn_mask": floating, "key_padding_mask": padding, "is_causal": True},
        ),
        "mha, bool masks": (
            "mha",
            (x, other, other, 4, w[0], None, w[1], None),
            {"attn_mask": blocked, "key_padding_mask": padding, "is_causal": True},
        ),
        "gpt": ("gpt_attention", (x, 4, w[0], w[0][:, 1], w[1], None), {"dropout_p": 0.2}),
        "gqa": ("gqa", (x, 4, 2, w[1], *half, w[1]), {"cos": cos, "sin": sin}),
        "mla": ("mla", mla, {"cos": cos, "sin": sin, "scale": 0.7}),
    }


LAYER_ULPS = 16


@pytest.mark.parametrize("case", layers())
def test_layers(case):
    for dtype in DTYPES:
        name, arguments, options = layers(dtype)[case]
        exact, plain_weights = (
            weights_of(lambda to=to: getattr(reference, name)(*map(to, arguments), **tree(to, options)))  # noqa: B023
            for to in (double, lambda x: x)
        )
        call = getattr(torch.ops.attnjourney, name)
        for mode in MODES:
            torch.manual_seed(0)
            with mode():
                plain = call(*arguments, **options)
            torch.manual_seed(0)
            with mode(), attnjourney.capture(None) as seen:
                out = call(*arguments, **options)
            assert torch.equal(out, plain), (case, dtype, mode)
            (record,) = seen
            assert record.name == f"{name}.0" and record.operator == name and record.step == 0
            assert record.weights.dtype == dtype and record.weights.shape == exact.shape
            assert not record.weights.requires_grad
            # the scores are those of projections, which round before them: in float64, plain PyTorch is the reference
            rounding = LAYER_ULPS * torch.finfo(dtype).eps * exact.abs()
            label = f"weights, {dtype}, {mode.__name__}"
            assert_close_to_reference(record.weights, plain_weights, exact, name=label, rounding=rounding)


@pytest.mark.parametrize("name", [*OPTIONS, "return_lse"])
def test_attention_with_every_option(name):
    q, k, v, arguments = make([] if name == "return_lse" else [name])
    expected = {n: x for n, x in arguments.items() if not n.startswith("dropout")}
    expected = reference.attention_weights(q, k, **expected)
    for mode in MODES:
        with mode(), attnjourney.capture(None, rows=[-1, 2], heads=[3, 0]) as seen:
            result = attnjourney.attention(q, k, v, return_lse=name == "return_lse", **arguments)
        (record,) = seen
        torch.testing.assert_close(record.weights, expected[:, [3, 0]][:, :, [8, 2]])
        assert record.rows.tolist() == [8, 2] and record.heads.tolist() == [3, 0]
        if name == "return_lse":
            assert torch.equal(record.lse, result[1][:, [3, 0]][:, :, [8, 2]])


def test_packed_sequences():
    q, k, v = (random_tensor((n, 4, 8), torch.float64, s, outliers=False) for s, n in enumerate((12, 15, 15)))
    ends_q, ends_k = torch.tensor([0, 3, 3, 10]), torch.tensor([0, 4, 6, 15])
    slopes = random_tensor((3, 4), torch.float64, 5, outliers=False)
    for rows, expected_rows in ((None, [[0, 1, 2], [], list(range(7))]), ([-1, 1], [[2, 1], [], [6, 1]])):
        with attnjourney.capture(None, rows=rows) as seen:
            attnjourney.varlen_attention(q, k, v, ends_q, ends_k, is_causal=True, alibi_slopes=slopes)
        weights = seen[0].weights
        assert weights.shape == (3, 4, 7 if rows is None else 2, 9)
        for b, own in enumerate(expected_rows):
            part = weights[b, :, : len(own), : ends_k[b + 1] - ends_k[b]] if rows is None else weights[b]
            if not own:
                assert not weights[b].any()
                continue
            own_q, own_k = (x[e[b] : e[b + 1]].transpose(0, 1) for x, e in ((q, ends_q), (k, ends_k)))
            exact = reference.attention_weights(own_q, own_k, None, True, alibi_slopes=slopes[b], rows=own)
            torch.testing.assert_close(part[..., : own_k.shape[1]], exact)
            assert not weights[b, ..., own_k.shape[1] :].any()


@pytest.mark.parametrize("kind", ["dense", "paged", "ring"])
def test_decode(kind):
    lengths, dtype = [5, 12, 9], torch.float64
    key, value = dense_cache(lengths, 2, 12, 8, 8, dtype)  # NaN beyond the lengths
    query = random_tensor((3, 4, 2, 8), dtype, 7, outliers=False)
    mask = random_tensor((3, 1, 2, 12), dtype, 8, outliers=False)
    options, keys, stored, place, window = {}, key, key, {}, (-1, -1)
    if kind == "paged":
        stored, value, table = paged(key, value, lengths, 4)
        place = {"block_table": table}
    if kind == "ring":
        window, first = (4, -1), [0, 4, 1]  # 8 slots
        stored = torch.full((3, 2, 8, 8), torch.nan, dtype=dtype)
        for b, n in enumerate(lengths):
            for j in range(first[b], n):
                stored[b, :, j % 8] = key[b, :, j]
        value = stored
        place = {"ring": True}
    options = {"attn_mask": mask, "softcap": 2.0, "window_size": window}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), attnjourney.capture(None) as seen:
            attnjourney.decode(query, stored, value, torch.tensor(lengths), **place, **options)
        (record,) = seen
        for b, n in enumerate(lengths):
            exact = reference.attention_weights(
                query[b], keys[b, :, :n], mask[b, ..., :n], True, softcap=2.0, enable_gqa=True, window_size=window,
                causal_alignment="bottom_right",
            )  # fmt: skip
            start = 0 if kind != "ring" else first[b]
            torch.testing.assert_close(record.weights[b, ..., : n - start], exact[..., start:])
            assert not record.weights[b, ..., n - start :].any()
        assert (record.first_key.tolist() == first) if kind == "ring" else record.first_key is None


def test_latents():
    for dtype in DTYPES:
        query = random_tensor((2, 3, 2, 8 + 4), dtype, 0, outliers=False)
        latent = random_tensor((2, 9, 16 + 4), dtype, 1, outliers=False)
        weight = random_tensor((3 * (8 + 5), 16), dtype, 2, outliers=False) / 4
        lengths = torch.tensor([9, 4])
        with torch.no_grad(), attnjourney.capture(None) as seen:
            attnjourney.mla_decode(query, latent, lengths, weight)
        results = []
        for to in (double, lambda x: x):
            (c, k_rope), up = to(latent).split([16, 4], -1), to(weight).view(3, 13, 16)[:, :8]
            key = torch.cat([c.unsqueeze(1) @ up.mT, k_rope.unsqueeze(1).expand(-1, 3, -1, -1)], -1)
            options = dict(key_lengths=lengths, causal_alignment="bottom_right")
            results.append(reference.attention_weights(to(query), key, None, True, **options))
        assert seen[0].weights.dtype == dtype
        assert_close_to_reference(seen[0].weights, results[1], results[0], name=f"weights, {dtype}")


@pytest.mark.parametrize("names, twice", [((), False), (("causal", "bottom_right", "scale", "softcap", "sinks"), True)])
@pytest.mark.parametrize("kv_heads, block", [(1, 1), (2, 4)])
def test_sparse_attention(names, twice, kv_heads, block):
    """The weights of dense attention that sees the same pairs, for chosen rows of one block and of several."""
    for dtype in DTYPES:
        *tensors, options = make(names, dtype, 2, 4, kv_heads, q_len=9, kv_len=30)
        shape = (2, *([kv_heads] if block > 1 else []), -(-9 // block), 8)
        chosen = dict(indices=make_indices(shape, 30, twice=twice), query_block_size=block)
        mask, _ = masked(*tensors, **chosen)
        exact, plain = (
            reference.attention_weights(*map(to, tensors[:2]), **tree(to, {**options, **mask}))
            for to in (double, lambda x, dtype=dtype: x.to(dtype) if is_floating(x) else x)
        )
        with torch.no_grad(), attnjourney.capture(None, rows=[-1, 2], heads=[3, 0]) as seen:
            _, lse = attnjourney.sparse_attention(*tensors, **chosen, **options, return_lse=True)
        (record,) = seen
        exact, plain = (x[:, [3, 0]][:, :, [8, 2]] for x in (exact, plain))
        assert record.name == "sparse_attention.0" and record.weights.dtype == dtype
        assert torch.equal(record.lse, lse[:, [3, 0]][:, :, [8, 2]])
        rounding = 4 * torch.finfo(dtype).eps * exact
        assert_close_to_reference(record.weights, plain, exact, name=f"weights, {dtype}", rounding=rounding)


def test_latents_that_indices_name():
    query, latent = torch.randn(2, 3, 2, 8 + 4), torch.randn(2, 9, 16 + 4)
    weight, lengths = torch.randn(3 * (8 + 5), 16), torch.tensor([9, 4])
    with torch.no_grad(), attnjourney.capture(None) as seen:
        attnjourney.mla_decode(query, latent, lengths, weight)
        attnjourney.mla_decode(query, latent, lengths, weight, indices=torch.arange(9).expand(2, 2, 9))
    assert seen.names == ["mla_decode.0", "sparse_attention.1"]
    torch.testing.assert_close(seen[1].weights, seen[0].weights, atol=1e-5, rtol=1e-4)


def test_devices_without_the_operator_of_weights(monkeypatch):
    """There the stages in plain PyTorch serve, in the same memory."""
    monkeypatch.setattr("attnjourney.seeing.recording._scores.FUSED", ())
    for dtype in DTYPES:
        q, k, v, arguments = make(["bool_mask", "alibi", "sinks", "key_lengths"], dtype)
        with torch.no_grad(), attnjourney.capture(None, rows=[-1, 2], heads=[3, 0]) as seen:
            attnjourney.attention(q, k, v, **arguments)
        expected = attnjourney.attention_weights(q, k, rows=[8, 2], heads=[3, 0], **arguments)
        assert seen[0].weights.dtype == dtype
        torch.testing.assert_close(seen[0].weights, expected)
