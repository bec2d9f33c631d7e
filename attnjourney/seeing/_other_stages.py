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
    heads, rows = heads.to(query.device), rows.to(query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    phi = FEATURE_MAPS[next(name for name, n in NUMBERS.items() if n == call["feature_map"])]
    q = phi(query.index_select(1, heads).index_select(2, rows)).to(wide)
    k, v = (x.index_select(1, heads // group) for x in (phi(key).to(wide), value.to(wide)))
    seen = torch.ones(len(rows), key.shape[2], dtype=torch.bool, device=query.device)
    if call["is_causal"]:
        seen = torch.arange(key.shape[2], device=query.device) <= rows[:, None]
    seen = seen.expand(query.shape[0], 1, -1, -1)
    if call["key_padding_mask"] is not None:
        seen = seen & ~call["key_padding_mask"][:, None, None, :]
    seen = seen.expand(-1, len(heads), -1, -1)
    scores = q @ k.mT * call["scale"]
    weights = scores.masked_fill(~seen, 0.0)
    stages = {"phi_query": q, "phi_key": k, "value": v, "scores": scores, "mask": seen}
    state, normalizer = call["initial_state"], call["initial_normalizer"]
    past = torch.zeros((), device=query.device)
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


def infini_local(query, key, value, cos, sin, segment_length, heads: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The softmax attention of Infini-attention, over the keys of a row's own segment: (B, heads, rows, S)."""
    rows = rows.to(query.device)
    keys = torch.arange(key.shape[2], device=query.device)
    mask = (keys <= rows[:, None]) & (keys // segment_length == rows[:, None] // segment_length)  # (rows, S)
    turned, key = rotate(query, (cos, sin)).index_select(2, rows), rotate(key, (cos, sin))
    return attention_stages(turned, key, value, heads, torch.arange(len(rows)), attn_mask=mask, enable_gqa=True)


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
            read[:, :, here] = _read(q.index_select(2, rows[here]), memory)
        written = v[:, :, piece]
        if memory is not None and module.update == "delta":
            written = written - _read(k[:, :, piece], memory)
        memory = _write(k[:, :, piece], written, memory)
    beta = module.beta.float() if module.beta.dtype.itemsize == 2 else module.beta
    gate = torch.sigmoid(beta).index_select(0, heads)
    local, read = stages.pop("output"), read.index_select(1, heads)
    output = torch.lerp(local, read, gate[:, None, None].to(x.dtype))
    return stages | {"local_output": local, "memory_output": read, "gate": gate, "output": output}


def longformer_stages(module, heads: Tensor, rows: Tensor, *, x: Tensor, global_mask=None, key_padding_mask=None):
    if module.training and module.dropout > 0:
        raise ValueError(
            "module: expected a LongformerSelfAttention in evaluation or without dropout, which it draws part by part"
        )
    names = ("query", "key", "value", "query_global", "key_global", "value_global")
    inputs = [split_heads(getattr(module, name)(x), module.num_heads) for name in names]
    options = dict(window=module.window, dilation=module.dilation, is_causal=module.is_causal, scale=None)
    masks = dict(global_mask=global_mask, key_padding_mask=key_padding_mask)
    return longformer_scores(*inputs, heads=heads, rows=rows, **options, **masks)


def longformer_scores(
    query, key, value, global_query, global_key, global_value, window, dilation, global_mask, key_padding_mask, *,
    is_causal, scale, heads: Tensor, rows: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """Local rows see the window and the global keys, by the first three tensors; global rows all, by the others."""
    batch, n_heads, length = query.shape[:3]
    heads, rows = heads.to(query.device), rows.to(query.device)
    keys, at = torch.arange(length, device=query.device), rows[:, None]
    everywhere = torch.ones(batch, length, dtype=torch.bool, device=query.device)
    exists = everywhere if key_padding_mask is None else ~key_padding_mask
    is_global = torch.zeros_like(exists) if global_mask is None else global_mask & exists
    d = torch.tensor([dilation] * n_heads if isinstance(dilation, int) else list(dilation))
    d = d.to(query.device).index_select(0, heads)[:, None, None]
    near = ((keys - at) % d == 0) & ((keys - at).abs() <= d * window)  # (heads, rows, S)
    past = keys <= at if is_causal else everywhere.new_ones(len(rows), length)
    everything = past & exists[:, None, None, :] & exists[:, rows][:, None, :, None]  # (B, 1, rows, S)
    seen = (near | is_global[:, None, None, :]) & everything

    def part(*inputs: Tensor, mask: Tensor) -> dict[str, Tensor]:
        q, k, v = (x.index_select(1, heads) for x in inputs)
        numbers = torch.arange(len(heads)), torch.arange(len(rows))
        return attention_stages(q.index_select(2, rows), k, v, *numbers, attn_mask=mask, scale=scale)

    stages = part(query, key, value, mask=seen)
    if is_global.any() and global_query is not None:
        by_global = part(global_query, global_key, global_value, mask=everything.expand_as(seen))
    elif is_global.any():
        by_global = part(query, key, value, mask=everything.expand_as(seen))
    else:
        return stages
    row = is_global[:, rows][:, None, :]  # (B, 1, rows)
    for name, mine in by_global.items():
        if name in ("key", "value"):
            stages[f"global_{name}"] = mine
        else:
            stages[name] = torch.where(row if name == "lse" else row.unsqueeze(-1), mine, stages[name])
    return stages
