"""What every test shares: the one tolerance rule, the fp64 oracle, and inputs that find bugs.

The rule: inputs are rounded to their dtype first; the reference is computed from the rounded inputs in float64; our
error against it is at most `factor` times that of the same formula in plain PyTorch in the inputs' own dtype (2 for
results, 3 for gradients). Where plain PyTorch happens to be exact, what rounding cannot avoid is allowed; for attention
with any of its options that is derived in plain.py, term by term, and no test has a bound of its own.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass

import torch

from attnjourney import reference
from tests.support.plain import LSE_DTYPE, ULPS, expand_heads, is_float, plain_run

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOOR_ULPS = 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# ---------------------------------------------------------------------------------------------------- the rule


def assert_close_to_reference(
    actual, plain_same_dtype, reference_fp64, factor=OUTPUT_FACTOR, name="result", rounding=None, norms=("max", "L2")
):
    """Asserts the tolerance rule, in maximum and in L2 norm.

    `actual`, `plain_same_dtype` and `reference_fp64` have one shape. Infinities and NaNs of the reference must be met
    exactly. `rounding` (same shape): the error that rounding alone may bring; by default 4 ulp of the reference. Where
    it costs time, a function that gives it: called only if the multiple of plain PyTorch's error is not enough.
    """
    __tracebackhide__ = True
    assert actual.shape == reference_fp64.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(reference_fp64.shape)}"
    )
    if actual.numel() == 0:
        return
    dtype = actual.dtype
    actual, plain, reference = (t.detach().double() for t in (actual, plain_same_dtype, reference_fp64))
    finite = reference.isfinite()
    same = torch.where(finite, actual.isfinite(), (actual == reference) | (actual.isnan() & reference.isnan()))
    if not same.all():
        where = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(f"{name}: got {actual[where].item()} at {where}, expected {reference[where].item()}")

    error = torch.where(finite, actual - reference, 0.0).abs()
    plain_error = torch.where(finite & plain.isfinite(), plain - reference, 0.0).abs()
    if rounding is None:
        rounding = FLOOR_ULPS * torch.finfo(dtype).eps * torch.where(finite, reference, 0.0).abs()
    measures = {"max": lambda x: x.max().item(), "L2": lambda x: x.norm().item()}
    for norm in norms:
        measure = measures[norm]
        if measure(error) <= factor * measure(plain_error):
            continue
        rounding = rounding() if callable(rounding) else rounding
        bound = max(factor * measure(plain_error), measure(rounding))
        if not measure(error) <= bound:
            where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            raise AssertionError(
                f"{name}: {norm} error {measure(error):.3g} > {bound:.3g} (plain {dtype}: {measure(plain_error):.3g}, "
                f"rounding {measure(rounding):.3g}); worst at {where}: got {actual[where].item():.9g}, "
                f"expected {reference[where].item():.9g}"
            )


# ---------------------------------------------------------------------------------------------------- the oracle


def reference_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, keep=None, **options):
    """(out, lse) of the shipped reference; `keep` (bool, (..., q_len, kv_len)) is what dropout keeps."""
    return reference.attention(
        query, key, value, attn_mask, dropout_p, is_causal, keep_mask=keep, return_lse=True, **options
    )


def reference_run(inputs, grad_out, grad_lse=None, keep=None, **options):
    """(out, lse, gradients of query, key, value, float mask, sinks, slopes) in float64, by autograd."""
    leaves = [t.detach().double().requires_grad_() if is_float(t) else t for t in inputs]
    for name in ("sinks", "alibi_slopes"):
        if options.get(name) is not None:
            options[name] = options[name].detach().double().requires_grad_()
            leaves.append(options[name])
    out, lse = reference_attention(*leaves[:4], keep=keep, **options)
    loss = (out * grad_out.double()).sum()
    if grad_lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse * grad_lse.double(), 0.0).sum()
    wanted = [t for t in leaves if is_float(t)]
    return [out, lse, *torch.autograd.grad(loss, wanted)]


# ---------------------------------------------------------------------------------------------------- the check


@dataclass
class Result:
    """What the operators gave. Gradients are None where nothing is differentiable."""

    out: torch.Tensor
    lse: torch.Tensor
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor
    grad_attn_mask: torch.Tensor | None
    grad_sinks: torch.Tensor | None
    grad_alibi_slopes: torch.Tensor | None


def describe(query, key, value, attn_mask=None, **options):
    """One line for failures: shapes, strides where they are not dense, dtypes and options that are not the default."""
    parts = []
    for name, t in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if t is not None:
            dtype = "" if name in ("key", "value") else f" {str(t.dtype)[6:]}"
            parts.append(f"{name} {tuple(t.shape)}{dtype}" + ("" if t.is_contiguous() else f" strides {t.stride()}"))
    return ", ".join(
        parts + [f"{name}={value}" for name, value in options.items() if value is not None and value is not False]
    )


def random_grad_out(query, key, value, enable_gqa=False, seed=1):
    """A gradient for the output, in its shape and dtype."""
    q, _, v = expand_heads(query, key, value, enable_gqa)
    return random_tensor((*q.shape[:-1], v.size(-1)), query.dtype, seed=seed)


def attention_and_gradients(
    query, key, value, attn_mask=None, *, grad_out=None, grad_lse=None, dropout_seed=None, **options
) -> Result:
    """Runs attention_forward and attention_backward once, with the readable spelling of causal_alignment."""
    ops, seed = torch.ops.attnjourney, {} if dropout_seed is None else {"dropout_seed": torch.tensor(dropout_seed)}
    if grad_out is None:
        grad_out = random_grad_out(query, key, value, options.get("enable_gqa", False))
    if "causal_alignment" in options:
        options["causal_alignment"] = ("top_left", "bottom_right").index(options["causal_alignment"])
    with torch.no_grad():
        out, lse, stats = ops.attention_forward(query, key, value, attn_mask, **options, **seed)
        grads = ops.attention_backward(
            grad_out, grad_lse, query, key, value, attn_mask, out, lse, stats, **options, **seed
        )
    optional = (attn_mask, options.get("sinks"), options.get("alibi_slopes"))
    return Result(out, lse, *grads[:3], *(grad if is_float(t) else None for grad, t in zip(grads[3:], optional)))


def check_attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    grad_out=None,
    grad_lse=None,
    keep=None,
    dropout_seed=None,
    label="",
    ulps=ULPS,
    **options,
) -> Result:
    """Runs forward and backward once and asserts the rule on out, lse and every gradient.

    `options`: those of the operators. With dropout, `dropout_seed` (int) and the `keep` mask
    (bool, (..., q_len, kv_len)) that belongs to it.
    """
    __tracebackhide__ = True
    text = f"{label}[{describe(query, key, value, attn_mask, **options)}]"
    if grad_out is None:
        grad_out = random_grad_out(query, key, value, options.get("enable_gqa", False))
    result = attention_and_gradients(
        query, key, value, attn_mask, grad_out=grad_out, grad_lse=grad_lse, dropout_seed=dropout_seed, **options
    )
    inputs = (query, key, value, attn_mask)
    reference = reference_run(inputs, grad_out, grad_lse, keep, **options)
    plain, roundings = plain_run(inputs, grad_out, grad_lse, keep, ulps, **options)
    actual = {name: x for name, x in vars(result).items() if x is not None}
    optional = {"attn_mask": attn_mask, **options}
    for (name, x), same_dtype, wide, rounding in zip(actual.items(), plain, reference, roundings, strict=True):
        lse_dtype = LSE_DTYPE.get(query.dtype, torch.float32)
        dtype = lse_dtype if name == "lse" else getattr(optional.get(name.removeprefix("grad_")), "dtype", query.dtype)
        assert x.dtype == dtype, f"{name} {text}: {x.dtype}"
        factor = OUTPUT_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
        assert_close_to_reference(x, same_dtype, wide, factor, f"{name} {text}", rounding)
    return result


# ---------------------------------------------------------------------------------------------------- inputs


def random_tensor(shape, dtype=torch.float32, seed=0, layout="contiguous", outliers=True):
    """Normal numbers, one row (last dimension) in eight ten times larger; the same numbers in every one of LAYOUTS."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if outliers and len(shape) > 1:
        x = x * torch.where(torch.rand((*shape[:-1], 1), generator=generator) < 0.125, 10.0, 1.0)
    return LAYOUTS[layout](x.to(dtype))


