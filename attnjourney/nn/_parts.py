"""What the modules share: when a layer operator may take a projection's weights, padding masks, heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

P = ParamSpec("P")
R = TypeVar("R")
_PLAIN, _TRACED = (Tensor, nn.Parameter), (FakeTensor, FunctionalTensor)
_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
_Proxy = torch.fx.Proxy


def is_plain(*projections: nn.Module | None) -> bool:
    """Whether each is torch's own Linear and nothing else, so that a layer operator may read its weights: no hook, no
    parametrization, no adapter in its place, no weight whose class has products of its own (quantised, sharded)."""
    for p in projections:
        if p is None:
            continue
        if type(p) not in _LINEAR or "forward" in p.__dict__:
            return False
        if p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks:
            return False
        for w in (p.weight, p.bias):
            if w is not None and type(w) not in _PLAIN and not isinstance(w, _TRACED):
                return False
    return True


def leaf(forward: Callable[P, R]) -> Callable[P, R]:
    """For the forward of a module: torch.fx writes one call of the module into its graph and does not look inside, as
    it does with the modules of torch.nn."""

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for x in (*args[1:], *kwargs.values()):
            if isinstance(x, _Proxy):
                proxy = x
                break
        else:
            return forward(*args, **kwargs)
        path = proxy.tracer.path_of_module(args[0])  # type: ignore[attr-defined]
        return proxy.tracer.create_proxy("call_module", path, args[1:], kwargs)  # type: ignore[return-value]

    # a code object of its own: torch.compile counts recompilations by it, which the modules would share
    call.__code__ = call.__code__.replace(co_name=f"{forward.__qualname__.split('.')[0]}_forward")  # type: ignore[attr-defined]
    return call


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, seq, heads * dim) -> (batch, heads, seq, dim)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def split_packed(x: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """(batch, seq, 3 * heads * dim) -> three of (batch, heads, seq, dim)."""
    return x.unflatten(-1, (3, num_heads, -1)).transpose(1, 3).unbind(2)


def merge_heads(x: Tensor) -> Tensor:
    """(batch, heads, seq, dim) -> (batch, seq, heads * dim)."""
    return x.transpose(1, 2).flatten(2)


def padding_as_mask(key_padding_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """(batch, keys), bool (True: blocked) or floating (added) -> the mask of `attention`, (batch, 1, 1, keys)."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.shape != (batch, keys):
        raise ValueError(f"key_padding_mask: expected shape ({batch}, {keys}), got {tuple(key_padding_mask.shape)}")
    if key_padding_mask.dtype != torch.bool and not key_padding_mask.is_floating_point():
        raise RuntimeError(f"key_padding_mask: expected a bool or floating dtype, got {key_padding_mask.dtype}")
    mask = ~key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask
    return mask[:, None, None, :]


def check_sequence(name: str, x: Tensor, width: int | None) -> None:
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: expected shape (batch, seq, {width}), got {tuple(x.shape)}")


def check_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: expected a positive number, got {number}")


def check_divides(embed_dim: int, num_heads: int) -> None:
    if embed_dim % num_heads:
        raise ValueError(f"num_heads: expected a divisor of embed_dim, {embed_dim}, got {num_heads}")


def check_probability(name: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: expected a number between 0 and 1, got {p}")
