"""What every test shares: the one tolerance rule, the fp64 oracle, and inputs that find bugs.

The rule: inputs are rounded to their dtype first; the reference is computed from the rounded inputs in float64; our
error against it is at most `factor` times that of the same formula in plain PyTorch in the inputs' own dtype (2 for
results, 3 for gradients). Where plain PyTorch happens to be exact, what rounding cannot avoid is allowed.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass

import torch

from attnjourney import reference

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOOR_ULPS = 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LSE_DTYPE = {torch.float64: torch.float64}  # float32 for every other dtype

# ---------------------------------------------------------------------------------------------------- the rule


def assert_close_to_reference(
    actual, plain_same_dtype, reference_fp64, factor=OUTPUT_FACTOR, name="result", rounding=None
):
    """Asserts the tolerance rule, in maximum and in L2 norm.

    `actual`, `plain_same_dtype` and `reference_fp64` have one shape. Infinities and NaNs of the reference must be met
    exactly. `rounding` (same shape): the error that rounding alone may bring; by default 4 ulp of the reference.
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
    for norm, measure in (("max", lambda x: x.max().item()), ("L2", lambda x: x.norm().item())):
        bound = max(factor * measure(plain_error), measure(rounding))
        if not measure(error) <= bound:
            where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            raise AssertionError(
                f"{name}: {norm} error {measure(error):.3g} > {bound:.3g} (plain {dtype}: {measure(plain_error):.3g}, "
                f"rounding {measure(rounding):.3g}); worst at {where}: got {actual[where].item():.9g}, "
                f"expected {reference[where].item():.9g}"
            )


# ---------------------------------------------------------------------------------------------------- the oracle


def _expand(query, key, value, enable_gqa):
    """Query, key and value with the batch and head dimensions of the call."""
    if query.dim() >= 3 and enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // max(1, t.size(-3)), -3) for t in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return [t.expand(*lead, *t.shape[-2:]) for t in (query, key, value)]


def visible_keys(query, key, attn_mask=None, is_causal=False):
    """Bool, broadcastable to (..., q_len, kv_len): which keys a row may see. Causal: key j <= row i."""
    visible = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if attn_mask is not None:
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)
    return visible


def reference_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, keep=None, **options):
    """(out, lse) of the shipped reference; `keep` (bool, (..., q_len, kv_len)) is what dropout keeps."""
    return reference.attention(
        query, key, value, attn_mask, dropout_p, is_causal, keep_mask=keep, return_lse=True, **options
    )


def reference_run(inputs, grad_out, grad_lse=None, keep=None, **options):
    """(out, lse, gradients of query, key, value, float mask) in float64, by autograd."""
    leaves = [t if t is None or t.dtype == torch.bool else t.detach().double().requires_grad_() for t in inputs]
    out, lse = reference_attention(*leaves, keep=keep, **options)
    loss = (out * grad_out.double()).sum()
    if grad_lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse * grad_lse.double(), 0.0).sum()
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [out, lse, *torch.autograd.grad(loss, wanted)]