def _transposed(x):  # stored (..., length, heads, dim)
    return x if x.dim() < 3 else x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _packed(x):  # the middle third of (..., length, 3, heads, dim), as a fused projection gives it
    x = (x if x.dim() < 3 else x.transpose(-2, -3)).contiguous()
    filler = torch.full_like(x, math.nan)
    dim = -2 if x.dim() < 3 else -3
    x = torch.stack([filler, x, filler], x.dim() + dim + 1).select(x.dim() + dim + 1, 1)
    return x if x.dim() < 3 else x.transpose(-2, -3)


def _stepped(dim):  # every second element of a dimension, NaN between
    def layout(x):
        wide = torch.stack([x, torch.full_like(x, math.nan)], x.dim() + dim + 1)
        return wide.flatten(x.dim() + dim, x.dim() + dim + 1).unflatten(dim, (x.size(dim), 2)).select(dim, 0)

    return layout


def _offset(x):  # starts one element into its storage, one element of padding after every row
    padded = torch.full((*x.shape[:-1], x.size(-1) + 1), math.nan, dtype=x.dtype)
    padded[..., 1:] = x
    return padded[..., 1:]


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": _transposed,
    "packed": _packed,
    "stepped_rows": _stepped(-2),
    "stepped_last": _stepped(-1),
    "offset": _offset,
    "columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),  # the last dimension is the slowest
}


