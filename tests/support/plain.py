"""Attention's formula in plain PyTorch with every option: values in the inputs' dtype, and what rounding must cost.

Both feed the one tolerance rule of testing.py. The cost of rounding is a propagation of errors: each number that a
fused kernel has to round (a product's terms, a score, lse, a weight, delta, the result) brings an independent error of
ULPS, and variances pass through the formula's own derivatives. What all terms of a row share (an error of its lse or
delta) is kept apart and passes through their sum, where it may cancel as the terms do. So a gradient whose terms cancel
is allowed ulps of the root of the sum of its squared terms: more than ulps of its own small value, which no order of
summation can keep, and far less than ulps of the largest number of the tensor or of the sum of all |terms|.
"""

import math

import torch

from attnjourney.reference._visibility import per_head, per_item, visibility
from attnjourney.reference.attention import expand_heads

ULPS = 2  # a number and its operands, half an ulp each, at four standard deviations
LSE_DTYPE = {torch.float64: torch.float64}  # float32 for every other dtype
INFINITY = math.inf


def is_float(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def _formula(
    query,
    key,
    value,
    attn_mask,
    grad_out,
    grad_lse=None,
    keep=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    causal_alignment="top_left",
    window_size=(-1, -1),
    prefix_length=0,
    key_lengths=None,
    query_lengths=None,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
):
    """All quantities of forward and backward by name. 16-bit inputs: products of 16-bit matrices, scores and softmax in
    float32."""
    q, k, v = expand_heads(query, key, value, enable_gqa)
    dtype, wide = query.dtype, LSE_DTYPE.get(query.dtype, torch.float32)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    seen, distance = visibility(
        q, k, attn_mask, is_causal, causal_alignment, tuple(window_size), prefix_length, key_lengths, query_lengths
    )
    # head_dim from the end: in float64 too, this is not the reference's order of summation
    product = (q.flip(-1).to(wide) @ k.flip(-1).to(wide).mT * scale).masked_fill(~seen, 0.0)
    tanh = (product / softcap).tanh() if softcap > 0 else torch.zeros_like(product)
    capped, cap_slope = (softcap * tanh, 1 - tanh.square()) if softcap > 0 else (product, torch.ones_like(product))
    bias = [torch.zeros((), dtype=wide)] * 2
    if is_float(attn_mask):
        bias[0] = attn_mask.to(wide).masked_fill(~seen, 0.0)
    if alibi_slopes is not None:
        bias[1] = -per_head(alibi_slopes, q).to(wide) * distance
    scores = (capped + bias[0] + bias[1]).masked_fill(~seen, -INFINITY)
    sink = torch.full((*q.shape[:-1], 1), -INFINITY, dtype=wide)
    if sinks is not None:
        sink = per_head(sinks, q).to(wide).expand(sink.shape)
        if query_lengths is not None:
            rows = torch.arange(q.size(-2))[:, None] < per_item(query_lengths, q)
            sink = sink.masked_fill(~rows, -INFINITY)
    peak = torch.cat([scores, sink], -1).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    total = (scores - peak).exp().sum(-1, keepdim=True) + (sink - peak).exp()
    dropped = 1 if keep is None else keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    out = ((scores - peak).exp() / total.clamp_min(torch.finfo(wide).tiny) * dropped).to(dtype) @ v
    lse = torch.where(total > 0, peak + total.log(), -INFINITY)

    row = lse.nan_to_num(neginf=0.0)
    total = total.clamp_min(torch.finfo(wide).tiny)
    p, p_sink = (scores - peak).exp() / total, (sink - peak).exp() / total
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1)
    dp = (grad_out @ v.mT).to(wide) * dropped
    ds = p * (dp - delta)
    into_product = ds * cap_slope
    weights, narrow = (p * dropped).to(dtype), into_product.to(dtype)
    return dict(
        grad_query=narrow @ k * scale,
        grad_key=narrow.mT @ q * scale,
        grad_value=weights.mT @ grad_out,
        grad_attn_mask=ds,
        grad_sinks=-(p_sink * delta).sum(-2, keepdim=True),
        grad_alibi_slopes=-(ds * distance).sum((-2, -1), keepdim=True),
        **{name: x for name, x in locals().items() if name not in ("query", "key", "value")},
    )


