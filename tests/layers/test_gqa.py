"""The layer `gqa`: values and gradients against plain PyTorch and transformers' Llama, rotation, arguments, use."""

import functools

import pytest
import torch
from torch.library import opcheck

from attnjourney.nn.grouped_query_attention import GroupedQueryAttention
from attnjourney.ops.gqa import gqa
from attnjourney.reference.gqa import gqa as reference_gqa
from tests.support.layer_checks import (
    assert_agree,
    aten_calls,
    check_layer,
    check_per_sample_gradients,
    count_flops,
    on_device,
    run,
)
from tests.support.testing import DTYPES, LAYOUTS, pairs, poison_memory, random_tensor, row_id

ops = torch.ops.attnjourney
TENSORS = "x q_weight k_weight v_weight o_weight q_bias k_bias v_bias o_bias".split()


def tables(seq, half, dtype, seed=20):
    angle = random_tensor((seq, half), torch.float64, seed, outliers=False) * 3
    return {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def make(
    dtype=torch.float64, batch=2, seq=5, embed=6, heads=4, kv_heads=2, dim=4, v_dim=3, out=7, bias=True, half=1,
    table_dtype=None, layout="contiguous", weight_layout="contiguous", is_causal=True,
):  # fmt: skip
    """(tensors, constants) of a call by name; half = rotary_dim / 2, None: no rotation."""
    shapes = (heads * dim, embed), (kv_heads * dim, embed), (kv_heads * v_dim, embed), (out, heads * v_dim)
    x = random_tensor((batch, seq, embed), dtype, layout=layout, outliers=False)
    weights = [random_tensor(s, torch.float64, 1 + i, outliers=False) / s[1] ** 0.5 for i, s in enumerate(shapes)]
    weights = [LAYOUTS[weight_layout](w.to(dtype)) for w in weights]
    biases = [random_tensor(s[:1], dtype, 5 + i) if bias else None for i, s in enumerate(shapes)]
    rotation = {} if half is None else tables(seq, half, table_dtype or dtype)
    constants = dict(num_heads=heads, num_kv_heads=kv_heads, is_causal=is_causal, **rotation)
    return dict(zip(TENSORS, [x, *weights, *biases])), constants


def grad_out_of(tensors, layout="contiguous"):
    x, o_weight = tensors["x"], tensors["o_weight"]
    return random_tensor((*x.shape[:2], o_weight.shape[0]), x.dtype, 30, layout, outliers=False)


ROWS = pairs(
    dtype=DTYPES,
    heads=[(4, 2), (4, 1), (3, 3)],
    bias=[True, False],
    half=[None, 1, 2],
    fp32_tables=[True, False],
    is_causal=[True, False],
    layout=list(LAYOUTS),
    weight_layout=["contiguous", "columns", "stepped_rows", "stepped_last"],
    grad_layout=["contiguous", "transposed", "stepped_last"],
    sizes=[(2, 5, 4, 3), (1, 9, 8, 8), (3, 2, 5, 16), (2, 33, 16, 8)],  # batch, seq, dim, v_dim
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    (heads, kv_heads), (batch, seq, dim, v_dim) = row["heads"], row["sizes"]
    bias = row["bias"] and row["half"] is not None  # without rotation the gradient of k_bias is 0, see below
    tensors, constants = make(
        row["dtype"], batch, seq, 6, heads, kv_heads, dim, v_dim, 7, bias, row["half"],
        torch.float32 if row["fp32_tables"] else None, row["layout"], row["weight_layout"], row["is_causal"],
    )  # fmt: skip
    poison_memory()
    check_layer(ops.gqa, reference_gqa, tensors, constants, grad_out_of(tensors, row["grad_layout"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_position(dtype):
    """It sees itself alone, so its query and its key do not matter: rounding is all that their gradients may hold."""
    tensors, constants = make(dtype, seq=1)
    out, gradients = run(ops.gqa, tensors, constants, grad_out_of(tensors))
    assert_agree(out, reference_gqa(**tensors, **constants), "out", 4 * torch.finfo(dtype).eps)
    for name in ("q_weight", "k_weight", "q_bias", "k_bias"):
        assert gradients[name].abs().max() <= 4 * torch.finfo(torch.float32).eps * gradients["v_weight"].abs().max()


def test_key_bias_without_rotation_has_no_gradient():
    """It adds the same number to all scores of a row."""
    tensors, constants = make(half=None)
    _, gradients = run(ops.gqa, tensors, constants, grad_out_of(tensors))
    assert gradients["k_bias"].abs().max() < 1e-13 * gradients["q_bias"].abs().max()


GRADCHECKS = {
    "gqa": dict(),
    "mqa": dict(kv_heads=1, half=2),
    "mha_full": dict(heads=2, is_causal=False, half=2),
    "no_rotation": dict(half=None),
    "no_bias": dict(bias=False),
    "seq_1": dict(seq=1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name):
    tensors, constants = make(**{"batch": 1, "seq": 3, "embed": 3, "v_dim": 2, "out": 3, **GRADCHECKS[name]})
    names = [n for n in tensors if tensors[n] is not None]
    leaves = [tensors[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(lambda *x: ops.gqa(**dict(zip(names, x)), **constants), leaves)


@pytest.mark.parametrize("wanted", [[n] for n in TENSORS] + [["x", "k_weight"], ["v_weight", "o_bias"]], ids="-".join)
def test_gradients_only_where_asked(wanted):
    tensors, constants = make()
    grad_out = grad_out_of(tensors)
    _, expected = run(ops.gqa, tensors, constants, grad_out)
    leaves = {n: x.detach().requires_grad_(n in wanted) for n, x in tensors.items()}
    ops.gqa(**leaves, **constants).backward(grad_out)
    for name, x in leaves.items():
        if name in wanted:
            assert_agree(x.grad, expected[name], name)
        else:
            assert x.grad is None, name


def test_raw_backward_leaves_out_what_is_not_needed():
    tensors, constants = make()
    out, *saved = ops.gqa_forward(**tensors, **constants)
    inputs = {n: tensors[n] for n in TENSORS[:5]}
    saved = dict(zip(("query", "key", "value", "attn", "lse", "stats"), saved))
    for bit in range(len(TENSORS)):
        results = ops.gqa_backward(grad_out_of(tensors), **inputs, **saved, **constants, need=1 << bit)
        assert [tuple(r.shape) != (0,) for r in results] == [i == bit for i in range(len(TENSORS))]
        assert results[bit].shape == tensors[TENSORS[bit]].shape


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seq=0), dict(batch=0, seq=0)], ids=str)
def test_empty(sizes):
    tensors, constants = make(**sizes)
    out, gradients = run(ops.gqa, tensors, constants, grad_out_of(tensors))
    assert out.shape == (sizes.get("batch", 2), sizes.get("seq", 5), 7)
    for name, gradient in gradients.items():
        assert gradient.shape == tensors[name].shape and not gradient.any()


# ---- rotation


def rotated(x, half, heads, is_key=False, **table):
    """x (batch, seq, heads * dim) after the rotation inside the layer: with identities as weights the query is x."""
    eye = torch.eye(x.shape[2], dtype=x.dtype)
    return ops.gqa_forward(x, heads, heads, eye, eye, eye, eye, **table)[2 if is_key else 1].unflatten(2, (heads, -1))


def position_tables(seq, half, dtype=torch.float64):
    angle = torch.arange(seq, dtype=torch.float64)[:, None] / 10.0 ** torch.arange(half)
    return {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


@pytest.mark.parametrize("is_key", [False, True])
def test_rotation_turns_pairs_by_the_position(is_key):
    x = random_tensor((2, 6, 3 * 7), torch.float64)
    y, x = rotated(x, 2, 3, is_key, **position_tables(6, 2)), x.unflatten(2, (3, 7))
    assert torch.equal(y[:, 0], x[:, 0])  # position 0 turns by nothing
    assert torch.equal(y[..., 4:], x[..., 4:])  # the rest of a head passes through
    pairs_of = lambda t: torch.complex(t[..., :2], t[..., 2:4])  # noqa: E731
    turn = torch.exp(1j * torch.arange(6)[:, None] / torch.tensor([1.0, 10.0], dtype=torch.float64))
    torch.testing.assert_close(pairs_of(y), pairs_of(x) * turn[:, None], rtol=0, atol=1e-13)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_relative_positions():
    q, k = (random_tensor((1, 1, 8), torch.float64, seed) for seed in (0, 1))
    table = position_tables(40, 4)
    q, k = (rotated(t.expand(1, 40, 8).contiguous(), 4, 1, **table)[0, :, 0] for t in (q, k))
    scores = q @ k.T
    for i, j in ((7, 3), (39, 20), (0, 11)):
        shift = 39 - max(i, j)
        torch.testing.assert_close(scores[i, j], scores[i + shift, j + shift])


# ---- arguments

t = functools.partial(torch.zeros, dtype=torch.float64)
ERRORS = {
    "x_rank": (dict(x=t(5, 6)), ValueError, r"x: expected 3 dimensions \(batch, seq, embed\), got shape \(5, 6\)"),
    "x_int": (dict(x=torch.zeros(2, 5, 6, dtype=torch.int64)), RuntimeError, "x: expected dtype .* got torch.int64"),
    "heads_0": (dict(num_heads=0), ValueError, "num_heads: expected a positive number, got 0"),
    "kv_heads_0": (dict(num_kv_heads=0), ValueError, "num_kv_heads: expected a positive number, got 0"),
    "kv_heads": (dict(num_kv_heads=3), ValueError, "num_kv_heads: expected a divisor of num_heads, 4, got 3"),
    "heads": (dict(num_heads=6), ValueError, "num_heads: expected a divisor of the rows of q_weight, 16, got 6"),
    "q_rank": (dict(q_weight=t(16)), ValueError, r"q_weight: expected 2 dimensions, got shape \(16,\)"),
    "q_empty": (dict(q_weight=t(0, 6)), ValueError, r"q_weight: expected at least one row per head, got shape"),
    "q_embed": (dict(q_weight=t(16, 5)), ValueError, r"q_weight: expected shape \(16, 6\), got \(16, 5\)"),
    "k": (dict(k_weight=t(10, 6)), ValueError, r"k_weight: expected shape \(8, 6\), got \(10, 6\)"),
    "v": (dict(v_weight=t(7, 6)), ValueError, "num_kv_heads: expected a divisor of the rows of v_weight, 7, got 2"),
    "o": (dict(o_weight=t(7, 16)), ValueError, r"o_weight: expected shape \(7, 12\), got \(7, 16\)"),
    "q_bias": (dict(q_bias=t(15)), ValueError, r"q_bias: expected shape \(16,\), got \(15,\)"),
    "k_bias": (dict(k_bias=t(16)), ValueError, r"k_bias: expected shape \(8,\), got \(16,\)"),
    "v_bias": (dict(v_bias=t(1, 6)), ValueError, r"v_bias: expected shape \(6,\), got \(1, 6\)"),
    "o_bias": (dict(o_bias=t(8)), ValueError, r"o_bias: expected shape \(7,\), got \(8,\)"),
    "dtype": (dict(v_weight=t(6, 6).float()), RuntimeError, "v_weight: expected the dtype of x, torch.float64, got"),
    "cos_alone": (dict(sin=None), ValueError, "sin: expected a tensor beside cos, got None"),
    "sin_alone": (dict(cos=None), ValueError, "cos: expected a tensor beside sin, got None"),
    "cos_seq": (dict(cos=t(6, 1)), ValueError, r"cos: expected shape \(5, rotary_dim / 2\), .* got \(6, 1\)"),
    "sin_shape": (dict(sin=t(5, 2)), ValueError, r"sin: expected the shape of cos, \(5, 1\), got \(5, 2\)"),
    "cos_wide": (dict(cos=t(5, 3), sin=t(5, 3)), ValueError, r"cos: .* head_dim / 2 columns, head_dim is 4, got"),
    "cos_dtype": (
        dict(cos=t(5, 1).half()),
        RuntimeError,
        "cos: expected dtype torch.float64 .x's. or",
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, device):
    changes, error, text = ERRORS[name]
    tensors, constants = make()
    with pytest.raises(error, match=text):
        gqa(**on_device(device, {**tensors, **constants, **changes}))


def test_module_errors():
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads, 4, got 3"):
        GroupedQueryAttention(8, 4, 3)
    with pytest.raises(ValueError, match="num_heads: expected a divisor of embed_dim, 9, got 4"):
        GroupedQueryAttention(9, 4, 2)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_get_no_gradient(name):
    tensors, constants = make()
    constants[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"gradient of {name}"):
        ops.gqa(**tensors, **constants)
    with torch.no_grad():
        ops.gqa(**tensors, **constants)


# ---- the module, beside transformers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_heads, bias", [(2, False), (1, True)])
def test_llama(dtype, kv_heads, bias):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    settings = dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=kv_heads, attention_bias=bias)
    config = llama.LlamaConfig(**settings, head_dim=8, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = llama.LlamaAttention(config, 0).to(dtype)
    ours = GroupedQueryAttention(24, 4, kv_heads, head_dim=8, bias=bias, rope=10000.0, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = random_tensor((2, 7, 24), dtype, outliers=False)
    rotary = llama.LlamaRotaryEmbedding(config)(x, torch.arange(7)[None])
    mask = torch.full((7, 7), -torch.inf, dtype=dtype).triu(1)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs(x1, rotary, mask)[0]
    out = ours(x2)
    grad_out = random_tensor(out.shape, dtype, 3)
    expected.backward(grad_out)
    out.backward(grad_out)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6  # their tables and softmax are float32
    assert_agree(out, expected, "out", tolerance)
    assert_agree(x2.grad, x1.grad, "x", tolerance)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert_agree(p.grad, q.grad, name, tolerance)


# ---- integration


def test_no_copies():
    tensors, constants = make(torch.float32, half=2, bias=False)
    out, *saved = ops.gqa_forward(**tensors, **constants)
    forward = aten_calls(lambda: ops.gqa_forward(**tensors, **constants))
    assert forward.count("linear") == 4
    inputs, saved = (
        {n: tensors[n] for n in TENSORS[:5]},
        dict(zip(("query", "key", "value", "attn", "lse", "stats"), saved)),
    )
    grad_out = grad_out_of(tensors)
    backward = aten_calls(lambda: ops.gqa_backward(grad_out, **inputs, **saved, **constants))
    assert backward.count("mm") >= 6  # 4 weights, 2 inputs; the other 2 inputs are added to the gradient of x
    assert not {"copy_", "clone", "contiguous", "cat", "repeat_interleave"} & {*forward, *backward}


def test_opcheck():
    tensors, constants = make(torch.float32, table_dtype=torch.float32)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    opcheck(ops.gqa.default, (), {**leaves, **constants})
    opcheck(ops.gqa_forward.default, (), {**leaves, **constants})
    with torch.no_grad():
        out, *saved = ops.gqa_forward(**tensors, **constants)
    detached = {n: tensors[n].detach() for n in TENSORS[:5]}
    saved = dict(zip(("query", "key", "value", "attn", "lse", "stats"), saved))
    for need in (511, 18):
        opcheck(ops.gqa_backward.default, (torch.ones_like(out),), {**detached, **saved, **constants, "need": need})


def test_compile():
    module = GroupedQueryAttention(16, 4, 2, bias=True, rope=100.0)
    x = random_tensor((2, 5, 16))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    gradients = torch.autograd.grad(compiled(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(gradients, expected)


def test_autocast():
    tensors, constants = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.gqa(**tensors, **constants)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ops.gqa(**{n: x.bfloat16() for n, x in tensors.items()}, **constants))  # cos, sin as given


def test_func():
    tensors, constants = make()
    check_per_sample_gradients(ops.gqa, tensors, constants)


def test_flops():
    """As the same layer in matrix products, and in the backward the scores once more."""
    tensors, constants = make()
    ours, plain = (count_flops(f, tensors, constants, grad_out_of(tensors)) for f in (ops.gqa, reference_gqa))
    batch, seq = tensors["x"].shape[:2]
    assert ours == (plain[0], plain[1] + 2 * batch * 4 * seq * seq * 4)
