"""Every entry of a table of CPU kernels, called without torch, against the fp64 reference: on the instruction sets of
this machine, and on those of AArch64 in an emulator where there is one."""

import platform

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.ops.linear_attention import FEATURE_MAPS
from attnjourney.reference.sparse_attention import indexer_scores
from tests.kernels import build
from tests.linear import test_gated_linear_attention as gated
from tests.linear.test_linear_attention import dense
from tests.sparse.test_sparse_attention import dense as dense_sparse
from tests.sparse.test_sparse_attention import make_indices
from tests.sparse.test_sparse_attention import plain as plain_sparse
from tests.support import derivative_checks, options_cases
from tests.support.indexer_cases import score_rounding
from tests.support.layer_checks import results as layer_results
from tests.support.testing import (
    DTYPES,
    GRADIENT_FACTOR,
    LSE_DTYPE,
    OUTPUT_FACTOR,
    ULPS,
    assert_close_to_reference,
    random_tensor,
)  # fmt: skip

HERE = platform.machine()
SETS = [(HERE, isa) for isa in attnjourney.cpu_info()["found"]]
if HERE != "aarch64":
    SETS += [pytest.param(("aarch64", isa), marks=pytest.mark.slow) for isa in ("neon", "neon_bf16")]
OPTIONS = [
    (),
    ("causal", "sinks", "softcap"),
    ("prefix", "alibi", "dropout"),
    ("mask", "key_lengths", "bottom_right"),
    ("bool_mask", "window", "scale"),
]
# all options in bfloat16, which some tables have kernels of its own for, and once in the other dtypes
OTHERS = [dtype for dtype in DTYPES if dtype != torch.bfloat16]
CASES = [(names, torch.bfloat16) for names in OPTIONS] + [(names, OTHERS[i % 3]) for i, names in enumerate(OPTIONS)]
SEEDS = dict(query=1, key=2, value=3, grad_out=9)
DOUBLE = torch.float64
LINEAR = [
    dict(is_causal=True, feature_map="elu+1", normalize=True),
    dict(is_causal=False, feature_map="relu", normalize=False),
]


@pytest.fixture(params=SETS, ids=lambda s: "-".join(s))
def table(request):
    reason = build.missing(request.param[0])
    if reason:
        pytest.skip(reason)
    return request.param


