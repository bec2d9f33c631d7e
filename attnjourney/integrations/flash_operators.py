"""torch's five operators of flash attention, which its registry of implementations lets others serve on CUDA.

Who calls them: torch.nn.attention.varlen, nested tensors, DTensor, programs that were exported with them, and
F.scaled_dot_product_attention where `activate` has not taken the call before. Rows are aligned to the bottom right, as
in flash-attn. The functions do not ask where tensors are: tests run them on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._stats import stats_of
from .activity import ran
from .flash_attn import gather_blocks

BOTTOM_RIGHT = 1  # index of causal_alignment
_ops = torch.ops.attnjourney


def register(library: torch.library.Library, key: str = "CUDA") -> None:
    for name, function in FUNCTIONS.items():
        library.impl(name, function, key)


def _options(scale: float | None, left: int | None, right: int | None) -> dict[str, Any]:
    window = [-1 if side is None or side < 0 else side for side in (left, right)]
    return {"scale": scale, "causal_alignment": BOTTOM_RIGHT, "window_size": window}


def _refuse(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p > 0:
        raise RuntimeError(f"dropout_p: expected 0 of attnjourney behind torch's flash operators, got {dropout_p}")
    if return_debug_mask:
        raise RuntimeError("return_debug_mask: expected False of attnjourney behind torch's flash operators, got True")


def _laid_out_as(x: Tensor, template: Tensor) -> Tensor:
    """x with the strides that torch promises: those of a new tensor like `template`."""
    like = torch.empty_like(template)
    return x if x.stride() == like.stride() else like.copy_(x)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, is_causal: bool,
    seqused_k: Tensor | None, alibi_slopes: Tensor | None, block_table: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query (B, L, H, E) -> out (B, L, H, E), lse (B, H, L); packed (T, H, E) -> out (T, H, E), lse (H, T)."""
    ran("flash_operators")
    options = {**options, "alibi_slopes": alibi_slopes}
    if cum_seq_q is None:
        if block_table is not None:
            raise RuntimeError("block_table: expected None beside dense queries, got a tensor")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options.update(enable_gqa=True, key_lengths=seqused_k)
        out, lse, _ = _ops.attention_forward.default(q, k, v, None, 0.0, is_causal, **options)
        return out.transpose(1, 2), lse
    if seqused_k is not None or block_table is not None:
        key, value, cum_seq_k = used_keys(key, value, cum_seq_k, seqused_k, block_table)
    out, lse, _ = _ops.varlen_attention_forward.default(
        query, key, value, cum_seq_q, cum_seq_k, 0.0, is_causal, **options
    )
    return out, lse


def used_offsets(seqused_k: Tensor | None) -> Tensor:
    if seqused_k is None:
        raise ValueError("seqused_k: expected the lengths of the sequences beside block_table, got None")
    return torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0))


def used_keys(
    key: Tensor, value: Tensor, cum_seq_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first seqused_k keys of each sequence, packed, and their offsets."""
    offsets = used_offsets(seqused_k)
    if block_table is not None:
        return *gather_blocks(key, value, offsets, block_table), offsets
    if cum_seq_k is None:
        raise ValueError("cu_seq_k: expected a tensor without block_table, got None")
    lengths = offsets.diff().to(torch.int64)
    shift = torch.repeat_interleave(cum_seq_k[:-1].to(torch.int64) - offsets[:-1], lengths)
    rows = torch.arange(len(shift), device=key.device) + shift
    return key[rows], value[rows], offsets


def _differentiate(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, is_causal: bool, options: dict[str, Any],
) -> list[Tensor]:  # fmt: skip
    """Gradients of query, key and value, laid out as these."""
    ran("flash_operators")
    lse = lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32).contiguous()
    given = (query, key, value)
    if cum_seq_q is None:
        grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = _ops.attention_backward.default(
            grad, None, q, k, v, None, o, lse, stats_of(lse), 0.0, is_causal, enable_gqa=True, need=7, **options
        )[:3]
        gradients = [x.transpose(1, 2) for x in gradients]
    else:
        gradients = _ops.varlen_attention_backward.default(
            grad_out, None, *given, cum_seq_q, cum_seq_k, out, lse, stats_of(lse), 0.0, is_causal, need=7, **options
        )[:3]
    return [_laid_out_as(x, like) for x, like in zip(gradients, given, strict=True)]


def _no_bits(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a generator that nobody asked, twice, and a mask that nobody wants."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(dropout_p, return_debug_mask)
    options = _options(scale, window_size_left, window_size_right)
    out, lse = _attend(
        query, key, value, cum_seq_q, cum_seq_k, is_causal, seqused_k, alibi_slopes, block_table, options
    )
    return _laid_out_as(out, query), lse, *_no_bits(query)


def _forward_into(out: Tensor, query: Tensor, *arguments: Any, **options: Any) -> Tensor:
    made, lse, *_ = _forward(query, *arguments, **options)
    out.copy_(made)
    return lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(dropout_p)
    options = _options(scale, window_size_left, window_size_right)
    return tuple(_differentiate(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, is_causal, options))


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """query (B, H, L, E) -> out, lse, no offsets, the lengths, no bits."""
    _refuse(dropout_p, return_debug_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = _options(scale, None, None)
    out, lse = _attend(q, k, v, None, None, is_causal, None, None, None, options)
    out = _laid_out_as(out.transpose(1, 2), query)
    return out, lse, None, None, query.shape[2], key.shape[2], *_no_bits(query)


def _sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(dropout_p)
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _differentiate(grad, q, k, v, o, logsumexp, None, None, is_causal, _options(scale, None, None))
    return tuple(x.transpose(1, 2) for x in gradients)


FUNCTIONS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
