"""The stages of Infini-attention, for chosen heads and rows: its local softmax, what its memory read, and the gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...nn import InfiniAttention
from ...nn._parts import split_heads
from ...nn.rotary import rotate
from ...ops.infini_attention import Memory, read_memory, write_segment
from ._stages import attention_stages


def infini_local(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Any,
    sin: Any,
    segment_length: int,
    heads: Tensor,
    rows: Tensor,
) -> dict[str, Tensor]:
    """The softmax attention of Infini-attention, over the keys of a row's own segment: (B, heads, rows, S)."""
    rows = rows.to(query.device)
    keys = torch.arange(key.shape[2], device=query.device)
    mask = (keys <= rows[:, None]) & (keys // segment_length == rows[:, None] // segment_length)  # (rows, S)
    turned, key = rotate(query, (cos, sin)).index_select(2, rows), rotate(key, (cos, sin))
    return attention_stages(turned, key, value, heads, torch.arange(len(rows)), attn_mask=mask, enable_gqa=True)


def infini_stages(
    module: InfiniAttention,
    heads: Tensor,
    rows: Tensor,
    *,
    x: Tensor,
    memory: Memory | None = None,
    return_memory: bool = False,
) -> dict[str, Tensor]:
    """Local attention of every row in its segment, and what the memory of the segments before read."""
    q, k, v = (
        split_heads(p(x), n)
        for p, n in (
            (module.q_proj, module.num_heads),
            (module.k_proj, module.num_kv_heads),
            (module.v_proj, module.num_kv_heads),
        )
    )
    length, segment = x.shape[1], module.segment_length
    own_rows, heads, rows = rows, heads.to(x.device), rows.to(x.device)
    cos, sin = module.rotary.tables(x, torch.arange(length, device=x.device) % segment)
    stages = {}
    if cos is not None:
        group = module.num_heads // module.num_kv_heads
        stages["query_unrotated"] = q.index_select(1, heads).index_select(2, rows)
        stages["key_unrotated"] = k.index_select(1, heads // group)
    stages |= infini_local(q, k, v, cos, sin, segment, heads, rows)

    read = q.new_zeros(*q.shape[:2], len(rows), v.shape[3])
    for first in range(0, length, segment):
        here = (own_rows // segment == first // segment).nonzero().squeeze(1).to(x.device)
        piece = slice(first, first + segment)
        if memory is not None and len(here):
            read[:, :, here] = read_memory(q.index_select(2, rows[here]), memory)
        memory = write_segment(k[:, :, piece], v[:, :, piece], memory, module.update)
    beta = module.beta.float() if module.beta.dtype.itemsize == 2 else module.beta
    gate = torch.sigmoid(beta).index_select(0, heads)
    local, read = stages.pop("output"), read.index_select(1, heads)
    output = torch.lerp(local, read, gate[:, None, None].to(x.dtype))
    return stages | {"local_output": local, "memory_output": read, "gate": gate, "output": output}
