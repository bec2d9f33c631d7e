"""Scaled dot-product attention, the core operator: torch.ops.attnjourney.attention."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ._attention_checks import alignment_index, check
from ._attention_rules import empty_results, vmap_forward, vmap_gradients, vmap_jvp
from ._registry.flops import attention_flops
from ._registry.operator import seed_for
from ._registry.registration import LIBRARY, register
from .block_attention import block_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import AttentionOptions

UNBOUNDED = (-1, -1)


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
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
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""softmax(scale * query key^T + mask) value per head, in O(L + S) memory; a drop-in for
    torch.nn.functional.scaled_dot_product_attention (Vaswani et al. 2017, arXiv 1706.03762; computed by the online
    softmax of FlashAttention, arXiv 2205.14135). All options compose, and all are differentiated,
    twice and in forward mode too, in the same memory.

    A row stands at position p = i, or i + S - L with causal_alignment="bottom_right" (with lengths: each sequence's
    own). It sees key j if j < prefix_length, or if causality (j <= p) and the window (p - left <= j <= p + right) allow
    it; and if j < key_length and attn_mask allow it. Scores: scale, softcap, then attn_mask and ALiBi.

    Args:
        query: (..., Hq, L, E). Any rank from 2; rank 3 has no batch dimension, rank 2 no heads either. float32,
            float64, bfloat16 or float16.
        key: (..., Hk, S, E), of query's rank and dtype. A batch or head dimension of size 1 broadcasts.
        value: (..., Hk, S, Ev); Ev may differ from E.
        attn_mask: broadcasts to (..., Hq, L, S). bool: True where a key may be attended to. Floating (query's dtype or
            float32): added to the scaled scores; -inf hides the key. Trainable: the gradient is summed in its shape.
            An attnjourney.BlockMask: time follows its visible blocks.
        dropout_p: probability of dropping a weight, always applied: pass 0.0 in evaluation. The bits follow
            torch.manual_seed and depend on nothing else than the seed and the weight's position.
        is_causal: row position p sees keys 0 .. p.
        scale: 1 / sqrt(E) by default; may be 0 or negative.
        enable_gqa: Hq may be a multiple of Hk; query head h reads key/value head h // (Hq / Hk).
        causal_alignment: "top_left", as torch's own function, or "bottom_right". Also shifts the window and ALiBi.
        window_size: (left, right), both ends inclusive; -1 is unbounded, None both. Time follows the window.
        prefix_length: the first keys, visible whatever causality and window say.
        key_lengths, query_lengths: (B,) int32 or int64, B the product of the batch dimensions. Keys beyond are never
            read; rows beyond give 0, lse -inf and no gradient.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118); 0 or None: they stay.
        sinks: (Hq,) or (B, Hq), float32 or query's dtype: one logit that joins each head's denominator (arXiv
            2309.17453; as trained in gpt-oss). Trainable.
        alibi_slopes: (Hq,) or (B, Hq), float32 or query's dtype: -slope * |p - j| is added (arXiv 2108.12409).
            Trainable.
        dropout_seed: int64 scalar: the bits of dropout. Drawn from torch's generator by default.
        return_lse: also return the logarithm of each row's denominator, differentiable.

    Returns:
        (..., Hq, L, Ev) in query's dtype, contiguous. A row that sees no key is 0 and gives no gradient.
        With return_lse also (..., Hq, L), float32 (float64 for float64), natural logarithm; -inf where a row sees no
        key (the sink, where there is one).

    Raises:
        ValueError: a shape, a length or a number that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated three times, or twice in forward mode.
    """
    options: dict[str, Any] = {}  # what is not the default: each one costs time
    if scale is not None:
        options["scale"] = scale
    if enable_gqa:
        options["enable_gqa"] = True
    if causal_alignment != "top_left":
        options["causal_alignment"] = alignment_index(causal_alignment)
    if window_size is not None and window_size != UNBOUNDED:
        options["window_size"] = window_size
    if prefix_length != 0:
        options["prefix_length"] = prefix_length
    if softcap is not None and softcap != 0.0:
        options["softcap"] = softcap
    if key_lengths is not None:
        options["key_lengths"] = key_lengths
    if query_lengths is not None:
        options["query_lengths"] = query_lengths
    if sinks is not None:
        options["sinks"] = sinks
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if dropout_p > 0 or dropout_seed is not None:
        options["dropout_seed"] = seed_for(query, dropout_p, dropout_seed)
    if attn_mask is not None and isinstance(attn_mask, BlockMask):
        return block_attention(query, key, value, attn_mask, dropout_p, is_causal, return_lse, options)
    operator = _attention_with_lse if return_lse else _attention
    if attn_mask is None and dropout_p == 0 and not is_causal and not options:
        return operator(query, key, value)  # a default takes time where it is given: of a tiny call an eighth
    return operator(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool,
    dropout_p: float, is_causal: bool, causal_alignment: int, prefix_length: int, origin: list[int],
    dropout_seed: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    lead = check(query, key, value, attn_mask, scale, enable_gqa, **options)
    return empty_results(query, value, lead)


def _flops(*, query: torch.Size, key: torch.Size, value: torch.Size, **others: Any) -> tuple[int, ...]:
    """As torch counts F.scaled_dot_product_attention: masks are ignored; all but the forward recompute the scores."""
    batch_heads = math.prod(max(n, key[d], value[d]) for d, n in enumerate(query[:-2]))
    return attention_flops(batch_heads * query[-2] * key[-2], query, value, others)


_attention = register(
    "attention",
    fake=_fake,
    vmap=(
        partial(vmap_forward, torch.ops.attnjourney.attention_forward.default),
        partial(vmap_gradients, torch.ops.attnjourney.attention_backward.default),
        partial(vmap_jvp, torch.ops.attnjourney.attention_jvp.default),
        partial(vmap_gradients, torch.ops.attnjourney.attention_backward_jvp.default),
    ),
    also=("attention_with_lse",),
    autocast=("query", "key", "value", "attn_mask"),
    flops=_flops,
)


def _with_lse(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options["dropout_seed"] = seed_for(query, dropout_p, options.get("dropout_seed"))
    return torch.ops.attnjourney.attention_forward.default(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )[:2]


for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):  # attention_forward has all the kernels
    LIBRARY.impl("attention_with_lse", _with_lse, _key)
_attention_with_lse = torch.ops.attnjourney.attention_with_lse.default
