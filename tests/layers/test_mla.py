"""The layer `mla`: values and gradients against plain PyTorch and transformers' DeepSeek-V3, rotation, norms, use."""

import functools

import pytest
import torch
from torch.library import opcheck

from attnjourney.nn.multihead_latent_attention import MultiheadLatentAttention
from attnjourney.ops.mla import mla
from attnjourney.reference.mla import mla as reference_mla
from tests.support.layer_checks import (
    assert_agree,
    aten_calls,
    check_layer,
    check_per_sample_gradients,
    count_flops,
    on_device,
    run,
)
from tests.support.testing import DTYPES, LAYOUTS, pairs, poison_memory, random_tensor, row_id, threads

ops = torch.ops.attnjourney
TENSORS = "x q_a_weight q_a_norm_weight q_b_weight kv_a_weight kv_a_norm_weight kv_b_weight o_weight".split()
SAVED = "query kv kv_a kv_rstd q_a q_rstd attn lse stats".split()
numbers = functools.partial(random_tensor, outliers=False)


def make(
    dtype=torch.float64, batch=2, seq=5, embed=6, heads=3, nope=4, rope=2, v=3, q_lora=5, kv_lora=7, out=4,
    rotation=True, table_dtype=None, layout="contiguous", weight_layout="contiguous", is_causal=True, scale=None,
    eps=1e-6,
):  # fmt: skip
    """(tensors, constants) of a call by name; q_lora None: the query by one projection."""
    shapes = {
        "q_a_weight": q_lora and (q_lora, embed),
        "q_a_norm_weight": q_lora and (q_lora,),
        "q_b_weight": (heads * (nope + rope), q_lora or embed),
        "kv_a_weight": (kv_lora + rope, embed),
        "kv_a_norm_weight": (kv_lora,),
        "kv_b_weight": (heads * (nope + v), kv_lora),
        "o_weight": (out, heads * v),
    }
    tensors = {"x": numbers((batch, seq, embed), dtype, layout=layout)}
    for i, (name, shape) in enumerate(shapes.items()):
        columns = 1 if shape is None or len(shape) == 1 else shape[1]
        tensors[name] = None
        if shape is not None:
            weight = (numbers(shape, torch.float64, 1 + i) / columns**0.5).to(dtype)
            tensors[name] = weight if len(shape) == 1 else LAYOUTS[weight_layout](weight)
    constants = dict(num_heads=heads, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
    constants |= dict(is_causal=is_causal, scale=scale, eps=eps)
    if rotation:
        angle = 3 * numbers((seq, rope // 2), torch.float64, 20)
        constants |= {"cos": angle.cos().to(table_dtype or dtype), "sin": angle.sin().to(table_dtype or dtype)}
    return tensors, constants


def grad_out_of(tensors, layout="contiguous"):
    x, o_weight = tensors["x"], tensors["o_weight"]
    return numbers((*x.shape[:2], o_weight.shape[0]), x.dtype, 30, layout)


def raw_backward(tensors, constants, need=255):
    out, *saved = ops.mla_forward(**tensors, **constants)
    constants = {name: value for name, value in constants.items() if name != "eps"}
    arguments = {**tensors, **dict(zip(SAVED, saved)), **constants, "need": need}
    return (grad_out_of(tensors),), arguments


OPTIONS = "q_lora rotation layout weight_layout is_causal scale eps".split()
ROWS = pairs(
    dtype=DTYPES,
    q_lora=[None, 5, 17],
    dims=[(4, 2, 3), (8, 4, 8), (0, 4, 5), (4, 0, 2), (16, 8, 16)],  # nope, rope, v
    rotation=[True, False],
    fp32_tables=[True, False],
    is_causal=[True, False],
    scale=[None, 0.4],
    eps=[1e-6, 0.1],
    layout=list(LAYOUTS),
    weight_layout=["contiguous", "columns", "stepped_rows", "stepped_last"],
    grad_layout=["contiguous", "transposed", "stepped_last"],
    sizes=[(2, 5, 7), (1, 9, 33), (3, 2, 4), (2, 33, 16)],  # batch, seq, kv_lora
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    (nope, rope, v), (batch, seq, kv_lora) = row["dims"], row["sizes"]
    table_dtype = torch.float32 if row["fp32_tables"] else None
    options = {name: row[name] for name in OPTIONS}
    sizes = dict(batch=batch, seq=seq, nope=nope, rope=rope, v=v, kv_lora=kv_lora)
    tensors, constants = make(row["dtype"], **sizes, table_dtype=table_dtype, **options)
    poison_memory()
    check_layer(ops.mla, reference_mla, tensors, constants, grad_out_of(tensors, row["grad_layout"]))


GRADCHECKS = {
    "causal": dict(),
    "full": dict(is_causal=False),
    "no_q_a": dict(q_lora=None),
    "no_rotation": dict(rotation=False),
    "scale": dict(scale=0.7),
    "eps": dict(eps=0.5),
    "only_rope": dict(nope=0, rope=4),
    "only_nope": dict(nope=3, rope=0, rotation=False),
    "seq_1": dict(seq=1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name):
    small = dict(batch=1, seq=3, embed=3, heads=2, nope=2, rope=2, v=2, q_lora=2, kv_lora=3, out=3)
    tensors, constants = make(**{**small, **GRADCHECKS[name]})
    names = [n for n in tensors if tensors[n] is not None]
    leaves = [tensors[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(lambda *x: ops.mla(**tensors | dict(zip(names, x)), **constants), leaves)


WANTED = [(5, [n]) for n in TENSORS] + [(None, [n]) for n in TENSORS if "q_a" not in n]


@pytest.mark.parametrize("q_lora, wanted", [*WANTED, (5, ["x", "kv_b_weight"]), (5, TENSORS[1:3])], ids=str)
def test_gradients_only_where_asked(q_lora, wanted):
    tensors, constants = make(q_lora=q_lora)
    grad_out = grad_out_of(tensors)
    _, expected = run(ops.mla, tensors, constants, grad_out)
    leaves = {n: None if x is None else x.detach().requires_grad_(n in wanted) for n, x in tensors.items()}
    ops.mla(**leaves, **constants).backward(grad_out)
    for name, x in leaves.items():
        if name in wanted:
            assert_agree(x.grad, expected[name], name)
        else:
            assert x is None or x.grad is None, name


@pytest.mark.parametrize("q_lora", [5, None])
def test_raw_backward_leaves_out_what_is_not_needed(q_lora):
    tensors, constants = make(q_lora=q_lora)
    for bit, name in enumerate(TENSORS):
        args, arguments = raw_backward(tensors, constants, need=1 << bit)
        results = ops.mla_backward(*args, **arguments)
        given = tensors[name] is not None
        assert [tuple(r.shape) != (0,) for r in results] == [i == bit and given for i in range(len(TENSORS))]
        assert not given or results[bit].shape == tensors[name].shape


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seq=0), dict(batch=0, seq=0)], ids=str)
def test_empty(sizes):
    tensors, constants = make(**sizes)
    out, gradients = run(ops.mla, tensors, constants, grad_out_of(tensors))
    assert out.shape == (sizes.get("batch", 2), sizes.get("seq", 5), 4)
    for name, gradient in gradients.items():
        assert gradient.shape == tensors[name].shape and not gradient.any()


# ---- rotation and norms, seen in what the forward keeps


def test_rotation():
    tensors, constants = make(nope=3, rope=4, q_lora=None, rotation=False)
    angle = torch.arange(5, dtype=torch.float64)[:, None] / torch.tensor([1.0, 10.0], dtype=torch.float64)
    plain = dict(zip(["out", *SAVED], ops.mla_forward(**tensors, **constants)))
    turned = ops.mla_forward(**tensors, **constants, cos=angle.cos(), sin=angle.sin())
    turned = dict(zip(["out", *SAVED], turned))

    def check(after, before, turn):  # (..., 4): the pairs are (0, 1) and (2, 3)
        after, before = (torch.view_as_complex(t.contiguous().unflatten(-1, (2, 2))) for t in (after, before))
        torch.testing.assert_close(after, before * turn, rtol=0, atol=1e-14)
        assert torch.equal(after[:, 0], before[:, 0])  # position 0 turns by nothing
        torch.testing.assert_close(after.abs(), before.abs())

    turn = torch.exp(1j * angle)
    q_after, q_before = (t["query"].unflatten(-1, (3, 7)) for t in (turned, plain))  # (batch, seq, heads, nope + rope)
    check(q_after[..., 3:], q_before[..., 3:], turn[:, None])
    assert torch.equal(q_after[..., :3], q_before[..., :3])
    check(turned["kv_a"][..., 7:], plain["kv_a"][..., 7:], turn)  # one key for all heads
    assert torch.equal(turned["kv_a"][..., :7], plain["kv_a"][..., :7])
    assert torch.equal(turned["kv"], plain["kv"])


def test_result_depends_on_relative_positions():
    tensors, constants = make(seq=4, rope=4, rotation=False)
    frequency = torch.tensor([1.0, 0.1], dtype=torch.float64)
    outs = []
    for start in (0, 11):
        angle = (start + torch.arange(4.0).double())[:, None] * frequency
        outs.append(ops.mla(**tensors, **constants, cos=angle.cos(), sin=angle.sin()))
    assert_agree(outs[1], outs[0], "out")
    assert not torch.allclose(outs[0], ops.mla(**tensors, **constants))


def test_the_shared_key_is_not_normed():
    """Scaling all of kv_a_weight is undone by the norm of the latent, but not in the rotary key."""
    tensors, constants = make(eps=0.0)
    latent = torch.ones(9, 1, dtype=torch.float64)
    latent[:7] = 100
    expected = ops.mla(**tensors, **constants)
    scaled = ops.mla(**{**tensors, "kv_a_weight": tensors["kv_a_weight"] * latent}, **constants)
    assert_agree(scaled, expected, "out")
    scaled = ops.mla(**{**tensors, "kv_a_weight": tensors["kv_a_weight"] * 100}, **constants)
    assert not torch.allclose(scaled, expected)


def test_norm_gradient_does_not_depend_on_threads():
    eye = torch.eye(200)
    tensors = dict(x=numbers((1, 300, 200)), q_a_weight=None, q_a_norm_weight=None, q_b_weight=eye[:2])
    tensors |= dict(kv_a_weight=eye, kv_a_norm_weight=torch.ones(200), kv_b_weight=eye[:3], o_weight=torch.ones(1, 1))
    constants = dict(num_heads=1, qk_nope_head_dim=2, qk_rope_head_dim=0, v_head_dim=1)
    gradients = []
    for count in (1, 2, 3):
        with threads(count):
            gradients.append(run(ops.mla, tensors, constants, torch.ones(1, 300, 1))[1]["kv_a_norm_weight"])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


# ---- arguments

t = functools.partial(torch.zeros, dtype=torch.float64)
ERRORS = {
    "x_rank": (dict(x=t(5, 6)), ValueError, r"x: expected 3 dimensions \(batch, seq, embed\), got shape \(5, 6\)"),
    "x_bool": (dict(x=torch.zeros(2, 5, 6, dtype=torch.bool)), RuntimeError, "x: expected dtype .* got torch.bool"),
    "heads": (dict(num_heads=0), ValueError, "num_heads: expected a positive number, got 0"),
    "nope": (dict(qk_nope_head_dim=-1), ValueError, "qk_nope_head_dim: expected a number of at least 0, got -1"),
    "rope": (dict(qk_rope_head_dim=-2), ValueError, "qk_rope_head_dim: expected a number of at least 0, got -2"),
    "qk_0": (dict(qk_nope_head_dim=0, qk_rope_head_dim=0), ValueError, "qk_nope_head_dim, qk_rope_head_dim: .* got 0"),
    "v": (dict(v_head_dim=0), ValueError, "v_head_dim: expected a positive number, got 0"),
    "huge": (dict(num_heads=2**40), ValueError, "num_heads, head dimensions: expected numbers below 2.30, got"),
    "q_a_alone": (dict(q_a_norm_weight=None), ValueError, "q_a_norm_weight: expected a tensor beside q_a_weight"),
    "norm_alone": (dict(q_a_weight=None), ValueError, "q_a_weight: expected a tensor beside q_a_norm_weight"),
    "q_a": (dict(q_a_weight=t(5, 7)), ValueError, r"q_a_weight: expected shape \(5, 6\), got \(5, 7\)"),
    "q_a_empty": (dict(q_a_weight=t(0, 6)), ValueError, r"q_a_weight: expected at least one row, got shape \(0, 6\)"),
    "q_a_norm": (dict(q_a_norm_weight=t(6)), ValueError, r"q_a_norm_weight: expected shape \(5,\), got \(6,\)"),
    "q_b": (dict(q_b_weight=t(18, 6)), ValueError, r"q_b_weight: expected shape \(18, 5\), got \(18, 6\)"),
    "kv_a": (dict(kv_a_weight=t(9, 5)), ValueError, r"kv_a_weight: expected shape \(9, 6\), got \(9, 5\)"),
    "kv_a_rows": (dict(kv_a_weight=t(2, 6)), ValueError, "kv_a_weight: expected more rows than qk_rope_head_dim, 2"),
    "kv_a_norm": (dict(kv_a_norm_weight=t(9)), ValueError, r"kv_a_norm_weight: expected shape \(7,\), got \(9,\)"),
    "kv_b": (dict(kv_b_weight=t(7, 21)), ValueError, r"kv_b_weight: expected shape \(21, 7\), got \(7, 21\)"),
    "o": (dict(o_weight=t(4, 8)), ValueError, r"o_weight: expected shape \(4, 9\), got \(4, 8\)"),
    "dtype": (dict(kv_a_norm_weight=t(7).float()), RuntimeError, "kv_a_norm_weight: expected the dtype of x, "),
    "cos_alone": (dict(sin=None), ValueError, "sin: expected a tensor beside cos, got None"),
    "cos_seq": (dict(cos=t(4, 1), sin=t(4, 1)), ValueError, r"cos: expected shape \(5, rotary_dim / 2\), "),
    "cos_dim": (dict(cos=t(5, 2), sin=t(5, 2)), ValueError, r"cos: expected .* qk_rope_head_dim is 2, got \(5, 2\)"),
    "scale": (dict(scale=float("nan")), ValueError, "scale: expected a finite number, got nan"),
    "eps": (dict(eps=-1.0), ValueError, "eps: expected a finite number of at least 0, got -1"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, device):
    changes, error, text = ERRORS[name]
    tensors, constants = make()
    with pytest.raises(error, match=text):
        mla(**on_device(device, {**tensors, **constants, **changes}))


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_get_no_gradient(name):
    tensors, constants = make()
    constants[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"gradient of {name}"):
        ops.mla(**tensors, **constants)


# ---- the module, beside transformers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("q_lora_rank", [6, None])
def test_deepseek_v3(dtype, q_lora_rank):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    ranks = dict(q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    heads = dict(num_attention_heads=3, num_key_value_heads=3)
    config = deepseek.DeepseekV3Config(hidden_size=20, **heads, attn_implementation="eager", **ranks)
    torch.manual_seed(0)
    theirs = deepseek.DeepseekV3Attention(config, 0).to(dtype)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    ours = MultiheadLatentAttention(20, 3, **ranks, rope=10000.0, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = numbers((2, 7, 20), dtype)
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(7)[None])
    mask = torch.full((7, 7), -torch.inf, dtype=dtype).triu(1)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs(x1, rotary, mask)[0]
    out = ours(x2)
    grad_out = numbers(out.shape, dtype, 3)
    expected.backward(grad_out)
    out.backward(grad_out)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6  # their tables, norms and softmax are float32
    assert_agree(out, expected, "out", tolerance)
    assert_agree(x2.grad, x1.grad, "x", tolerance)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert_agree(p.grad, q.grad, name, tolerance)


# ---- integration


def test_one_copy():
    tensors, constants = make(torch.float32)
    args, arguments = raw_backward(tensors, constants)
    forward = aten_calls(lambda: ops.mla_forward(**tensors, **constants))
    backward = aten_calls(lambda: ops.mla_backward(*args, **arguments))
    assert forward.count("copy_") == 2  # the assembled key: nope, and the shared rope
    assert backward.count("copy_") == 3  # that once more, and nope of its gradient
    assert not {"clone", "contiguous", "cat"} & {*forward, *backward}


def test_opcheck():
    tensors, constants = make(torch.float32)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    opcheck(ops.mla.default, (), {**leaves, **constants})
    for q_lora in (5, None):
        tensors, constants = make(torch.float32, q_lora=q_lora)
        opcheck(ops.mla_forward.default, (), {**tensors, **constants})
        args, arguments = raw_backward(tensors, constants, need=255 if q_lora else 82)
        opcheck(ops.mla_backward.default, args, arguments)


def test_compile():
    ranks = dict(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    module = MultiheadLatentAttention(12, 2, **ranks)
    x = numbers((2, 5, 12))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    gradients = torch.autograd.grad(compiled(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(gradients, expected)


def test_autocast():
    tensors, constants = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.mla(**tensors, **constants)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ops.mla(**{n: x.bfloat16() for n, x in tensors.items()}, **constants))  # cos, sin as given


def test_autocast_around_the_backward_changes_nothing():
    tensors, constants = make(torch.float32)
    _, expected = run(ops.mla, tensors, constants, grad_out_of(tensors))
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    out = ops.mla(**leaves, **constants)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward(grad_out_of(tensors))
    assert all(torch.equal(x.grad, expected[n]) for n, x in leaves.items())


def test_func():
    tensors, constants = make()
    check_per_sample_gradients(ops.mla, tensors, constants)


def test_flops():
    """As the same layer in matrix products, and in the backward the scores once more."""
    tensors, constants = make()
    ours, plain = (count_flops(f, tensors, constants, grad_out_of(tensors)) for f in (ops.mla, reference_mla))
    batch, seq = tensors["x"].shape[:2]
    assert ours == (plain[0], plain[1] + 2 * batch * 3 * seq * seq * (4 + 2))
