"""Scaled dot-product attention written out, and the random bits of its dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    keep_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.attention in plain PyTorch, in the dtype of the inputs and O(L * S) memory.

    Args: as attnjourney.attention, and
        keep_mask: bool, broadcasts to (..., Hq, L, S): the weights that dropout keeps. Without it they are drawn as
            attnjourney.attention draws them: the same ones after the same torch.manual_seed.
        return_lse: also return the logarithm of each row's sum of exponentials, (..., Hq, L), float32 (float64 for
            float64); -inf where a row sees no key.
    """
    query, key, value = _expand(query, key, value, enable_gqa)
    visible = _visible(query, key, attn_mask, is_causal)
    empty = ~visible.any(-1, keepdim=True)

    scores = _masked_scores(query, key, visible) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(empty, 0.0)  # softmax of -inf alone would be NaN
    weights = scores.softmax(-1).masked_fill(~visible, 0.0).to(value.dtype)

    if dropout_p > 0:
        if keep_mask is None:
            seed = torch.randint(1 << 62, (), dtype=torch.int64, device=query.device)
            *batch, heads = weights.shape[:-2] or (1,)
            keep_mask = dropout_keep_mask(seed, math.prod(batch), heads, *weights.shape[-2:], dropout_p)
            keep_mask = keep_mask.reshape(weights.shape).to(query.device)
        weights = weights.masked_fill(~keep_mask, 0.0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)

    out = _weighted_values(weights, value, visible)
    if not return_lse:
        return out
    scores = scores.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    lse = scores.logsumexp(-1) if key.shape[-2] else scores.sum(-1)
    return out, lse.masked_fill(empty.squeeze(-1), -math.inf)


def _expand(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All with the same batch and head dimensions."""
    if enable_gqa and query.dim() >= 3 and query.shape[-3] > 0:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return tuple(x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))


def _visible(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """(..., Hq, L, S): True where the row may see the key."""
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    if is_causal:
        visible = visible.tril()  # top-left: key j <= row i
    if attn_mask is not None:
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)
    return visible.expand(*query.shape[:-1], key.shape[-2])


# A product with 0 still passes on NaN and infinity, so where there are any, every pair (row, key) gets vectors of its
# own, zero where the key is hidden: (..., L, S, E). Then nothing hidden reaches a result or a gradient.


def _masked_scores(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    if _finite(query, key):
        return query @ key.mT
    pair = visible.unsqueeze(-1)
    return (torch.where(pair, query.unsqueeze(-2), 0.0) * torch.where(pair, key.unsqueeze(-3), 0.0)).sum(-1)


def _weighted_values(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    if _finite(value):
        return weights @ value
    return (weights.unsqueeze(-1) * torch.where(visible.unsqueeze(-1), value.unsqueeze(-3), 0.0)).sum(-2)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def dropout_keep_mask(seed: int | Tensor, batch: int, heads: int, q_len: int, kv_len: int, dropout_p: float) -> Tensor:
    """The weights that dropout keeps for a `dropout_seed`: bool (batch, heads, q_len, kv_len), on the CPU.

    Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): counter
    (row, key // 8, batch * heads + head, 0), key = the halves of the seed. Its 128 bits serve 8 neighbouring keys, 16
    each, lowest first; a weight is dropped where they are below round(dropout_p * 65536).
    """
    word = 0xFFFFFFFF
    seed = int(seed)
    k0, k1 = seed & word, seed >> 32 & word
    octets = (kv_len + 7) // 8
    shape = (batch * heads, q_len, octets)
    c0 = torch.arange(q_len)[:, None].expand(shape)
    c1 = torch.arange(octets).expand(shape)
    c2 = torch.arange(batch * heads)[:, None, None].expand(shape)
    c3 = torch.zeros(shape, dtype=torch.int64)
    for _ in range(7):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    words = torch.stack([c0, c1, c2, c3], -1)
    bits = torch.stack([words & 0xFFFF, words >> 16], -1).reshape(batch, heads, q_len, 8 * octets)
    return bits[..., :kv_len] >= int(dropout_p * 65536 + 0.5)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, for unsigned 32-bit numbers held in int64, by halves: nothing overflows."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)  # a * b = upper * 2^16 + lower; both below 2^48
    return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & 0xFFFFFFFF
