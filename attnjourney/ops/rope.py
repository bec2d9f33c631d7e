"""Rotary position embedding from tables: torch.ops.attnjourney.rope.

A linear operator: its backward is itself turned the other way and its forward derivative itself, to any order. So it
registers a node of its own and has no rope_forward and rope_backward (see _registry/registration.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import register_fake

from .._errors import raise_typed
from ._registry.fakes import need, same_size
from ._registry.inference import register_negative
from ._registry.operator import NAMESPACE, Signature
from ._registry.registration import LIBRARY, needs_node
from ._registry.torch_internals import below_autograd

_rope = torch.ops.attnjourney.rope.default
_rope_in_place = torch.ops.attnjourney.rope_.default


def rope_with_tables(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turns the first rotary_dim numbers of every row of x in pairs (Su et al. 2021, arXiv 2104.09864).

    Args:
        x: (batch, heads, seq, head_dim), float32, float64, bfloat16 or float16.
        cos, sin: (seq, rotary_dim / 2), or (batch, seq, rotary_dim / 2) for positions that differ by sequence; float32
            or x's dtype. They get no gradient.
        interleaved: pair j is (2 j, 2 j + 1) in place of (j, j + rotary_dim / 2).

    Returns:
        x's shape and dtype, contiguous; computed in float32, float64 for float64. Differentiable to any order.

    Raises:
        ValueError: a shape that does not fit. RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: cos or sin requires grad.
    """
    return _rope(x, cos, sin, interleaved=interleaved)


class _Rope(Function):
    @staticmethod
    def forward(x, cos, sin, interleaved, inverse):
        with below_autograd():
            return _rope(x, cos, sin, interleaved=interleaved, inverse=inverse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, cos, sin, ctx.interleaved, ctx.inverse = inputs
        if cos.requires_grad or sin.requires_grad:
            raise NotImplementedError(f"{NAMESPACE}::rope: cos and sin have no gradient")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * 5
        return _rope(grad, *ctx.saved_tensors, interleaved=ctx.interleaved, inverse=not ctx.inverse), *[None] * 4

    @staticmethod
    def jvp(ctx, tangent, cos_tangent, sin_tangent, *_):
        if cos_tangent is not None or sin_tangent is not None:
            raise NotImplementedError(f"{NAMESPACE}::rope: cos and sin have no forward derivative")
        return None if tangent is None else _rope(
            tangent, *ctx.saved_tensors, interleaved=ctx.interleaved, inverse=ctx.inverse
        )  # fmt: skip

    @staticmethod
    def vmap(info, in_dims, x, cos, sin, interleaved, inverse):
        size, options = info.batch_size, dict(interleaved=interleaved, inverse=inverse)
        x = x.unsqueeze(0).expand(size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if in_dims[1] is None and in_dims[2] is None:  # more heads of the same sequences
            x = x.transpose(0, 1)  # (batch, size, heads, seq, dim)
            return _rope(x.flatten(1, 2), cos, sin, **options).unflatten(1, x.shape[1:3]), 1
        batch = x.shape[1]
        tables = []
        for table, d in ((cos, in_dims[1]), (sin, in_dims[2])):
            table = table.unsqueeze(0).expand(size, *table.shape) if d is None else table.movedim(d, 0)
            if table.dim() == 3:
                table = table.unsqueeze(1).expand(-1, batch, -1, -1)
            tables.append(table.flatten(0, 1))
        return _rope(x.flatten(0, 1), *tables, **options).unflatten(0, (size, batch)), 0


def _autograd(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, *, interleaved: bool = False, inverse: bool = False,
) -> Tensor:  # fmt: skip
    try:
        if needs_node((x, cos, sin), {}):
            return _Rope.apply(x, cos, sin, interleaved, inverse)
        with below_autograd():
            return _rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
    except (ValueError, RuntimeError) as error:
        raise_typed(error)


def _functorch(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, *, interleaved: bool = False, inverse: bool = False,
) -> Tensor:  # fmt: skip
    return _Rope.apply(x, cos, sin, interleaved, inverse)


def _autograd_in_place(x: Tensor, cos: Tensor | None, sin: Tensor | None, *, interleaved: bool = False) -> None:
    if needs_node((x, cos, sin), {}):
        raise NotImplementedError(f"{NAMESPACE}::rope_: in place there is no gradient; call {NAMESPACE}::rope")
    try:
        with below_autograd():
            _rope_in_place(x, cos, sin, interleaved=interleaved)
    except (ValueError, RuntimeError) as error:
        raise_typed(error)
    torch.autograd.graph.increment_version(x)


LIBRARY.impl("rope", _autograd, "Autograd")
LIBRARY.impl("rope_", _autograd_in_place, "Autograd")
register_negative(Signature(_rope_in_place), [0])
LIBRARY.impl("rope", _functorch, "FuncTorchDynamicLayerFrontMode")


def _check(x: Tensor, cos: Any, sin: Any) -> None:
    """The checks of tensors without data."""
    Signature(_rope_in_place).checked((x, cos, sin), {})
    need(x.dim() == 4, "x: expected 4 dimensions (batch, heads, seq, head_dim)", x)
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"x: expected a floating dtype, got {x.dtype}")
    for name, table in (("cos", cos), ("sin", sin)):
        lead = (x.shape[2],) if table.dim() == 2 else (x.shape[0], x.shape[2])
        fits = table.dim() in (2, 3) and all(same_size(n, w) for n, w in zip(table.shape, lead))
        need(fits, f"{name}: expected shape ({x.shape[2]}, rotary_dim / 2) or with a batch dimension", table)
        need(2 * table.shape[-1] <= x.shape[3], f"{name}: expected at most head_dim / 2 columns", table)


@partial(register_fake, _rope, lib=LIBRARY)
def _fake(x: Tensor, cos: Tensor | None, sin: Tensor | None, **_: Any) -> Tensor:
    _check(x, cos, sin)
    return x.new_empty(x.shape)


@partial(register_fake, _rope_in_place, lib=LIBRARY)
def _fake_in_place(x: Tensor, cos: Tensor | None, sin: Tensor | None, **_: Any) -> None:
    _check(x, cos, sin)
