"""The random bits of attention's dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keep_mask_of(
    shape: tuple[int, ...], seed: int | Tensor, dropout_p: float, origin: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Tensor:
    """dropout_keep_mask of weights of this shape, (..., heads, q_len, kv_len) or (q_len, kv_len). origin: where these
    stand among those of a larger call: the positions of the first row and key, the first head, and the number of heads
    there (0: these)."""
    *batch, heads = shape[:-2] or (1,)
    q_len, kv_len = shape[-2:]
    row, key, head, whole = origin
    keep = dropout_keep_mask(seed, math.prod(batch), whole or heads, row + q_len, key + kv_len, dropout_p)
    return keep[:, head : head + heads, row:, key:].reshape(shape)


def dropout_keep_mask(seed: int | Tensor, batch: int, heads: int, q_len: int, kv_len: int, dropout_p: float) -> Tensor:
    """The weights that dropout keeps for a `dropout_seed`: bool (batch, heads, q_len, kv_len), on the CPU.

    Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): counter
    (row, key // 8, batch * heads + head, 0), key = the halves of the seed. Its 128 bits serve 8 neighbouring keys, 16
    each, lowest first; a weight is dropped where they are below round(dropout_p * 65536).
    """
    keep = kept(seed, torch.arange(batch * heads), torch.arange(q_len), kv_len, dropout_p)
    return keep.reshape(batch, heads, q_len, kv_len)


def kept(seed: int | Tensor, heads: Tensor, rows: Tensor, kv_len: int, dropout_p: float) -> Tensor:
    """dropout_keep_mask for chosen rows of chosen heads, numbered batch * heads + head: (heads, rows, kv_len)."""
    word = 0xFFFFFFFF
    seed = int(seed)
    k0, k1 = seed & word, seed >> 32 & word
    octets = (kv_len + 7) // 8
    shape = (len(heads), len(rows), octets)
    c0 = rows[:, None].expand(shape)
    c1 = torch.arange(octets).expand(shape)
    c2 = heads[:, None, None].expand(shape)
    c3 = torch.zeros(shape, dtype=torch.int64)
    for _ in range(7):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    words = torch.stack([c0, c1, c2, c3], -1)
    bits = torch.stack([words & 0xFFFF, words >> 16], -1).reshape(len(heads), len(rows), 8 * octets)
    return bits[..., :kv_len] >= int(dropout_p * 65536 + 0.5)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, for unsigned 32-bit numbers held in int64, by halves: nothing overflows."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)  # a * b = upper * 2^16 + lower; both below 2^48
    return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & 0xFFFFFFFF