def _rounding(f, mask_dtype, ulps):
    """Variances by name, in float64, of the results in `f` (of _formula). First order; see the head of this file."""
    dtype, wide = f["dtype"], f["wide"]
    shown = f["seen"]
    u, uw = (ulps * torch.finfo(t).eps for t in (dtype, wide))

    def get(name):
        return f[name].double().nan_to_num(0.0, 0.0, 0.0) if isinstance(f[name], torch.Tensor) else f[name]

    q, k, v, g, out = (get(n).square() for n in ("q", "k", "v", "grad_out", "out"))
    p, ds, dp, delta, p_sink, cap_slope = (get(n) for n in ("p", "ds", "dp", "delta", "p_sink", "cap_slope"))
    lse, dropped, distance, scale = get("row"), get("dropped"), get("distance"), f["scale"] ** 2
    lse_finite = f["lse"].isfinite()

    def chain(n):  # a sum of n terms, one after the other, rounds partial sums too
        return max(1.0, n / 4)

    product = uw**2 * chain(q.size(-1)) * (scale * q @ k.mT + get("product").square())
    score = cap_slope.square() * product + uw**2 * (
        get("capped").square()
        + get("scores").square()
        + sum(b.double().nan_to_num(0.0, 0.0, 0.0).square() for b in f["bias"])
    )
    score = score.masked_fill(~shown, 0.0)
    row = (p.square() * score).sum(-1, keepdim=True) + uw**2  # of the logarithm of a row's sum
    sink_score = torch.where(p_sink > 0, get("sink"), 0.0).square()
    row = row + p_sink.square() * uw**2 * sink_score
    # an exponential as exact as 16 bits need is enough
    row = (row + (u / 1024 if dtype.itemsize == 2 else 0) ** 2).masked_fill(~lse_finite, 0.0)
    weight = p.square() * (u**2 + score) * dropped**2
    # the two sums over keys, of weights and of weighted values
    result = weight @ v + (u**2 + uw**2 * chain(k.size(-2))) * out
    of_delta = (g * result).sum(-1, keepdim=True) + uw**2 * ((g * out).sum(-1, keepdim=True) + delta.square())
    of_dp = uw**2 * chain(v.size(-1)) * ((g @ v.mT) * dropped**2 + dp.square())
    of_ds = p.square() * (of_dp + uw**2 * (dp.square() + delta.square())) + ds.square() * (u**2 + score)
    tanh = 2 * get("tanh") / f["softcap"] if f["softcap"] > 0 else torch.zeros_like(p)
    inner = cap_slope.square() * of_ds + ds.square() * (uw**2 + (tanh * cap_slope).square() * product)
    p_in, ds_in = p * cap_slope, ds * cap_slope
    k_signed = get("k")
    variances = dict(
        out=result,
        lse=(row + uw**2 * lse.square()).squeeze(-1),
        grad_query=scale * (inner @ k + of_delta * (p_in @ k_signed).square() + row * (ds_in @ k_signed).square()),
        grad_key=scale * (inner.mT @ q + p_in.square().mT @ (of_delta * q) + ds_in.square().mT @ (row * q)),
        grad_value=weight.mT @ g + (p * dropped).square().mT @ (row * g),
        grad_sinks=(p_sink.square() * (of_delta + delta.square() * (row + uw**2 * sink_score))).sum(-2, keepdim=True),
        grad_alibi_slopes=(
            (distance**2 * of_ds).sum(-1, keepdim=True)
            + of_delta * (p * distance).sum(-1, keepdim=True).square()
            + row * (ds * distance).sum(-1, keepdim=True).square()
        ).sum(-2, keepdim=True),
    )
    if mask_dtype is not None:
        of_mask = of_ds + p.square() * of_delta + ds.square() * row
        if f["attn_mask"].size(-1) == 1:  # what a row shares, in the sum over its keys
            shared = of_delta * p.sum(-1, keepdim=True).square() + row * ds.sum(-1, keepdim=True).square()
            of_mask = of_mask + shared / max(1, p.size(-1))
        variances["grad_attn_mask"] = of_mask
    return variances