def expanded(x, dim):
    """x with dimension `dim` made of stride 0: every index holds what index 0 held."""
    return x.narrow(dim, 0, 1).expand(x.shape)


@contextlib.contextmanager
def threads(count):
    """Runs with torch.set_num_threads(count)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poison_memory(megabytes=4):
    """Leaves freed memory full of NaN, so that an output nobody writes is seen."""
    blocks = [torch.full((n,), math.nan) for n in (16, 64, 256, 1024, 4096, 16384, megabytes << 18) for _ in range(4)]
    del blocks


# ---------------------------------------------------------------------------------------------------- covering by pairs


def pairs(**axes):
    """Rows (dicts) in which every two values of two axes occur together; deterministic, close to the fewest rows."""
    names = list(axes)
    values = [list(axes[n]) for n in names]
    n = len(names)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(n), 2)
        for i in range(len(values[a]))
        for j in range(len(values[b]))
    }
    rows = []

    def gain(row, axis, i):
        return sum(
            (((other, row[other]), (axis, i)) if other < axis else ((axis, i), (other, row[other]))) in open_pairs
            for other in row
        )

    while open_pairs:
        (a, i), (b, j) = min(open_pairs)
        row = {a: i, b: j}
        for axis in sorted(set(range(n)) - {a, b}, key=lambda axis: -len(values[axis])):
            count = len(values[axis])
            start = len(rows) % count  # ties go round
            row[axis] = max(((start + k) % count for k in range(count)), key=lambda i: gain(row, axis, i))
        rows.append({names[axis]: values[axis][row[axis]] for axis in range(n)})
        for x, y in itertools.combinations(sorted(row.items()), 2):
            open_pairs.discard((x, y))
    return rows


def row_id(row):
    """A readable test id for a row of pairs()."""
    return "-".join(str(v).removeprefix("torch.").replace(" ", "") for v in row.values())
