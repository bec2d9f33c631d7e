"""The weights of attention, for chosen rows and heads, a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .._errors import raise_typed
from ..block_mask import BlockMask
from ._attention_checks import CHECKED, alignment_index, check
from ._registry.fakes import need, same_size
from ._registry.operator import Signature, carries_tangent
from ._registry.registration import LIBRARY
from ._registry.torch_internals import any_requires_grad, below_autograd, grad_enabled, transforms_active
from .attention import UNBOUNDED
from .block_attention import block_tensors


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    is_causal: bool = False,
    *,
    lse: Tensor | None = None,
    rows: Tensor | Sequence[int] | None = None,
    heads: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] | None = UNBOUNDED,
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """What attnjourney.attention multiplies the values with, before dropout: O(rows * S) memory.

    Args:
        lse: of the same call, as attention(..., return_lse=True) gives it. Saves a pass over the keys, but its rounding
            is that of the weights then: a relative error of 6e-8 |lse| in float32. Without it they are exact.
        rows: the query rows wanted, all by default.
        heads: the query heads wanted, all by default. Numbers in a CUDA tensor are not checked, which would wait for
            the device: what is not there gets weights of 0.
        the others: as in attnjourney.attention.

    Returns:
        (..., heads, rows, S) in query's dtype. Rows sum to 1 (with a sink: to less), or to 0 where no key is visible.

    Raises as attnjourney.attention. Where a gradient is wanted, the weights are made of torch's own operators, which
    keep some rows * S numbers more. The operator underneath has none, nor one under torch.func: NotImplementedError.
    """
    options: dict[str, Any] = dict(
        scale=scale,
        enable_gqa=enable_gqa,
        window_size=UNBOUNDED if window_size is None else window_size,
        prefix_length=prefix_length,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        softcap=softcap or 0.0,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    if _wants_gradient(query, key, lse, attn_mask, sinks, alibi_slopes):
        from ..reference.attention import differentiable_weights

        weights = differentiable_weights(
            query, key, attn_mask, is_causal, lse, rows, causal_alignment=causal_alignment, **options
        )
        return weights if heads is None else weights.index_select(-3, torch.as_tensor(heads, device=query.device))
    options["causal_alignment"] = alignment_index(causal_alignment)
    stats = None
    if lse is None:
        lse, stats = row_sums(query, key, attn_mask, is_causal, options)
    return chosen_weights(query, key, attn_mask, is_causal, options, lse, stats, rows, heads)


def _wants_gradient(*inputs: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():  # which cannot read torch's own functions
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return grad_enabled() and any_requires_grad(*inputs) and not transforms_active()


def row_sums(
    query: Tensor, key: Tensor, attn_mask: Tensor | BlockMask | None, is_causal: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """lse and stats of the rows of an attention; options: those of the operator."""
    masks, name = _mask_arguments(attn_mask, query, key)
    operator = getattr(torch.ops.attnjourney, f"{name}attention_forward").default
    with torch.no_grad():
        return operator(query, key, key[..., :1], *masks, 0.0, is_causal, **options)[1:]  # any value would do


def chosen_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | BlockMask | None, is_causal: bool, options: dict[str, Any],
    lse: Tensor, stats: Tensor | None, rows: Tensor | Sequence[int] | None, heads: Tensor | Sequence[int] | None,
) -> Tensor:  # fmt: skip
    """attention_weights, from what row_sums gives; without stats they have the rounding of lse."""

    def indices(x: Tensor | Sequence[int] | None, size: int) -> Tensor:
        return torch.arange(size) if x is None else torch.as_tensor(x, dtype=torch.int64)

    n_heads = lse.shape[-2] if query.dim() >= 3 else 1
    masks, name = _mask_arguments(attn_mask, query, key)
    operator = getattr(torch.ops.attnjourney, f"_{name}attention_weights").default
    at = indices(rows, query.shape[-2]), indices(heads, n_heads)
    return operator(query, key, lse, stats, *at, *masks, is_causal, **options)


def _mask_arguments(attn_mask: Tensor | BlockMask | None, query: Tensor, key: Tensor) -> tuple[tuple, str]:
    """The mask as its operators take it, and what their names begin with."""
    if isinstance(attn_mask, BlockMask):
        return block_tensors(attn_mask, query, key), "block_"
    return (attn_mask,), ""


_NOT_DIFFERENTIABLE = "attention_weights: its result is not differentiable"


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, *inputs):
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(_NOT_DIFFERENTIABLE)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NOT_DIFFERENTIABLE)


def _autograd(operator: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    try:
        with below_autograd():
            weights = operator(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        raise_typed(error)
    given = (*args, *kwargs.values())
    tensors = [x for x in given if isinstance(x, Tensor) and x.requires_grad] if grad_enabled() else []
    if any(map(carries_tangent, given)) or (tensors and transforms_active()):
        raise NotImplementedError(_NOT_DIFFERENTIABLE)
    return _NotDifferentiable.apply(weights, *tensors) if tensors else weights


def _fake(signature: Signature, *args: Any, **kwargs: Any) -> Tensor:
    named = signature.checked(args, kwargs)
    query, key, lse = (named[name] for name in ("query", "key", "lse"))
    options = {name: named[name] for name in CHECKED}
    lead = check(query, key, key, named.get("attn_mask"), named["scale"], named["enable_gqa"], **options)
    want = (*lead, query.shape[-2])
    fits = lse.dim() == len(want) and all(same_size(n, w) for n, w in zip(lse.shape, want))
    need(fits, "lse: expected one number for each row of query", lse)
    for name in ("rows", "heads"):
        need(named[name].dim() == 1, f"{name}: expected 1 dimension", named[name])
    heads = [named["heads"].shape[0]] if lead else []
    return query.new_empty((*lead[:-1], *heads, named["rows"].shape[0], key.shape[-2]))


for _name in ("_attention_weights", "_block_attention_weights"):
    _operator = getattr(torch.ops.attnjourney, _name).default
    LIBRARY.impl(_name, partial(_autograd, _operator), "Autograd")
    torch.library.register_fake(_operator, partial(_fake, Signature(_operator)), lib=LIBRARY)
