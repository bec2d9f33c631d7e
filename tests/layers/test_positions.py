"""Rotary embeddings, their frequencies, the sinusoidal table and ALiBi slopes, beside published numbers."""

import math

import pytest
import torch

import attnjourney
from attnjourney import alibi_slopes, rope, rope_frequencies, sinusoidal_positions
from attnjourney.reference.rotary import rotate_half_split, rotate_interleaved
from tests.support.testing import DTYPES, assert_close_to_reference, random_tensor

ops = torch.ops.attnjourney
double = torch.float64


def by_complex_numbers(x, angle, interleaved):
    """The definition: pair j as a complex number times e^(i angle); angle (seq, half) or (batch, seq, half)."""
    half = angle.shape[-1]
    angle = angle.unsqueeze(-3)
    pairs = x[..., : 2 * half]
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def angles(positions, dim, theta=10000.0):
    return positions.double().unsqueeze(-1) * theta ** (-torch.arange(0, dim, 2).double() / dim)


# ---------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_its_gradient(dtype, interleaved):
    x = random_tensor((2, 3, 5, 10), dtype)
    ids = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 3, 100, 2]])
    for positions in (ids[0], ids):
        leaf = x.clone().requires_grad_()
        out = rope(leaf, rotary_dim=8, interleaved=interleaved, position_ids=positions)
        expected = by_complex_numbers(x.double(), angles(positions, 8), interleaved)
        assert out.dtype == dtype
        # one rounding of a sum of two products: its size is that of the pair, not of the result
        size = expected.abs().amax(-1, keepdim=True).expand_as(expected)
        rounding = 4 * torch.finfo(dtype).eps * size
        assert_close_to_reference(out, expected.to(dtype), expected, rounding=rounding)
        assert torch.equal(out[..., 8:], x[..., 8:])  # what does not turn passes through bit by bit
        gradient = torch.autograd.grad(out, leaf, x)[0]
        back = by_complex_numbers(x.double(), -angles(positions, 8), interleaved)
        assert_close_to_reference(gradient, back.to(dtype), back, rounding=rounding)


@pytest.mark.parametrize("layout", ["transposed", "packed", "stepped_last", "offset"])
def test_layouts(layout):
    x = random_tensor((2, 3, 5, 8), double)
    expected = rope(x)
    assert torch.equal(rope(random_tensor((2, 3, 5, 8), double, layout=layout)), expected)
    assert expected.is_contiguous()
    wide = random_tensor((2, 3, 5, 8), double, layout="packed")
    cos, sin = angles(torch.arange(5), 8).cos(), angles(torch.arange(5), 8).sin()
    ops.rope_(wide, cos, sin)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("batched_tables", [False, True])