def arguments_of(query, key, value, options):
    """What the program takes for attention's options; a batch of one item."""
    (_, heads, q_len, dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
    causal, (left, right) = options.get("is_causal", False), options.get("window_size", (-1, -1))
    mask = options.get("attn_mask")
    lengths = options.get("key_lengths")
    given = dict(q_len=q_len, kv_len=kv_len, head_dim=dim, v_head_dim=value.size(3), kv_heads=kv_heads)
    given |= dict(group=heads // kv_heads, left=left, right=0 if causal else right, seed=options_cases.SEED)
    given |= dict(prefix=options.get("prefix_length", 0), scale=options.get("scale", dim**-0.5))
    given["key_length"] = kv_len if lengths is None else int(lengths[0])
    bottom_right = options.get("causal_alignment") == "bottom_right"
    given["offset"] = given["key_length"] - q_len if bottom_right else 0
    given |= {name: options.get(name, 0.0) for name in ("softcap", "dropout_p")}
    given |= {name: x.double() for name, x in options.items() if name in ("sinks", "alibi_slopes")}
    if mask is not None:
        given["bool_mask" if mask.dtype == torch.bool else "mask"] = mask.expand(1, heads, q_len, kv_len)
    return given | dict(query=query, key=key, value=value)


def gradient_tangents(function, tensors, arguments, dtype=None):
    """{name: tangent} of the gradients of a fixed cotangent of out and lse, all inputs moving."""
    tensors, arguments, leaves = options_cases.leaves_of(tensors, arguments, dtype)
    arguments = {**arguments, **dict(zip(("query", "key", "value"), tensors))}
    inputs = tuple(x.detach() for x in leaves.values())
    call = derivative_checks.function_of(function, arguments, leaves)
    grads = cotangents(call(*inputs))
    changes = torch.func.jvp(lambda *x: torch.func.vjp(call, *x)[1](grads), inputs, directions(inputs))[1]
    return {f"grad_{name}_tangent": x for name, x in zip(leaves, changes)}


def directions(inputs):
    return tuple(derivative_checks.directions(inputs))


def cotangents(outputs):
    return tuple(
        random_tensor(x.shape, torch.float64, 20 + i, outliers=False).to(x.dtype) for i, x in enumerate(outputs)
    )


@pytest.mark.parametrize("names, dtype", CASES, ids=str)
def test_attention(table, names, dtype):
    # lengths with whole and partial tiles of every size of vector, for each table
    *tensors, options = options_cases.make(names, dtype, 1, 4, 2, q_len=101, kv_len=150, dim=20, v_dim=24)
    _, _, leaves = options_cases.leaves_of(tensors, options)
    real = LSE_DTYPE.get(dtype, torch.float32)
    given = arguments_of(*tensors, options)
    grad_out, grad_lse = cotangents(reference.attention(*tensors, return_lse=True, **options))
    given |= dict(grad_out=grad_out, grad_lse=grad_lse)
    for name, x in zip(leaves, directions([x.detach() for x in leaves.values()])):
        if name == "attn_mask":
            given["mask_tangent"] = x.expand(1, 4, 101, 150)
        else:
            given[f"{name}_tangent"] = x.double() if x.dim() < 4 else x
    found = build.run(*table, "attention", dtype, given)

    shape = (1, 4, 101)
    of = {"lse": (real, shape), "lse_tangent": (real, shape), "weights": (dtype, (*shape, 150))}
    of |= {"out": (dtype, (*shape, 24)), "out_tangent": (dtype, (*shape, 24))}
    for name, x in leaves.items():
        kind = {"attn_mask": real, "sinks": torch.float64, "alibi_slopes": torch.float64}.get(name, dtype)
        of |= {f"grad_{name}{end}": (kind, x.shape) for end in ("", "_tangent")}
    results = {name: build.tensor(data, *of[name]) for name, data in found.items()}
    results = {n: x.to(dtype) if n.startswith("grad") else x for n, x in results.items()}

    label = " ".join((*table, *names))
    first = {n: results[n] for n in ("out", "lse", *(f"grad_{name}" for name in leaves))}
    options_cases.compare(first, (grad_out, grad_lse), tensors, options, label=label)
    derivative_checks.compare(derivative_checks.jvp, results, tensors, options, label, OUTPUT_FACTOR)
    derivative_checks.compare(gradient_tangents, results, tensors, options, label)
    if "dropout_p" not in options:
        exact = reference.attention_weights(*(x.double() for x in tensors[:2]), **as_double(options))
        plain = reference.attention_weights(*tensors[:2], **options)
        assert_close_to_reference(results["weights"], plain, exact, OUTPUT_FACTOR, f"{label} weights")


def as_double(options):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "q_len, names", [(1, ()), (3, ("causal", "bottom_right", "softcap", "sinks")), (5, ("mask", "alibi"))]
)
def test_decode(table, q_len, names, dtype):
    *tensors, options = options_cases.make(names, dtype, 1, 4, 2, q_len=q_len, kv_len=150, dim=72, v_dim=40)
    real = LSE_DTYPE.get(dtype, torch.float32)
    found = build.run(*table, "decode", dtype, arguments_of(*tensors, options) | dict(chunk=64, run=48))
    results = {"out": build.tensor(found["out"], dtype, (1, 4, q_len, 40))}
    results["lse"] = build.tensor(found["lse"], real, (1, 4, q_len))
    exact, _ = options_cases.run(reference.attention, tensors, options, torch.float64)
    grads = cotangents((results["out"], results["lse"]))
    plain = options_cases.plain_attention(tensors, options, grads, ULPS)
    for name, in_plain, rounding in zip(results, *plain):
        assert_close_to_reference(results[name], in_plain, exact[name], OUTPUT_FACTOR, name, rounding)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("bytes_", (torch.int8, torch.float8_e4m3fn), ids=str)
def test_decode_of_bytes(table, bytes_, dtype):
    query, key, value, _ = options_cases.make((), dtype, 1, 4, 2, q_len=3, kv_len=150, dim=72, v_dim=40)
    kind = 1 + (bytes_ != torch.int8)
    (key, key_scale), (value, value_scale) = (reference.quantize(x, bytes_) for x in (key, value))
    scales = dict(key_scale=key_scale, value_scale=value_scale)
    given = arguments_of(query, key, value, {}) | dict(chunk=64, run=48, bytes=kind, **scales)
    found = build.run(*table, "decode", dtype, given)
    out = build.tensor(found["out"], dtype, (1, 4, 3, 40))
    call = dict(lengths=torch.tensor([150]), is_causal=False, **scales)
    plain, exact = (reference.decode(q, key, value, **call) for q in (query, query.double()))
    assert_close_to_reference(out, plain, exact, OUTPUT_FACTOR, str(bytes_))

    row = random_tensor((73,), dtype, 5)
    found = build.run(*table, "quantized_row", dtype, dict(row=row, n=73, bytes=kind))
    expected, scale = reference.quantize(row, bytes_)
    assert build.tensor(found["scale"], torch.float32, ()) == scale
    assert torch.equal(build.tensor(found["bytes"], torch.int8, (73,)), expected.view(torch.int8))
    assert torch.equal(build.tensor(found["row"], dtype, (73,)), reference.dequantize(expected, scale, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_head_product(table, transposed, dtype):
    x, w = random_tensor((5, 40), dtype, 1, outliers=False), random_tensor((40, 50), dtype, 2, outliers=False)
    given = dict(rows=5, inner=40, width=50, transposed=transposed, x=x, w=w.T if transposed else w)
    out = build.tensor(build.run(*table, "head_product", dtype, given)["out"], dtype, (5, 50))
    assert_close_to_reference(out, x @ w, x.double() @ w.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update, strength", [("gated_delta", 1.0), ("kda", 12.0)])
def test_gated_linear_attention(table, update, strength, dtype):
    shape = dict(heads=(2, 2, 2), length=150, dims=(20, 33), batch=1, state=True, strength=strength)
    tensors, wide = gated.inputs(dtype, update, **shape), torch.promote_types(dtype, torch.float32)
    tensors["beta"] = tensors["beta"].to(wide)
    options = dict(update=update, scale=0.7, qk_l2norm=True)
    grad_out = random_tensor((1, 2, 150, 33), dtype, 9, outliers=False)
    sizes = dict(heads=2, len=150, head_dim=20, v_head_dim=33, scale=0.7, norm_eps=1e-6, channels=update == "kda")
    found = build.run(*table, "gated", dtype, {**tensors, **sizes, "grad_out": grad_out})

    def results(function, dtype=None):
        leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}
        out, state = function(**leaves, **options, return_state=True)
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype))
        return {"out": out, "state": state, **{f"grad_{n}": g for n, g in zip(leaves, grads)}}

    exact = results(reference.gated_linear_attention, torch.float64)
    plain = results(gated.plain, dtype)
    for name, other in (("out", "out"), ("state", "state"), ("stepped", "out"), ("stepped_state", "state")):
        stored = dtype if other == "out" else wide
        got = build.tensor(found[name], stored, exact[other].shape)
        assert_close_to_reference(got, plain[other], exact[other], OUTPUT_FACTOR, name)
    for name, value in exact.items():
        if name.startswith("grad"):
            stored = dtype if name in ("grad_query", "grad_key", "grad_value") else wide
            got = build.tensor(found[name], stored, value.shape)
            assert_close_to_reference(got, plain[name], value, GRADIENT_FACTOR, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, rows, names", [(4, 5, ("causal", "softcap", "sinks")), (2, 1, ("causal", "sinks"))])
def test_sparse_attention(table, heads, rows, names, dtype):
    sizes = dict(batch=1, q_heads=heads, kv_heads=1, q_len=33, kv_len=40, dim=20, v_dim=33)
    query, key, value, options = options_cases.make(names, dtype, **sizes)
    indices = make_indices((1, -(-33 // rows), 25), 40, torch.int32, twice=True)
    options |= dict(indices=indices, query_block_size=rows)
    tensors, (out_grad, _) = (
        (query, key, value),
        cotangents(dense_sparse(query, key, value, return_lse=True, **options)),
    )
    given = dict(query=query, key=key, value=value, grad_out=out_grad, indices=indices, sinks=options["sinks"].double())
    given |= dict(heads=heads, q_len=33, kv_len=40, head_dim=20, v_head_dim=33, rows=rows, k=25, scale=20**-0.5)
    found = build.run(*table, "sparse", dtype, given | dict(softcap=options.get("softcap", 0.0)))

    lse_grad = torch.zeros(1, heads, 33, dtype=LSE_DTYPE.get(dtype, torch.float32))
    _, _, leaves = options_cases.leaves_of(tensors, options, torch.float64)
    wide = {**options, **{n: x for n, x in leaves.items() if n == "sinks"}}
    out = dense_sparse(*(leaves[n] for n in ("query", "key", "value")), **wide)
    exact = torch.autograd.grad(out, list(leaves.values()), out_grad.double())
    plain, roundings = plain_sparse(tensors, options, (out_grad, lse_grad), ULPS)
    for name, value, in_plain, rounding in zip(leaves, exact, plain[2:], roundings[2:], strict=True):
        stored = torch.float64 if name == "sinks" else dtype
        got = build.tensor(found[f"grad_{name}"], stored, value.shape).to(dtype)
        assert_close_to_reference(got, in_plain, value, GRADIENT_FACTOR, name, rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, dim", [(3, 20), (13, 33)])
def test_scores_of_the_sparse_indexer(table, heads, dim, dtype):
    """Causal rows, of which the last block of keys is for some alone; a NaN is above every threshold."""
    wide, (rows, keys, bad) = torch.promote_types(dtype, torch.float32), (340, 333, 150)
    shapes = ((1, heads, rows, dim), (1, keys, dim), (1, heads, rows))
    query, key, weights = (random_tensor(s, dtype, i, outliers=False) for i, s in enumerate(shapes))
    spoilt = key.index_fill(1, torch.tensor(bad), torch.nan)
    given = dict(query=query, key=spoilt, weights=weights.to(wide), heads=heads, q_len=rows, kv_len=keys, head_dim=dim)
    found = build.run(*table, "indexer", dtype, given | dict(scale=0.3, threshold=0.5, rows=32))
    scores, above = (build.tensor(found[n], d, (rows, keys)) for n, d in (("scores", wide), ("above", torch.int32)))
    seen = torch.ones(rows, keys, dtype=torch.bool).tril()
    assert torch.equal(scores.isnan(), seen & (torch.arange(keys) == bad))
    assert torch.equal(above > 0, seen & (scores.isnan() | (scores > 0.5)))
    there = seen & ~scores.isnan()
    exact, plain = (indexer_scores(*(x.to(d) for x in (query, key, weights)), scale=0.3)[0] for d in (DOUBLE, wide))
    rounding = score_rounding(query, key, weights, 0.3, wide)[0]
    assert_close_to_reference(
        scores[there], plain[there], exact[there], OUTPUT_FACTOR, "scores", rounding=rounding[there]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, q_heads, k", [(4, 12, 25), (13, 3, 40)])
def test_loss_of_the_sparse_indexer(table, heads, q_heads, k, dtype):
    wide, (rows, keys) = torch.promote_types(dtype, torch.float32), (9, 50)
    shapes = ((1, heads, rows, 20), (1, keys, 20), (1, heads, rows), (1, q_heads, rows, 33), (1, 1, keys, 33))
    inputs = [random_tensor(s, dtype, i, outliers=False) for i, s in enumerate(shapes)]
    grads = random_tensor((1, rows, k), wide, 9, outliers=False)
    indices = make_indices((1, rows, k), keys, torch.int32)
    indices[0, 4] = -1
    names = ("index_query", "index_key", "weights", "query", "key")
    given = dict(zip(names, inputs)) | dict(weights=inputs[2].to(wide).mT, grad_scores=grads, indices=indices)
    sizes = dict(heads=heads, q_heads=q_heads, q_len=rows, kv_len=keys, head_dim=20, q_head_dim=33, k=k, some_heads=8)
    found = build.run(*table, "indexer_loss", dtype, given | sizes | dict(index_scale=0.4, scale=0.2))
    there, at = indices >= 0, indices.clamp(min=0).long()

    def results(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
        scores = indexer_scores(*leaves, scale=0.4).gather(-1, at).masked_fill(~there, 0.0)
        gradients = torch.autograd.grad(scores, leaves, grads.to(dtype))
        products = inputs[3].to(dtype) @ inputs[4].to(dtype).mT * 0.2
        products = products.gather(-1, at[:, None].expand(-1, q_heads, -1, -1))
        target = products.masked_fill(~there[:, None], -torch.inf).softmax(-1).sum(1).masked_fill(~there, 0.0)
        return dict(zip(("target", "scores", *(f"grad_{n}" for n in names)), (target, scores.detach(), *gradients)))

    exact, plain = results(DOUBLE), results(wide)
    for name, value in exact.items():
        stored = DOUBLE if name in ("target", "scores") else wide if name == "grad_weights" else dtype
        got = build.tensor(found[name], stored, value.mT.shape if name == "grad_weights" else value.shape)
        got = got.mT if name == "grad_weights" else got
        factor = GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR
        eps = [torch.finfo(d).eps for d in (stored, wide)]
        rounding = 4 * eps[0] * value.abs() + 40 * eps[1] * value.abs().max()
        assert_close_to_reference(got, plain[name].to(got.dtype), value, factor, name, rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", LINEAR, ids=lambda o: o["feature_map"])
def test_linear_attention(table, options, dtype):
    shapes = dict(query=(1, 4, 150, 20), key=(1, 2, 150, 20), value=(1, 2, 150, 33), grad_out=(1, 4, 150, 33))
    tensors = {name: random_tensor(shapes[name], dtype, SEEDS[name], outliers=False) for name in shapes}
    sizes = dict(q_len=150, kv_len=150, head_dim=20, v_head_dim=33, kv_heads=2, group=2)
    numbers = dict(causal=options["is_causal"], normalize=options["normalize"], scale=0.7, eps=0.5)
    numbers["feature_map"] = FEATURE_MAPS[options["feature_map"]]
    found = build.run(*table, "linear", dtype, {**tensors, **sizes, **numbers})

    grad_out = tensors.pop("grad_out")
    constants = {**options, "scale": 0.7, "eps": 0.5}
    in_plain = {**constants, "key_padding_mask": None, "initial_state": None}

    exact = layer_results(reference.linear_attention, tensors, constants, grad_out, torch.float64)
    plain = layer_results(lambda **arguments: dense(**arguments)[0], tensors, in_plain, grad_out)
    for name, wide, same_dtype in zip(("out", "grad_query", "grad_key", "grad_value"), exact, plain):
        factor = GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR
        assert_close_to_reference(build.tensor(found[name], dtype, wide.shape), same_dtype, wide, factor, name)
