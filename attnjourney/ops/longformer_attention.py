"""Longformer's attention: a dilated window, and tokens that see and are seen by all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._registry.call_observers import observed
from .attention import attention
from .merge_states import merge_states


@observed
def longformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    global_query: Tensor | None = None,
    global_key: Tensor | None = None,
    global_value: Tensor | None = None,
    window: int = 256,
    dilation: int | Sequence[int] = 1,
    global_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Local and global attention in O(N * (window + globals)) time and memory (Beltagy et al. 2020, arXiv 2004.05150).

    A local token i sees the keys i + d k, |k| <= window (k <= 0 if causal), and every global token, each key once. A
    global token sees all tokens (those up to itself if causal), through global_query, global_key and global_value.

    Args:
        query, key: (B, H, N, D). float32, float64, bfloat16 or float16.
        value: (B, H, N, Dv).
        global_query, global_key, global_value: likewise; read only where there are global tokens: all or none of the
            three, none meaning query, key and value.
        window: one-sided, at least 0; transformers' attention_window is 2 * window.
        dilation: d, a number or one a head.
        global_mask: (B, N) bool, True where a token is global.
        key_padding_mask: (B, N) bool, True where a token does not exist: it is hidden, and its row is 0.
        is_causal, scale, dropout_p: as in attnjourney.attention.

    Returns:
        (B, H, N, Dv) in query's dtype. The number of global tokens is read on the host.

    Raises:
        ValueError: a shape or a number that does not fit. RuntimeError: a dtype that does not fit.
    """
    globals_ = _check(
        query, key, value, (global_query, global_key, global_value), window, global_mask, key_padding_mask
    )
    dilations = _dilations(dilation, query.shape[1])
    hidden, padding = None, key_padding_mask
    if padding is not None:
        query = query.masked_fill(padding[:, None, :, None], 0)
        global_mask = global_mask & ~padding if global_mask is not None else None
        hidden = padding
    count = 0
    if global_mask is not None:
        lengths = global_mask.sum(1)
        count = int(lengths.max()) if lengths.numel() else 0
        if count:
            hidden = global_mask if hidden is None else hidden | global_mask
    options: dict[str, Any] = dict(scale=scale, return_lse=True)

    out, lse = _windows(query, key, value, hidden, window, dilations, is_causal, dropout_p, options)
    if global_mask is not None and count:
        # positions of the global tokens, (B, count), the rest of a shorter row's places filled with other tokens
        index = global_mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
        order = torch.arange(query.shape[2], device=query.device)
        sees = (index[:, None, None, :] <= order[:, None]) if is_causal else None  # (B, 1, N, count)
        seen = attention(
            query, _rows(key, index), _rows(value, index), sees, dropout_p, key_lengths=lengths, **options
        )  # fmt: skip
        out, _ = merge_states(out, lse, *seen)

        own_query, all_keys, all_values = globals_
        mask = None if padding is None else ~padding[:, None, None, :]  # (B, 1, 1, N)
        if is_causal:
            upto = order <= index[:, None, :, None]  # (B, 1, count, N)
            mask = upto if mask is None else mask & upto
        rows = attention(
            _rows(own_query, index), all_keys, all_values, mask, dropout_p, scale=scale, query_lengths=lengths
        )  # (B, H, count, Dv)
        place = index[:, None, :, None].expand_as(rows)
        real = (torch.arange(count, device=index.device) < lengths[:, None])[:, None, :, None]
        out = out.scatter(2, place, torch.where(real, rows, out.gather(2, place)))
    return out if padding is None else out.masked_fill(padding[:, None, :, None], 0)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, N, D), (B, n) -> (B, H, n, D)"""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    window: int,
    dilations: list[int],
    is_causal: bool,
    dropout_p: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the windows, without the hidden keys (B, N)."""
    if len(set(dilations)) > 1:  # heads of one dilation at a time; no index tensor, which would go to the device
        outs: list[Any] = [None] * len(dilations)
        for d in dict.fromkeys(dilations):
            heads = [h for h, own in enumerate(dilations) if own == d]
            q, k, v = (torch.stack([x[:, h] for h in heads], 1) for x in (query, key, value))
            part = _windows(q, k, v, hidden, window, [d], is_causal, dropout_p, options)
            for h, *both in zip(heads, *(x.unbind(1) for x in part)):
                outs[h] = both
        out, lse = (torch.stack(x, 1) for x in zip(*outs))
        return out, lse
    d, length = dilations[0], query.shape[2]
    sides = (window, 0 if is_causal else window)
    if d == 1 or length <= 1:
        mask = None if hidden is None else ~hidden[:, None, None, :]  # (B, 1, 1, N)
        return attention(query, key, value, mask, dropout_p, window_size=sides, **options)

    # A dilated window is a plain one among the positions of one residue: (B, d, H, N / d, D), strided views
    pad = -length % d
    if pad:
        query, key, value = (F.pad(x, (0, 0, 0, pad)) for x in (query, key, value))
        hidden = (
            torch.zeros(query.shape[0], length, dtype=torch.bool, device=query.device) if hidden is None else hidden
        )
        hidden = F.pad(hidden, (0, pad), value=True)
    q, k, v = (x.unflatten(2, (-1, d)).permute(0, 3, 1, 2, 4) for x in (query, key, value))
    mask = None if hidden is None else ~hidden.unflatten(1, (-1, d)).transpose(1, 2)[:, :, None, None]
    out, lse = attention(q, k, v, mask, dropout_p, window_size=sides, **options)
    out = out.permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :length]
    return out, lse.permute(0, 2, 3, 1).flatten(2, 3)[:, :, :length]


def _dilations(dilation: int | Sequence[int], heads: int) -> list[int]:
    dilations = [dilation] * heads if isinstance(dilation, int) else list(dilation)
    if len(dilations) != heads or any(d < 1 for d in dilations):
        raise ValueError(f"dilation: expected a positive number or one for each of {heads} heads, got {dilation}")
    return dilations or [1]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    global_: tuple[Any, Any, Any],
    window: int,
    global_mask: Tensor | None,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.dim() != 4:
        raise ValueError(f"query: expected 4 dimensions (batch, heads, length, dim), got shape {tuple(query.shape)}")
    if any(x is None for x in global_):
        if any(x is not None for x in global_):
            raise ValueError("global_query, global_key, global_value: expected all three or none")
        global_ = (query, key, value)
    names = ("key", "value", "global_query", "global_key", "global_value")
    for name, x in zip(names, (key, value, *global_)):
        expected = (*query.shape[:3], (value if "value" in name else query).shape[-1])
        if tuple(x.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    if window < 0:
        raise ValueError(f"window: expected a number of at least 0, got {window}")
    for name, x in (("global_mask", global_mask), ("key_padding_mask", key_padding_mask)):
        if x is None:
            continue
        if x.dtype != torch.bool:
            raise RuntimeError(f"{name}: expected dtype torch.bool, got {x.dtype}")
        if x.shape != (query.shape[0], query.shape[2]):
            raise ValueError(f"{name}: expected shape {(query.shape[0], query.shape[2])}, got {tuple(x.shape)}")
    return global_
