"""How far attention with weights in e4m3 may be from fp64 of the numbers that its bytes stand for.

A kernel rounds 2^8 e_j to e4m3, e_j = exp(score_j - m) with the largest score m so far, and divides by the sum of the
unrounded ones. Rounding brings at most 2^-4 of a number, and 2^-10 below the normal ones; what the maximum gains later
only shrinks it. So each element of the output is off by at most

    sum_j max(2^-4 p_j, 2^-18 p_max) |v_j|,

p the exact weights and p_max the largest of the row, the sink's among them. As roundings are independent of each other,
their root mean square is smaller: each is even over a step, 2^-3 / sqrt(12) of its weight at most, so that the L2 norm
of the error is that of sqrt(sum_j (0.0361 p_j)^2 v_j^2), of which twice is allowed. On top comes float32: its products'
sums, scores and results.
"""

import math

import torch

EPS = torch.finfo(torch.float32).eps


def _weights(query, key, seen, scale, softcap, sinks):
    """Exact scores, weights and lse of (B, H, L, E) in float64."""
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    score = scale * (query @ key.mT)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~seen, -math.inf)
    logits = score
    if sinks is not None:
        logits = torch.cat((score, sinks.double()[:, None, None].expand(*score.shape[:3], 1)), -1)
    lse = logits.logsumexp(-1)
    p = torch.exp(score - lse.masked_fill(lse == -math.inf, 0)[..., None])
    top = torch.exp(logits.amax(-1) - lse.masked_fill(lse == -math.inf, 0))
    return score, p, top, lse


def exact(query, key, value, seen, scale=None, softcap=0.0, sinks=None):
    """(out, lse) in float64."""
    _, p, _, lse = _weights(query, key, seen, scale, softcap, sinks)
    return p @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), lse


def assert_close_to_fp8_reference(out, lse, query, key, value, seen, *, scale=None, softcap=0.0, sinks=None, cut=False):
    """query, key, value: what the bytes stand for, in float64. cut: sums keep 13 bits of their largest term, as those
    of Hopper's tensor cores."""
    __tracebackhide__ = True
    score, p, top, wanted_lse = _weights(query, key, seen, scale, softcap, sinks)
    group = query.shape[1] // key.shape[1]
    value = value.repeat_interleave(group, 1)
    wanted = p @ value
    size = value.abs()
    # float32: a score is off by so much, and so are the logarithms of weights
    terms = (abs(query.shape[-1] ** -0.5 if scale is None else scale)) * (
        query.abs() @ key.repeat_interleave(group, 1).mT.abs()
    )
    unit = 2.0**-13 * math.ceil(query.shape[-1] / 32) if cut else 8 * EPS
    off = unit * terms.masked_fill(~seen, 0) + 4 * EPS * (1 + score.masked_fill(~seen, 0).abs())
    of_lse = (p * off).sum(-1)
    wide = (p * (off + of_lse[..., None])) @ size
    if cut:
        wide = wide + 2.0**-13 * math.ceil(key.shape[2] / 32) * (p @ size)
    steps = torch.where(seen, torch.maximum(p / 16, 2.0**-18 * top[..., None]), 0.0)
    rounding = torch.finfo(out.dtype).eps * wanted.abs() + torch.finfo(out.dtype).tiny
    error = (out.double() - wanted).abs()
    bound = steps @ size + wide + rounding
    assert out.shape == wanted.shape and not out.isnan().any()
    if not (error <= bound).all():
        at = tuple(int(i) for i in torch.unravel_index((error - bound).argmax(), error.shape))
        raise AssertionError(f"out{at}: got {out[at]}, expected {wanted[at]}, off by {error[at]:.3g} > {bound[at]:.3g}")
    even = torch.where(seen, torch.maximum(0.0361 * p, 2.0**-18 / math.sqrt(3) * top[..., None]), 0.0)
    allowed = 2 * (even.square() @ value.square()).sum().sqrt() + wide.norm() + rounding.norm()
    assert error.norm() <= allowed, f"out: L2 error {error.norm():.3g} > {allowed:.3g}"
    none = wanted_lse == -math.inf
    assert (out[none] == 0).all() and torch.equal(lse == -math.inf, none)
    lse_error = (lse.double() - wanted_lse).masked_fill(none, 0).abs()
    allowed = (of_lse + 8 * EPS * (1 + wanted_lse.masked_fill(none, 0).abs())).masked_fill(none, 0)
    assert (lse_error <= allowed).all(), f"lse: off by {(lse_error - allowed).max():.3g} more than {allowed.max():.3g}"
