"""What rounding must cost a layer, by Monte Carlo arithmetic.

The layer in plain PyTorch runs in float64, and every operation that a dtype would round gets an error of its size. The
mode below sits under autograd, so operations of the backward get theirs too. The root mean square over some draws is
the standard deviation of the result. rounding.py does the same for attention alone, whose fused derivatives round
elsewhere than the formula's.
"""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.plain import ULPS

DRAWS = 6

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}  # the two factors come last
SUMS = {aten.sum, aten.mean}
ROUNDED = {
    aten.add, aten.sub, aten.mul, aten.div, aten.exp, aten.log, aten.pow, aten.sqrt, aten.rsqrt, aten.reciprocal,
    aten.tanh, aten.sigmoid, aten.sigmoid_backward, aten.silu, aten.silu_backward, aten._softmax, aten.logsumexp,
}  # fmt: skip
IN_PLACE = {aten.add_, aten.mul_, aten.div_}
# a number is exact in these: it is moved, selected or only changes its sign
EXACT = {
    aten.clone, aten._to_copy, aten.copy_, aten.cat, aten.stack, aten.index, aten.neg, aten.where, aten.masked_fill,
    aten.masked_fill_, aten.slice_backward, aten.select_backward, aten.zeros, aten.zeros_like, aten.ones, aten.full,
    aten.ones_like, aten.full_like, aten.new_zeros, aten.scalar_tensor, aten.isfinite, aten.abs, aten.eq, aten.ne,
    aten.arange, aten.triu, aten.tril, aten.repeat, aten.index_select, aten.amax, aten.maximum, aten.clamp_min,
    aten.empty_like, aten.fill_, aten.zero_, aten.new_empty, aten.empty, aten._unsafe_view, aten.constant_pad_nd,
    aten.split_with_sizes_copy, aten.lift_fresh, aten.new_full, aten.new_ones, aten.repeat_interleave,
}  # fmt: skip


class RoundedArithmetic(TorchDispatchMode):
    """Results get an error of `eps`, those of sums for each of their terms. An operation nobody has classed raises."""

    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, packet = function(*args, **(kwargs or {})), function._overloadpacket
        if not isinstance(out, torch.Tensor) or out.dtype != torch.float64 or packet in EXACT:
            return out
        aliases = [r.alias_info for r in function._schema.returns if r.alias_info is not None]
        if any(not alias.is_write for alias in aliases):  # a view
            return out
        if packet in PRODUCTS:
            a, b = args[-2:]
            size = (_chain(a.size(-1)) * (a.square() @ b.square()) + out.square()).sqrt()
        elif packet in SUMS:
            x = args[0].square()
            terms = function(x, *args[1:], **(kwargs or {}))
            count = x.numel() / max(1, out.numel())
            size = (_chain(count) * (terms / count if packet is aten.mean else terms)).sqrt()
        elif packet is aten._softmax_backward_data:
            grad, y, dim, _ = args
            size = (out.square() + y.square() * (grad * y).square().sum(dim, keepdim=True)).sqrt()
        elif packet in ROUNDED or packet in IN_PLACE:
            size = out.abs()
        else:
            raise NotImplementedError(f"what rounding costs {function} is not known here")
        error = self.eps * size * torch.randn_like(out)
        return out.add_(error) if aliases else out + error


def _chain(n):  # a sum of n terms, one after the other, rounds partial sums too
    return max(1.0, n / 4)


def roundings_of(run, exact, dtype):
    """A function for each result, as assert_close_to_reference takes it; the draws are made once, if one is called."""
    drawn = functools.cache(lambda: rounding_of(run, exact, dtype))
    return [functools.partial(lambda i: drawn()[i], i) for i in range(len(exact))]


def rounding_of(run, exact, dtype):
    """The root mean square over some draws of run() - exact, lists of float64 tensors; run(): the layer in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = []
        for _ in range(DRAWS):
            with RoundedArithmetic(ULPS * torch.finfo(dtype).eps):
                draws.append(run())
    return [(sum((draw[i] - x).square() for draw in draws) / DRAWS).sqrt() for i, x in enumerate(exact)]
