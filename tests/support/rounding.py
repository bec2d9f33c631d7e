"""What rounding must cost the derivatives of attention, by Monte Carlo arithmetic.

plain.py propagates variances through formulas of the forward and the backward by hand. For derivatives in a direction
and second derivatives the same errors are drawn at random instead: attention is run in float64, every number that a
fused kernel of a dtype has to round gets an error of that size, in the value, in what comes back through it and in its
tangent, and autograd carries them on. The root mean square over some draws is the standard deviation of the result.
"""

import math

import torch

from attnjourney.reference._visibility import per_head, per_item, visibility
from attnjourney.reference.dropout import keep_mask_of
from tests.support.plain import LSE_DTYPE, ULPS, expand_heads, is_float

DRAWS = 12


def _noise(x, size):
    return x.detach() + size * torch.randn(x.shape, dtype=x.dtype)


class Rounded(torch.autograd.Function):
    """x with a relative error; its gradient with one of another size."""

    @staticmethod
    def forward(x, eps, eps_back):
        return _noise(x, eps * x.abs()) if eps else x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.eps, ctx.eps_back = inputs

    @staticmethod
    def backward(ctx, grad):
        return Rounded.apply(grad, ctx.eps_back, ctx.eps), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return Rounded.apply(tangent, ctx.eps, ctx.eps_back)


class Product(torch.autograd.Function):
    """a @ b, a sum of terms that are rounded one by one."""

    @staticmethod
    def forward(a, b, eps):
        chain = max(1.0, a.size(-1) / 4)  # a sum of n terms, one after the other, rounds partial sums too
        return _noise(a @ b, eps * (chain * (a.square() @ b.square())).sqrt())

    @staticmethod
    def setup_context(ctx, inputs, output):
        *both, ctx.eps = inputs
        ctx.save_for_backward(*both)
        ctx.save_for_forward(*both)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return Product.apply(grad, b.mT, ctx.eps), Product.apply(a.mT, grad, ctx.eps), None

    @staticmethod
    def jvp(ctx, a_tangent, b_tangent, _):
        a, b = ctx.saved_tensors
        return Product.apply(a_tangent, b, ctx.eps) + Product.apply(a, b_tangent, ctx.eps)


def rounded_attention(dtype):
    """attnjourney.attention(..., return_lse=True) on float64 tensors, with the errors of a kernel for `dtype`."""
    narrow, wide = (ULPS * torch.finfo(t).eps for t in (dtype, LSE_DTYPE.get(dtype, torch.float32)))

    def attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        *,
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
        dropout_seed=None,
        keep_mask=None,
        return_lse=True,
    ):
        def stored(x):  # exact itself, its gradient rounded to its dtype
            return Rounded.apply(x, 0.0, narrow)

        q, k, v = expand_heads(stored(query), stored(key), stored(value), enable_gqa)
        seen, distance = visibility(
            q, k, attn_mask, is_causal, causal_alignment, tuple(window_size), prefix_length, key_lengths, query_lengths
        )
        product = Product.apply(q, k.mT, wide) * (q.size(-1) ** -0.5 if scale is None else scale)
        product = Rounded.apply(product, wide, narrow)  # its gradient enters products of 16-bit matrices
        scores = product
        if softcap > 0:
            scores = Rounded.apply(softcap * Rounded.apply(product / softcap, 0.0, wide).tanh(), wide, wide)
        if is_float(attn_mask):
            scores = Rounded.apply(scores + stored(attn_mask).masked_fill(~seen, 0.0), wide, 0.0)
        if alibi_slopes is not None:
            slopes = Rounded.apply(
                stored(alibi_slopes), wide, 0.0
            )  # in units of the exponential, one error for all keys
            bias = Rounded.apply(per_head(slopes, q) * distance, wide, wide)
            scores = Rounded.apply(scores - bias, wide, 0.0)
        scores = scores.masked_fill(~seen, -math.inf)
        sink = torch.full((*q.shape[:-1], 1), -math.inf, dtype=torch.float64)
        if sinks is not None:
            sink = per_head(stored(sinks), q).expand(sink.shape)
            if query_lengths is not None:
                sink = sink.masked_fill(torch.arange(q.size(-2))[:, None] >= per_item(query_lengths, q), -math.inf)

        # The sum of a row is a constant here; its derivative enters by factors of 1. That of `out` meets
        # the rounded result: delta and lse_tangent * out are computed from it.
        logits = torch.cat([scores, sink], -1).detach()
        empty = (logits == -math.inf).all(-1, keepdim=True)
        exact = logits.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
        exponential = narrow / 1024 if dtype.itemsize == 2 else 0.0  # as exact as 16 bits need is enough
        given = _noise(exact, torch.full_like(exact, wide + exponential))
        p, p_sink = (Rounded.apply((x - given).exp(), wide, wide) for x in (scores, sink))
        error = (exact - given).exp()  # of the sum, which the operators take for 1
        total = Product.apply(p, p.new_ones(p.size(-1), 1), wide) + p_sink
        lse = given + (total + (error - total).detach()).clamp_min(1e-300).log()
        kept = 1.0
        if dropout_p > 0:
            bits = keep_mask_of(p.shape, dropout_seed, dropout_p) if keep_mask is None else keep_mask
            kept = bits * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        out = Rounded.apply(Product.apply(Rounded.apply(p * kept, narrow, wide), v, wide), narrow, 0.0)
        out = Rounded.apply(out * (exact - lse).exp(), narrow, 0.0)
        return out, Rounded.apply(lse.masked_fill(empty, -math.inf).squeeze(-1), wide, 0.0)

    return attention


def rounding_of(kind, tensors, arguments, exact):
    """The root mean square over some draws of kind(attention, ...) - exact, which are dictionaries of tensors."""
    attention = rounded_attention(tensors[0].dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = [kind(attention, tensors, arguments, torch.float64) for _ in range(DRAWS)]
    return {name: (sum((d[name] - x).square() for d in draws) / DRAWS).sqrt() for name, x in exact.items()}
