"""Decoding over a paged cache whose sequences begin alike: what they share is read once for all of them (Hydragen,
arXiv 2402.05099; cascade inference), and joined with each one's own keys by lse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor

LEAST = 8192  # tokens that need not be read again, from which on a call of its own pays
FEW = 16  # rows a head up to which the CPU's decode reads a key once for all heads of its group by itself


@dataclass(frozen=True)
class Segment:
    """Blocks first .. end - 1 of the sequences `members`, the same for all of them."""

    members: list[int]
    first: int
    end: int


@dataclass(frozen=True)
class SharedPrefixes:
    """segments: each is read once. own[b]: the block from which on sequence b is read by itself."""

    segments: list[Segment]
    own: list[int]


def find_shared_prefixes(
    block_table: Tensor, lengths: Tensor, block_size: int, rows: int, is_causal: bool
) -> SharedPrefixes:
    """Runs of blocks that lie in front of several sequences, and that every one of their last `rows` rows sees whole.

    A run that several share, and part of them more: one segment behind the other. Waits for the device.
    """
    seen = [max(0, (n - rows if is_causal else n) // block_size) for n in lengths.tolist()]
    width = min(max(seen, default=0), block_table.shape[1])
    blocks = [row[:n] for row, n in zip(block_table[:, :width].tolist(), seen)]
    found = SharedPrefixes([], [0] * len(blocks))

    def follow(members: list[int], first: int) -> None:
        """Members share the blocks before `first` that have a segment, and those behind it up to some block."""
        end = len(commonprefix([min(blocks[b] for b in members), max(blocks[b] for b in members)]))
        if (end - first) * block_size * (len(members) - 1) >= LEAST:
            found.segments.append(Segment(members, first, end))
            first = end
            for b in members:
                found.own[b] = end
        parts: dict[int, list[int]] = {}
        for b in members:
            if len(blocks[b]) > end:
                parts.setdefault(blocks[b][end], []).append(b)
        for part in parts.values():
            if len(part) > 1:
                follow(part, first)

    if len(blocks) > 1:
        follow(list(range(len(blocks))), 0)
    return found


# query, lengths, block_table, is_causal, attn_mask, whether the sinks belong here -> out, lse
Attend = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, bool], tuple[Tensor, Tensor]]


def decode_shared(
    attend: Attend, query: Tensor, lengths: Tensor, block_table: Tensor, block_size: int, kv_heads: int | None,
    found: SharedPrefixes, is_causal: bool, attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of query (B, Hq, Sq, E), the segments and the sequences' own keys each by a call of `attend`.

    kv_heads: where rows are many, query heads of a group become rows of their key head, as what they all see whole
    allows; None: they stay.
    """
    device, rows = query.device, query.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.shape[-1] == 1:
            attn_mask = attn_mask.expand(*attn_mask.shape[:3], block_table.shape[1] * block_size)

    own = torch.tensor(found.own, device=device)
    width = max(1, block_table.shape[1] - min(found.own))
    columns = (own[:, None] + torch.arange(width, device=device)).clamp_(max=block_table.shape[1] - 1)
    own_mask = None
    if attn_mask is not None:
        keys = own[:, None] * block_size + torch.arange(width * block_size, device=device)
        keys = keys.clamp_(max=attn_mask.shape[-1] - 1)[:, None, None, :]
        own_mask = attn_mask.expand(query.shape[0], -1, -1, -1)
        own_mask = own_mask.gather(-1, keys.expand(*own_mask.shape[:3], -1))
    parts = [attend(query, lengths - own * block_size, block_table.gather(1, columns), is_causal, own_mask, True)]
    places: list[Tensor | slice] = [slice(None)]
    for segment in found.segments:
        members = torch.tensor(segment.members, device=device)
        kv = kv_heads if len(segment.members) * rows > FEW else None
        mask = None
        if attn_mask is not None:
            mask = attn_mask[..., segment.first * block_size : segment.end * block_size]
            mask = _as_rows(mask.expand(query.shape[0], -1, rows, -1)[members], kv, query.shape[1])
        out, lse = attend(
            _as_rows(query[members], kv, query.shape[1]),
            torch.full((1,), (segment.end - segment.first) * block_size, device=device),
            block_table[segment.members[0], segment.first : segment.end].unsqueeze(0),
            False, mask, False,
        )  # fmt: skip
        parts.append((_as_heads(out, len(segment.members), rows), _as_heads(lse, len(segment.members), rows)))
        places.append(members)
    return _merge(parts, places)


def _as_rows(x: Tensor, kv_heads: int | None, q_heads: int) -> Tensor:
    """(members, Hq or 1, Sq, n) -> (1, kv_heads or 1, members * group * Sq, n); kv_heads None: group 1."""
    members, heads, rows, n = x.shape
    kv = q_heads if kv_heads is None else kv_heads
    x = x.view(members, kv, -1, rows, n) if heads > 1 else x.unsqueeze(1).expand(-1, -1, q_heads // kv, -1, -1)
    return x.transpose(0, 1).reshape(1, x.shape[1], -1, n)


def _as_heads(x: Tensor, members: int, rows: int) -> Tensor:
    """(1, kv_heads, members * group * Sq, ...) -> (members, Hq, Sq, ...)"""
    x = x[0].unflatten(1, (members, -1, rows))  # (kv_heads, members, group, Sq, ...)
    return x.transpose(0, 1).flatten(1, 2)


def _merge(parts: list[tuple[Tensor, Tensor]], places: list[Tensor | slice]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from that over parts of them, each of the sequences at its place, in lse's dtype."""
    out, lse = parts[0]
    top = lse.clone()
    for (_, part), at in zip(parts[1:], places[1:]):
        top[at] = torch.maximum(top[at], part)
    top = torch.where(top == -torch.inf, 0.0, top)
    merged, total = out.new_zeros(out.shape, dtype=lse.dtype), torch.zeros_like(lse)
    for (out, part), at in zip(parts, places):
        empty = part == -torch.inf
        # what is seen never has weight 0, so that inf times it stays inf
        weight = torch.where(empty, 0.0, (part - top[at]).exp().clamp(min=torch.finfo(lse.dtype).tiny))
        total[at] += weight
        merged[at] += torch.where(empty.unsqueeze(-1), 0.0, out * weight.unsqueeze(-1))
    seen = total != 0  # NaN is
    merged /= torch.where(seen, total, 1.0).unsqueeze(-1)
    return merged.to(out.dtype), torch.where(seen, top + total.log(), -torch.inf)