def test_every_derivative(batched_tables):
    x = random_tensor((2, 2, 3, 4), double, outliers=False).requires_grad_()
    angle = random_tensor((2, 3, 2) if batched_tables else (3, 2), double)
    f = lambda x: ops.rope(x, angle.cos(), angle.sin(), interleaved=True)  # noqa: E731
    assert torch.autograd.gradcheck(
        f, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(f, x)
    stacked = torch.stack([x, 2 * x, -x]).detach()
    tables = torch.stack([angle, angle + 1, -angle])
    per_sample = torch.func.vmap(lambda x, a: ops.rope(x, a.cos(), a.sin(), interleaved=True))(stacked, tables)
    for i in range(3):
        expected = ops.rope(stacked[i], tables[i].cos(), tables[i].sin(), interleaved=True)
        torch.testing.assert_close(per_sample[i], expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.func.vmap(f, 1, 1)(stacked.movedim(0, 1)), torch.stack([f(s) for s in stacked], 1))


def test_opcheck_and_compile():
    x = random_tensor((2, 2, 3, 4), torch.float32).requires_grad_()
    angle = random_tensor((3, 2), torch.float32)
    torch.library.opcheck(ops.rope.default, (x, angle.cos(), angle.sin()), dict(interleaved=True))
    torch.library.opcheck(ops.rope_.default, (x.detach().clone(), angle.cos(), angle.sin()))
    step = lambda x: torch.autograd.grad(rope(x, offset=3).square().cumsum(-1).sum(), x)[0]  # noqa: E731
    compiled = torch.compile(lambda x: rope(x, offset=3), fullgraph=True, backend="aot_eager")
    out = compiled(x)
    torch.testing.assert_close(torch.autograd.grad(out.square().cumsum(-1).sum(), x)[0], step(x))


def test_layer_tables_by_sequence_are_the_layer_of_each_sequence():
    """gqa and mla with cos and sin (batch, seq, half)."""
    x = random_tensor((2, 5, 8), double, outliers=False)
    angle = angles(torch.tensor([[0, 1, 2, 3, 4], [9, 0, 5, 6, 30]]), 4)
    weights = [random_tensor(s, double, seed=i, outliers=False) for i, s in enumerate(((8, 8), (4, 8), (4, 8), (8, 8)))]
    gqa = lambda x, a: ops.gqa(x, 2, 1, *weights, cos=a.cos(), sin=a.sin())  # noqa: E731
    shapes = ((16, 8), (10, 8), (6,), (14, 6), (8, 6))
    latent = [random_tensor(s, double, seed=i, outliers=False) for i, s in enumerate(shapes)]
    mla = lambda x, a: ops.mla(x, 2, 4, 4, 3, None, None, *latent, cos=a.cos(), sin=a.sin())[..., :8]  # noqa: E731
    for layer in (gqa, mla):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        together = layer(leaves[0], angle)
        alone = torch.cat([layer(leaves[1][i : i + 1], angle[i]) for i in range(2)])
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in zip((together, alone), leaves)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_far_positions_turn_in_full_precision(dtype):
    """The angle of position 65536 is right for 16-bit inputs; scores depend on the distance alone."""
    x = random_tensor((1, 1, 4, 128), dtype, outliers=False)
    positions = torch.tensor([0, 1, 8192, 65536])
    expected = by_complex_numbers(x.double(), angles(positions, 128), False)
    error = (rope(x, position_ids=positions).double() - expected).abs()
    assert error.max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    q, k = (random_tensor((1, 1, 1, 128), torch.float32, seed=s, outliers=False) for s in (1, 2))
    score = lambda i, j: (rope(q, offset=i) * rope(k, offset=j)).sum()  # noqa: E731
    torch.testing.assert_close(score(8200, 8192), score(8, 0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(65546, 65536), score(10, 0), rtol=1e-4, atol=1e-4)


ROTARY_LAYERS = {
    "gqa": lambda **options: attnjourney.nn.GroupedQueryAttention(128, 1, 1, rope=10000.0, **options),
    "mla": lambda **options: attnjourney.nn.MultiheadLatentAttention(
        128, 1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=128, v_head_dim=16,
        rope=10000.0, **options,
    ),
}  # fmt: skip


def turned_by(module, x, monkeypatch, **options):
    """cos and sin that a layer's forward turns its heads with."""
    found = []
    tables = attnjourney.nn.rotary.rope_tables
    monkeypatch.setattr(attnjourney.nn.rotary, "rope_tables", lambda *a: found.append(tables(*a)) or found[-1])
    module(x, **options)
    return found[0]


@pytest.mark.parametrize("name", ROTARY_LAYERS)
@pytest.mark.parametrize("cast", ["bfloat16", "float16", "double_and_back", "autocast"])
def test_a_layer_that_is_cast_keeps_its_angles(name, cast, monkeypatch):
    module, x = ROTARY_LAYERS[name](), torch.randn(1, 259, 128)
    positions = torch.cat([torch.tensor([0, 1, 8192]), 65536 + torch.arange(256)])
    options = dict(position_ids=positions)
    if cast == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            cos, sin = turned_by(module, x, monkeypatch, **options)
    else:
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(cast, torch.float32)
        module = module.double() if cast == "double_and_back" else module
        cos, sin = turned_by(module.to(dtype), x.to(dtype), monkeypatch, **options)
    assert cos.dtype == sin.dtype == torch.float32
    expected = angles(positions, 128)
    torch.testing.assert_close(cos.double(), expected.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.double(), expected.sin(), rtol=0, atol=1e-7)
    assert len(torch.cat([cos, sin], -1).unique(dim=0)) == len(positions)


def test_autocast_leaves_positions_apart():
    x = torch.ones(1, 1, 256, 64)
    expected = rope(x, offset=65536)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope(x, offset=65536), expected)
    assert len(expected[0, 0].unique(dim=0)) == 256


def test_an_offset_is_the_rows_of_a_longer_table():
    x = random_tensor((1, 2, 9, 8))
    assert torch.equal(rope(x)[:, :, :4], rope(x[:, :, :4]))
    assert torch.equal(rope(x)[:, :, 5:], rope(x[:, :, 5:], offset=5))  # after the call with offset 0
    assert torch.equal(rope(x, theta=100.0), rope(x, theta=100.0, position_ids=torch.arange(9)))
    assert not torch.equal(rope(x, theta=100.0), rope(x))
    assert rope(x.double()).dtype == double


@pytest.mark.parametrize("interleaved", [False, True])
def test_position_zero_is_the_identity_and_norms_stay(interleaved):
    x = random_tensor((2, 2, 6, 8), double)
    out = rope(x, interleaved=interleaved)
    assert torch.equal(out[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    cos, sin = angles(torch.arange(6), 8).cos(), angles(torch.arange(6), 8).sin()
    plain = rotate_interleaved if interleaved else rotate_half_split
    torch.testing.assert_close(out, plain(x, cos, sin))
    assert not torch.allclose(out, rope(x, interleaved=not interleaved))


def test_partial_rotation():
    for head_dim, rotary_dim in ((4, 2), (5, 4), (4, 4), (5, 0)):
        x = random_tensor((1, 2, 3, head_dim))
        out = rope(x, rotary_dim=rotary_dim)
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])
        if rotary_dim:
            torch.testing.assert_close(out[..., :rotary_dim], rope(x[..., :rotary_dim].contiguous()))
    with pytest.raises(ValueError, match="rotary_dim: expected an even number of at least 0, got 3"):
        rope(torch.zeros(1, 1, 2, 4), rotary_dim=3)


def test_first_called_in_inference_mode_then_trained():
    module = attnjourney.nn.GroupedQueryAttention(8, 2, 1, rope=10000.0)
    x = torch.randn(1, 4, 8)
    with torch.inference_mode():
        module(x)
        rope(x.unsqueeze(1))
    x.requires_grad_()
    assert torch.autograd.grad(module(x).sum() + rope(x.unsqueeze(1)).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("make", [
    lambda: attnjourney.nn.GroupedQueryAttention(8, 2, 1, rope=100.0, dtype=double),
    lambda: attnjourney.nn.MultiheadLatentAttention(
        8, 2, q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, rope=100.0,
        dtype=double),
])  # fmt: skip
def test_left_padded_items_keep_their_own_positions(make):
    torch.manual_seed(0)
    module = make()
    lengths = torch.tensor([30, 25])
    x = random_tensor((2, 30, 8), double, outliers=False)
    padding = torch.arange(30) < 30 - lengths[:, None]
    positions = (torch.arange(30) - (30 - lengths[:, None])).clamp_min(0)
    together = module(x, key_padding_mask=padding, position_ids=positions)
    for i, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(together[i, -n:], module(x[i : i + 1, -n:])[0], rtol=1e-10, atol=1e-10)
    unshifted = module(x, key_padding_mask=padding)  # positions of the batch: relative, so the same
    torch.testing.assert_close(unshifted[1, -25:], together[1, -25:], rtol=1e-8, atol=1e-8)


t = torch.zeros
ERRORS = [
    (dict(x=t(2, 3, 4)), ValueError, r"x: expected 4 dimensions .*\(2, 3, 4\)"),
    (dict(x=t(2, 3, 4, 5)), ValueError, "rotary_dim: expected an even number of at least 0, got 5"),
    (dict(rotary_dim=10), ValueError, "rotary_dim: expected at most head_dim, 8, got 10"),
    (dict(inv_freq=t(3), rotary_dim=8), ValueError, "inv_freq: expected 4 numbers, rotary_dim / 2, got 3"),
    (dict(inv_freq=t(2, 4)), ValueError, r"inv_freq: expected 1 dimension .*\(2, 4\)"),
    (dict(position_ids=t(2, 5).long()), ValueError, r"position_ids: expected shape \(4,\) or \(2, 4\), got \(2, 5\)"),
    (dict(position_ids=t(4)), RuntimeError, "position_ids: expected dtype torch.int64 or .*float32"),
    (dict(x=t(2, 3, 4, 8).int()), RuntimeError, "x: expected dtype torch.float32"),
    (dict(inv_freq=t(4).requires_grad_()), NotImplementedError, "cos and sin have no gradient"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        rope(**{"x": t(2, 3, 4, 8), **change})


def test_operator_errors():
    x, table = t(2, 3, 4, 8), t(4, 4)
    for cos, sin, message in (
        (t(5, 4), table, r"cos: expected shape \(4, rotary_dim / 2\), .*\(2, 4, rotary_dim / 2\), got \(5, 4\)"),
        (t(3, 4, 4), table, r"cos: expected shape .*got \(3, 4, 4\)"),
        (table, t(2, 4, 4), r"sin: expected the shape of cos, \(4, 4\), got \(2, 4, 4\)"),
        (t(4, 5), t(4, 5), r"cos: expected at most head_dim / 2 columns, head_dim is 8"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.rope(x, cos, sin)
    with pytest.raises(RuntimeError, match="cos: expected dtype torch.float32"):
        ops.rope(x, table.double(), table)
    for call in (ops.rope, ops.rope_):
        with pytest.raises(RuntimeError, match="sin: expected to be on the device of x, cpu, got meta"):
            call(x, table, table.to("meta"))
    columns = t(2, 3, 8, 4).mT
    with pytest.raises(ValueError, match="x: expected a dense last dimension"):
        ops.rope_(columns, table, table)
    with pytest.raises(NotImplementedError, match="rope_: in place there is no gradient"):
        ops.rope_(x.requires_grad_(), table, table)


# ---------------------------------------------------------------------------------------------------- frequencies


def test_published_numbers():
    ntk, factor = rope_frequencies("ntk", 128, factor=4.0)
    assert factor == 1.0 and ntk[1].item() ** -64 == pytest.approx(40889.94, rel=1e-7)
    options = dict(factor=2.0, max_position_embeddings=4096)
    dynamic = rope_frequencies("dynamic", 128, seq_len=8192, **options)[0]
    assert dynamic[1].item() ** -64 == pytest.approx(30527.74, rel=1e-6)
    assert torch.equal(rope_frequencies("dynamic", 128, seq_len=100, **options)[0], rope_frequencies("default", 128)[0])

    yarn, factor = rope_frequencies("yarn", 64, factor=40.0, original_max_position_embeddings=4096)
    assert factor == pytest.approx(0.1 * math.log(40) + 1)
    expected = torch.tensor([1, 0.056234133, 0.0055, 3.3338036e-5, 3.3338036e-6], dtype=double)
    torch.testing.assert_close(yarn[[0, 10, 16, 23, 31]], expected, rtol=1e-7, atol=0)

    options = dict(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    yarn, factor = rope_frequencies("yarn", 64, 150000.0, **options)
    assert factor == pytest.approx(1.34657359, rel=1e-8)
    expected = torch.tensor([1, 0.050813275, 0.0010526021, 1.8188337e-5, 3.0235114e-7], dtype=double)
    torch.testing.assert_close(yarn[[0, 8, 15, 20, 31]], expected, rtol=1e-7, atol=0)
    deepseek = dict(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    assert rope_frequencies("yarn", 64, **deepseek)[1] == 1.0


LONG = dict(short_factor=[1.0 + i / 16 for i in range(16)], long_factor=[1.0 + i for i in range(16)])
PARAMETERS = [
    ("linear", dict(factor=8.0)),
    ("dynamic", dict(factor=4.0)),
    ("yarn", dict(factor=4.0, original_max_position_embeddings=2048)),
    ("yarn", dict(factor=4.0, original_max_position_embeddings=2048, beta_fast=20.0, beta_slow=2.0, truncate=False)),
    ("yarn", dict(factor=4.0, original_max_position_embeddings=2048, mscale=0.8, mscale_all_dim=0.5)),
    ("yarn", dict(factor=4.0, original_max_position_embeddings=2048, attention_factor=1.25)),
    ("llama3", dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048)),
    ("longrope", dict(original_max_position_embeddings=2048, **LONG)),
    ("longrope", dict(original_max_position_embeddings=2048, factor=3.0, **LONG)),
]  # fmt: skip


@pytest.mark.parametrize("seq_len", [None, 1000, 5000, 20000])
@pytest.mark.parametrize("method, parameters", PARAMETERS, ids=[f"{i}-{m}" for i, (m, _) in enumerate(PARAMETERS)])
def test_frequencies_are_those_of_transformers(method, parameters, seq_len):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    settings = dict(hidden_size=64, num_attention_heads=2, max_position_embeddings=8192)
    config = transformers.LlamaConfig(
        **settings, rope_parameters={"rope_type": method, "rope_theta": 50000.0, **parameters}
    )
    expected, expected_factor = rope_utils.ROPE_INIT_FUNCTIONS[method](config, "cpu", seq_len=seq_len)
    if method in ("dynamic", "longrope"):
        parameters = {**parameters, "max_position_embeddings": 8192, "seq_len": seq_len}
    inv_freq, factor = rope_frequencies(method, 32, 50000.0, **parameters)
    torch.testing.assert_close(inv_freq, expected.double(), rtol=2e-6, atol=0)  # theirs is float32
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_frequency_errors():
    for arguments, options, error, message in (
        (("yearn", 8), {}, ValueError, "method: expected one of default, linear, .*longrope, got 'yearn'"),
        (("default", 7), {}, ValueError, "rotary_dim: expected an even number"),
        (("default", 8, -1.0), {}, ValueError, "theta: expected a positive number, got -1.0"),
        (("linear", 8), dict(factor=0.0), ValueError, "factor: expected a positive number, got 0.0"),
        (("linear", 8), {}, TypeError, "factor"),
        (("linear", 8), dict(factor=2.0, beta_fast=1), TypeError, "beta_fast"),
        (
            ("longrope", 8),
            dict(original_max_position_embeddings=9, factor=2.0, **LONG),
            ValueError,
            "short_factor: .*16",
        ),
    ):
        with pytest.raises(error, match=message):
            rope_frequencies(*arguments, **options)


# ---------------------------------------------------------------------------------------------------- other positions


def test_sinusoidal_table():
    table = sinusoidal_positions(50, 6)
    assert table.shape == (50, 6) and table.dtype == torch.float32
    for n, j in ((0, 0), (1, 0), (7, 1), (49, 2)):
        angle = n / 10000 ** (2 * j / 6)
        assert table[n, 2 * j].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[n, 2 * j + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    with pytest.raises(ValueError, match="dim: expected an even number"):
        sinusoidal_positions(4, 3)


def test_alibi_slopes():
    twelve = [0.5**k for k in range(1, 9)] + [0.70710678, 0.35355339, 0.1767767, 0.08838835]
    assert alibi_slopes(12).tolist() == pytest.approx(twelve, rel=1e-7)
    assert alibi_slopes(6).tolist() == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125], rel=1e-7)
    assert alibi_slopes(8).tolist() == pytest.approx([0.5**k for k in range(1, 9)], rel=1e-7)
    assert alibi_slopes(2).tolist() == [2**-4, 2**-8] and alibi_slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(5).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1]
    forty = [2 ** (-k / 4) for k in range(1, 33)] + [2 ** (-(2 * i + 1) / 8) for i in range(8)]
    assert alibi_slopes(40).tolist() == pytest.approx(forty, rel=1e-7)
    assert alibi_slopes(1).tolist() == [2**-8] and alibi_slopes(16)[0].item() == pytest.approx(2**-0.5)
    assert all(len(alibi_slopes(n)) == n for n in range(1, 40))
    with pytest.raises(ValueError, match="num_heads: expected a positive number, got 0"):
        alibi_slopes(0)
