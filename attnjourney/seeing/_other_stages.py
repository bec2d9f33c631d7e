"""The stages of what is not one softmax: linear, Infini- and Longformer attention, for chosen heads and rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn._parts import split_heads
from ..nn.rotary import rotate
from ..ops.infini_attention import _read, _write
from ..ops.linear_attention import FEATURE_MAPS as NUMBERS
from ..reference.linear_attention import FEATURE_MAPS
from ._stages import attention_stages


def linear_stages(call: dict, heads: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """weights = phi(q) . phi(k) / (their sum + eps): never computed by the operator, which keeps a state instead."""
    query, key, value = call["query"], call["key"], call["value"]
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    phi = FEATURE_MAPS[next(name for name, n in NUMBERS.items() if n == call["feature_map"])]
    q = phi(query.index_select(1, heads).index_select(2, rows)).to(wide)
    k, v = (x.index_select(1, heads // group) for x in (phi(key).to(wide), value.to(wide)))
    seen = torch.ones(len(rows), key.shape[2], dtype=torch.bool)
    if call["is_causal"]:
        seen = torch.arange(key.shape[2]) <= rows[:, None]
    seen = seen.expand(query.shape[0], 1, -1, -1)
    if call["key_padding_mask"] is not None:
        seen = seen & ~call["key_padding_mask"][:, None, None, :]
    seen = seen.expand(-1, len(heads), -1, -1)
    scores = q @ k.mT * call["scale"]
    weights = scores.masked_fill(~seen, 0.0)
    stages = {"phi_query": q, "phi_key": k, "value": v, "scores": scores, "mask": seen}
    state, normalizer = call["initial_state"], call["initial_normalizer"]
    past = torch.zeros(())
    if state is not None:
        past = stages["state_output"] = (q * call["scale"]) @ state.to(wide).index_select(1, heads // group)
    if call["normalize"]:
        total = weights.sum(-1, keepdim=True) + call["eps"]
        if normalizer is not None:
            total = total + (q * call["scale"]) @ normalizer.to(wide).index_select(1, heads // group).unsqueeze(-1)
        stages["normalizer"] = total.squeeze(-1)
        inverse = torch.where(total == 0, 0, 1 / total)
        weights, past = weights * inverse, past * inverse
    stages["weights"] = weights
    hidden = v.masked_fill(call["key_padding_mask"][:, None, :, None], 0) if call["key_padding_mask"] is not None else v
    stages["output"] = (weights @ hidden + past).to(query.dtype)
    return stages


def infini_stages(module, heads: Tensor, rows: Tensor, *, x: Tensor, memory=None, return_memory=False):
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
    tables = module.rotary.tables(x, torch.arange(length) % segment)
    keys, before = torch.arange(length), {}
    if tables[0] is not None:
        group = module.num_heads // module.num_kv_heads
        before["query_unrotated"] = q.index_select(1, heads).index_select(2, rows)
        before["key_unrotated"] = k.index_select(1, heads // group)
    mask = (keys <= rows[:, None]) & (keys // segment == rows[:, None] // segment)  # (rows, S)
    turned, every = rotate(q, tables).index_select(2, rows), torch.arange(len(rows))
    local = attention_stages(turned, rotate(k, tables), v, heads, every, attn_mask=mask, enable_gqa=True)

    read = q.new_zeros(*q.shape[:2], len(rows), v.shape[3])
    for first in range(0, length, segment):
        here = (rows // segment == first // segment).nonzero().squeeze(1)
        piece = slice(first, first + segment)
        if memory is not None and len(here):
            read[:, :, here] = _read(q.index_select(2, rows[here]), memory)
        written = v[:, :, piece]
        if memory is not None and module.update == "delta":
            written = written - _read(k[:, :, piece], memory)
        memory = _write(k[:, :, piece], written, memory)
    beta = module.beta.float() if module.beta.dtype.itemsize == 2 else module.beta
    gate = torch.sigmoid(beta).index_select(0, heads)
    stages = before | local | {"local_output": local["output"], "memory_output": read.index_select(1, heads)}
    del stages["output"]
    stages["gate"] = gate
    output = torch.lerp(stages["local_output"], stages["memory_output"], gate[:, None, None].to(x.dtype))
    return stages | {"output": output}


def longformer_stages(module, heads: Tensor, rows: Tensor, *, x: Tensor, global_mask=None, key_padding_mask=None):
    """Local rows see the window and the global keys, by the first three projections; global rows all, by the others."""
    if module.training and module.dropout > 0:
        raise ValueError(
            "module: expected a LongformerSelfAttention in evaluation or without dropout, which it draws part by part"
        )
    batch, length = x.shape[:2]
    keys, at = torch.arange(length), rows[:, None]
    exists = torch.ones(batch, length, dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
    is_global = torch.zeros_like(exists) if global_mask is None else global_mask & exists
    dilation = module.dilation if not isinstance(module.dilation, int) else [module.dilation] * module.num_heads
    d = torch.tensor(list(dilation))[heads][:, None, None]
    near = ((keys - at) % d == 0) & ((keys - at).abs() <= d * module.window)  # (heads, rows, S)
    past = keys <= at if module.is_causal else torch.ones(len(rows), length, dtype=torch.bool)
    everything = past & exists[:, None, None, :] & exists[:, rows][:, None, :, None]  # (B, 1, rows, S)
    seen = (near | is_global[:, None, None, :]) & everything
    every, own = torch.arange(len(rows)), torch.arange(len(heads))

    def part(names: tuple[str, ...], mask: Tensor) -> dict[str, Tensor]:
        q, k, v = (split_heads(getattr(module, n)(x), module.num_heads).index_select(1, heads) for n in names)
        return attention_stages(q.index_select(2, rows), k, v, own, every, attn_mask=mask)

    stages = part(("query", "key", "value"), seen)
    if is_global.any():
        by_global = part(("query_global", "key_global", "value_global"), everything.expand_as(seen))
        row = is_global[:, rows][:, None, :]  # (B, 1, rows)
        for name, mine in by_global.items():
            if name in ("key", "value"):
                stages[f"global_{name}"] = mine
            else:
                stages[name] = torch.where(row if name == "lse" else row.unsqueeze(-1), mine, stages[name])
    return stages