def plain_run(inputs, grad_out, grad_lse=None, keep=None, ulps=ULPS, **options):
    """(values, roundings): out, lse and the gradients of query, key, value and, where given, float mask, sinks, slopes.

    In float64 the formula is no less exact than the reference. What an error of it would be is read off in float32: the
    error on inputs rounded to float32, in the proportion of the two epsilons.
    """
    tensors = dict(zip(("query", "key", "value", "attn_mask"), inputs))
    tensors.update({name: options.pop(name, None) for name in ("sinks", "alibi_slopes")})
    with torch.no_grad():
        f = _formula(**tensors, grad_out=grad_out, grad_lse=grad_lse, keep=keep, **options)
        variances = _rounding(f, tensors["attn_mask"].dtype if is_float(tensors["attn_mask"]) else None, ulps)
    sources = {n: t for n, t in tensors.items() if is_float(t)}
    values = [f["out"], f["lse"].squeeze(-1), *_reduced(f, sources, options).values()]
    if grad_out.dtype == torch.float64:
        narrow = {n: t.float() if is_float(t) else t for n, t in tensors.items()}
        sides = (grad_out.float(), None if grad_lse is None else grad_lse.float())
        errors = []
        for cast in (torch.Tensor.float, torch.Tensor.double):
            own = {n: cast(t) if is_float(t) else t for n, t in narrow.items()}
            with torch.no_grad():
                g = _formula(
                    **own,
                    grad_out=cast(sides[0]),
                    grad_lse=None if grad_lse is None else cast(sides[1]),
                    keep=keep,
                    **options,
                )
            own = {n: own[n] for n in sources}
            errors.append([g["out"], g["lse"].squeeze(-1), *_reduced(g, own, options).values()])
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        values = [
            x + ((a.double() - b) * ratio).nan_to_num(0.0, 0.0, 0.0) if x.numel() else x
            for x, a, b in zip(values, *errors)
        ]
    wide = {n: t.detach().double() for n, t in sources.items()}
    reduced = _reduced(variances, wide, options)
    roundings = [variances["out"], variances["lse"]]
    for (name, variance), value in zip(reduced.items(), values[2:]):
        eps = ulps * torch.finfo(sources[name].dtype).eps
        roundings.append(variance + (eps * value.double().nan_to_num(0.0, 0.0, 0.0)).square())
    return values, [x.clamp_min(0.0).sqrt() for x in roundings]


def _reduced(terms, sources, options):
    """The gradient terms summed over what broadcasting and grouping repeated, 16-bit ones in float32."""
    wide = LSE_DTYPE.get(sources["query"].dtype, torch.float32)
    leaves = {n: t.detach().to(wide).requires_grad_() for n, t in sources.items()}
    q, k, v = expand_heads(leaves["query"], leaves["key"], leaves["value"], options.get("enable_gqa", False))
    targets = {"query": q, "key": k, "value": v}
    for name in set(leaves) & {"sinks", "alibi_slopes"}:
        targets[name] = per_head(leaves[name], q).expand(*q.shape[:-2], 1, 1)
    if "attn_mask" in leaves:
        targets["attn_mask"] = leaves["attn_mask"].expand(*q.shape[:-1], k.size(-2))
    return {
        name: torch.autograd.grad(targets[name], leaf, terms[f"grad_{name}"].to(wide))[0].to(sources[name].dtype)
        for name, leaf in leaves.items()
    }