def plain_run(
    inputs,
    grad_out,
    grad_lse=None,
    keep=None,
    ulps=FLOOR_ULPS,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """(results, roundings): out, lse and gradients by our own formula, untiled, in plain PyTorch in the inputs' dtype.

    The backward recomputes the weights from lse, as the operator does. 16-bit inputs: products of 16-bit matrices,
    scores and softmax in float32. The roundings are float64 estimates of what cannot be avoided: `ulps` of the summed
    terms; 1 ulp of lse and sqrt(head_dim) / 2 ulp of score (a sum of head_dim terms) enter exp(score - lse) with their
    size. lse of 16-bit inputs: an exponential as exact as 16 bits need is enough.
    """
    query, key, value, mask = (t if t is None or t.dtype == torch.bool else t.detach().requires_grad_() for t in inputs)
    sources = [query, key, value]
    targets = _expand(query, key, value, enable_gqa)
    dtype, wide = query.dtype, LSE_DTYPE.get(query.dtype, torch.float32)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    with torch.no_grad():
        q, k, v = targets
        visible = visible_keys(q, k, mask, is_causal)
        # head_dim from the end: in float64 too, this is not the reference's order of summation
        scores = q.flip(-1).to(wide) @ k.flip(-1).to(wide).transpose(-1, -2) * scale
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask.to(wide)
        scores = scores.masked_fill(~visible, -math.inf)
        peak = (
            scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
            if k.size(-2)
            else scores.new_zeros((*scores.shape[:-1], 1))
        )
        total = (scores - peak).exp().sum(-1, keepdim=True)
        dropped = 1 if keep is None else keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        out = ((scores - peak).exp() / total.clamp_min(torch.finfo(wide).tiny) * dropped).to(dtype) @ v
        lse = torch.where(total > 0, peak + total.log(), -math.inf)

        p = (scores - lse.nan_to_num(neginf=0.0)).exp()
        delta = (grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse.unsqueeze(-1)
        ds = p * ((grad_out @ v.transpose(-1, -2)).to(wide) * dropped - delta)
        pt, dst = ((p * dropped).to(dtype).transpose(-1, -2), ds.to(dtype).transpose(-1, -2))
        terms = [dst.transpose(-1, -2) @ k * scale, dst @ q * scale, pt @ grad_out]

        eps, eps_wide = ulps * torch.finfo(dtype).eps, torch.finfo(wide).eps
        q, k, v, g, p = (t.double().abs() for t in (q, k, v, grad_out, p))
        score_size = torch.where(visible, scores, 0.0).double().abs() * max(1.0, query.size(-1) ** 0.5 / 2)
        score_size = score_size + lse.double().nan_to_num(neginf=0.0).abs()
        p_error = p * (eps + eps_wide * score_size)
        out_error = p_error * dropped @ v
        dp = g @ v.transpose(-1, -2) * dropped
        delta = (p * dp).sum(-1, keepdim=True) + (0 if grad_lse is None else grad_lse.double().abs().unsqueeze(-1))
        ds_error = p_error * (dp + delta) + p * (g * out_error).sum(-1, keepdim=True)
        lse_error = (
            (eps / 1024 if dtype.itemsize == 2 else 0) / eps_wide
            + (p * score_size).sum(-1)
            + 4 * lse.double().nan_to_num(neginf=0.0).abs().clamp_min(1.0).squeeze(-1)
        )
        errors = [abs(scale) * ds_error @ k, abs(scale) * ds_error.transpose(-1, -2) @ q]
        errors.append((p_error * dropped).transpose(-1, -2) @ g)
    if mask is not None and mask.dtype != torch.bool:
        sources.append(mask)
        targets.append(mask.expand(ds.shape))
        terms.append(ds)
        errors.append(ds_error + ulps * torch.finfo(mask.dtype).eps * p * (dp + delta))

    def reduce(terms, target, source):  # sums what broadcasting and grouping repeated
        return torch.autograd.grad(target, source, terms.to(target.dtype), retain_graph=True)[0]

    grads = [reduce(*args) for args in zip(terms, targets, sources)]
    wide_sources = [t.detach().double().requires_grad_() for t in sources]
    wide_targets = _expand(*wide_sources[:3], enable_gqa) + [t.expand(ds.shape) for t in wide_sources[3:]]
    return [out, lse.squeeze(-1), *grads], [
        out_error,
        eps_wide * lse_error,
        *(reduce(*args) for args in zip(errors, wide_targets, wide_sources)),
    ]


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
    q, _, v = _expand(query, key, value, enable_gqa)
    return random_tensor((*q.shape[:-1], v.size(-1)), query.dtype, seed=seed)


def attention_and_gradients(
    query, key, value, attn_mask=None, *, grad_out=None, grad_lse=None, dropout_seed=None, **options
) -> Result:
    """Runs attention_forward and attention_backward once."""
    ops, seed = torch.ops.attnjourney, {} if dropout_seed is None else {"dropout_seed": torch.tensor(dropout_seed)}
    if grad_out is None:
        grad_out = random_grad_out(query, key, value, options.get("enable_gqa", False))
    with torch.no_grad():
        out, lse = ops.attention_forward(query, key, value, attn_mask, **options, **seed)
        grads = ops.attention_backward(grad_out, grad_lse, query, key, value, attn_mask, out, lse, **options, **seed)
    has_mask_gradient = attn_mask is not None and attn_mask.dtype != torch.bool
    return Result(out, lse, *grads[:3], grads[3] if has_mask_gradient else None)


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
    ulps=FLOOR_ULPS,
    **options,
) -> Result:
    """Runs forward and backward once and asserts the rule on out, lse and every gradient.

    `options`: dropout_p, is_causal, scale, enable_gqa. With dropout, `dropout_seed` (int) and the `keep` mask
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
    names = ["out", "lse", "grad_query", "grad_key", "grad_value"]
    dtypes = [query.dtype, LSE_DTYPE.get(query.dtype, torch.float32), *[query.dtype] * 3]
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        names.append("grad_attn_mask")
        dtypes.append(attn_mask.dtype)
    for i, (name, dtype) in enumerate(zip(names, dtypes)):
        actual, factor = getattr(result, name), OUTPUT_FACTOR if i < 2 else GRADIENT_FACTOR
        name = f"{name} {text}"
        assert actual.dtype == dtype, f"{name}: {actual.dtype}"
        assert_close_to_reference(actual, plain[i], reference[i], factor, name, roundings[i])
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
