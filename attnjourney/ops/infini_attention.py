"""Infini-attention: causal attention inside segments, a compressive memory across them, and a gate."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._registry.call_observers import observed
from .attention import attention
from .linear_attention import linear_attention
from .rope import rope_with_tables

Memory = tuple[Tensor, Tensor]

UPDATES = ("linear", "delta")


@overload
def infini_attention(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, segment_length: int, memory: Memory | None = ...,
    update: str = ..., cos: Tensor | None = ..., sin: Tensor | None = ..., truncate: int | None = ...,
    return_memory: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def infini_attention(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, segment_length: int, memory: Memory | None = ...,
    update: str = ..., cos: Tensor | None = ..., sin: Tensor | None = ..., truncate: int | None = ...,
    return_memory: Literal[True],
) -> tuple[Tensor, Memory]: ...  # fmt: skip
@overload
def infini_attention(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, segment_length: int, memory: Memory | None = ...,
    update: str = ..., cos: Tensor | None = ..., sin: Tensor | None = ..., truncate: int | None = ...,
    return_memory: bool,
) -> Tensor | tuple[Tensor, Memory]: ...  # fmt: skip
@observed
def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    segment_length: int,
    memory: Memory | None = None,
    update: str = "linear",
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    truncate: int | None = None,
    return_memory: bool = False,
) -> Tensor | tuple[Tensor, Memory]:
    """sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot (Munkhdalai et al. 2024, arXiv 2404.07143).

    A_dot is causal softmax attention inside a segment. A_mem reads what all segments before left in a memory M, z:
    phi(q) M / (phi(q) z), phi = elu + 1; then the segment is written, M += phi(k)^T v and z += sum phi(k). An empty
    memory reads 0. Time is linear in the length; a call keeps one memory a segment for the backward, none without it.

    A call begins a segment, and its last segment may be shorter: a sequence handed over in pieces of whole segments,
    each with the memory of the piece before, gives what one call gives.

    Args:
        query: (B, Hq, N, D). float32, float64, bfloat16 or float16.
        key, value: (B, Hk, N, D) and (B, Hk, N, Dv); Hq is a multiple of Hk.
        beta: (Hq,), trainable: the gate of each head.
        segment_length: rows of a segment.
        memory: (M, z) of the segments before: (B, Hk, D, Dv) and (B, Hk, D), float32 (float64 for float64).
        update: "linear", or "delta": v less what the memory already reads at k is written.
        cos, sin: as in attnjourney.rope's tables, (N, R / 2) or (B, N, R / 2): they rotate queries and keys of A_dot;
            the memory takes them without position.
        truncate: gradients do not pass from one group of this many segments to the one before. None: they do.
        return_memory: also return (M, z) after the last segment.

    Returns:
        (B, Hq, N, Dv) in query's dtype; with return_memory also (M, z).

    Raises:
        ValueError: a shape or a number that does not fit. RuntimeError: a dtype that does not fit.
    """
    check_segments(query, key, value, beta, segment_length, memory, update, truncate)
    local = local_attention(query, key, value, segment_length, cos, sin)
    recalled, memory = recall(query, key, value, segment_length, memory, update, truncate, return_memory)
    out = gated(local, recalled, beta)
    return (out, memory) if return_memory and memory is not None else out


def gated(local: Tensor, recalled: Tensor, beta: Tensor) -> Tensor:
    gate = torch.sigmoid(beta.float() if beta.dtype.itemsize == 2 else beta).to(local.dtype)[:, None, None]
    return torch.lerp(local, recalled, gate)


def recall(
    query: Tensor, key: Tensor, value: Tensor, segment: int, memory: Memory | None, update: str, truncate: int | None,
    return_memory: bool, first_segment: int = 0,
) -> tuple[Tensor, Memory | None]:  # fmt: skip
    """(what the rows read in the memory of the segments before theirs, with return_memory that after the last one).
    first_segment: the number of the first one in the whole, for `truncate`."""
    length, parts = query.shape[2], []
    for index, first in enumerate(range(0, length, segment), first_segment):
        rows = slice(first, min(first + segment, length))
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        if memory is None:
            parts.append(q.new_zeros((*q.shape[:3], value.shape[3])))
        else:
            if truncate is not None and index > 0 and index % truncate == 0:
                memory = memory[0].detach(), memory[1].detach()
            parts.append(read_memory(q, memory))
        if return_memory or rows.stop < length:
            memory = write_segment(k, v, memory, update)
    if return_memory and memory is None:  # no rows at all
        memory = write_memory(key, value, None)
    if not parts:  # no rows
        nothing = query.new_zeros((*query.shape[:3], value.shape[3]))
        parts.append(nothing if memory is None else read_memory(query, memory))
    return torch.cat(parts, 2), memory


def local_attention(
    query: Tensor, key: Tensor, value: Tensor, segment: int, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """Causal attention inside every segment, turned by the tables: one call for the whole ones, one for the rest."""
    if cos is not None or sin is not None:
        tables: Any = (cos, sin)
        query, key = rope_with_tables(query, *tables), rope_with_tables(key, *tables)
    length = query.shape[2]
    whole = length // segment * segment
    outs = []
    if whole or not length:
        q, k, v = (  # (B, segments, H, segment, D)
            x[:, :, :whole].unflatten(2, (whole // segment, segment)).transpose(1, 2) for x in (query, key, value)
        )
        outs.append(attention(q, k, v, None, 0.0, True, enable_gqa=True).transpose(1, 2).flatten(2, 3))
    if whole < length:
        q, k, v = (x[:, :, whole:] for x in (query, key, value))
        outs.append(attention(q, k, v, None, 0.0, True, enable_gqa=True))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def read_memory(rows: Tensor, memory: Memory) -> Tensor:
    """phi(rows) M / (phi(rows) z): the state alone, without a key."""
    kv_heads, dim, v_dim = memory[0].shape[1:]
    key, value = (rows.new_empty((rows.shape[0], kv_heads, 0, n)) for n in (dim, v_dim))
    return linear_attention(rows, key, value, is_causal=False, eps=0.0, initial_state=memory)


def write_memory(key: Tensor, value: Tensor, memory: Memory | None) -> Memory:
    """M + phi(key)^T value, z + sum phi(key): the state alone, without a query."""
    _, (matrix, normalizer) = linear_attention(
        key[:, :, :0], key, value, is_causal=False, eps=0.0, initial_state=memory, return_state=True
    )
    assert normalizer is not None
    return matrix, normalizer


def write_segment(key: Tensor, value: Tensor, memory: Memory | None, update: str) -> Memory:
    """The memory after a segment; update "delta": of each value what the memory does not read at its key."""
    if memory is not None and update == "delta":
        value = value - read_memory(key, memory)
    return write_memory(key, value, memory)


def check_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    segment_length: int,
    memory: Memory | None,
    update: str,
    truncate: int | None,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {tuple(x.shape)}")
        if x.shape[2] != query.shape[2]:
            raise ValueError(f"{name}: expected the length of query, {query.shape[2]}, got shape {tuple(x.shape)}")
    if beta.shape != query.shape[1:2]:
        raise ValueError(f"beta: expected shape ({query.shape[1]},), one number a head, got {tuple(beta.shape)}")
    if segment_length < 1:
        raise ValueError(f"segment_length: expected a positive number, got {segment_length}")
    if truncate is not None and truncate < 1:
        raise ValueError(f"truncate: expected a positive number or None, got {truncate}")
    if update not in UPDATES:
        raise ValueError(f"update: expected 'linear' or 'delta', got {update!r}")
    if memory is not None and (not isinstance(memory, (tuple, list)) or len(memory) != 2 or None in memory):
        raise ValueError(f"memory: expected a pair of tensors (M, z) or None, got {type(memory).__name__}")
