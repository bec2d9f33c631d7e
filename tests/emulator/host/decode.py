"""Runs the emulator's decoding (decode.cpp) on torch tensors."""

import torch

from . import run

NUMBERS = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "Half"}


def mma(dtype, dim, warps, stages, shared=False, bytes=False):
    flags = ",".join(str(flag).lower() for flag in (shared, bytes))
    return ("decode", (f"KERNEL=DecodeMma<{NUMBERS[dtype]},{dim},{warps},{stages},{flags}>", *["BYTES"] * bytes))


def fma(dtype, bytes=False):
    return ("decode", (f"NUMBER={NUMBERS[dtype]}", *["BYTES"] * bytes))


def _flat(x):
    """x as it lies in memory, from its first number to its last, and its strides."""
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    return x.as_strided((size,), (1,), x.storage_offset()), x.stride()


def decode(program, query, key, value, lengths, *, block_table=None, ring=False, is_causal=True, window_size=(-1, -1),
           scale=0.125, attn_mask=None, prefix_length=0, softcap=0.0, sinks=None, alibi_slopes=None, order="forward",
           splits=1, joins=False, chunked=True, longest=0, key_scale=None, value_scale=None):  # fmt: skip
    """(out, lse); joins: the last block of a unit joins its parts; other arguments as attnjourney.decode's, cache
    tensors with their strides. Numbers travel in decimal:
    scale needs at most six places, softcap three."""
    batch, heads, q_len, dim = query.shape
    kv_heads, v_dim = key.shape[1], value.shape[3]
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    (flat_key, k), (flat_value, v) = _flat(key), _flat(value)
    arguments = {
        "batch": batch, "kv_heads": kv_heads, "group": heads // kv_heads, "q_len": q_len, "head_dim": dim,
        "v_head_dim": v_dim, "query_size": query.numel(), "key_size": flat_key.numel(),
        "value_size": flat_value.numel(), "k_outer": k[0], "k_head": k[1], "k_row": k[2], "v_outer": v[0],
        "v_head": v[1], "v_row": v[2], "capacity": key.shape[2], "ring": ring, "max_blocks": 0, "blocks": 0,
        "block_size": 0, "left": window_size[0], "right": 0 if is_causal else window_size[1], "prefix": prefix_length,
        "scale": round(1e6 * scale), "softcap": round(1e3 * softcap),
        "sinks": sinks is not None, "slopes": alibi_slopes is not None, "mask": 0, "mask_size": 0, "splits": splits,
        "joins": joins, "chunked": chunked, "longest": longest,
        **dict.fromkeys(("mask_batch", "mask_head", "mask_row", "mask_col"), 0),
    }  # fmt: skip
    arguments |= dict.fromkeys(("bytes", "key_scale_size", "value_scale_size"), 0)
    arguments |= dict.fromkeys(("ks_outer", "ks_head", "vs_outer", "vs_head"), 0)
    tensors, scales = [lengths], []
    if key_scale is not None:
        arguments["bytes"] = 1 + (key.dtype == torch.float8_e4m3fn)
        for name, short, x in (("key_scale", "ks", key_scale), ("value_scale", "vs", value_scale)):
            flat, strides = _flat(x)
            scales.append(flat)
            arguments |= {f"{name}_size": flat.numel(), f"{short}_outer": strides[0], f"{short}_head": strides[1]}
        flat_key, flat_value = (x.view(torch.uint8) for x in (flat_key, flat_value))
    if block_table is not None:
        size = key.shape[2]
        arguments |= {"max_blocks": block_table.shape[1], "blocks": key.shape[0], "block_size": size}
        arguments["capacity"] = size * block_table.shape[1]
        tensors.append(block_table)
    tensors += [query.contiguous(), flat_key, flat_value, *scales]
    tensors += [x.to(lse_dtype).expand(batch, heads).contiguous() for x in (sinks, alibi_slopes) if x is not None]
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())].contiguous()
        arguments["mask"] = 1 if mask.dtype == torch.bool else 3 if mask.dtype == query.dtype else 2
        arguments["mask_size"] = mask.numel() * mask.element_size()
        strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride())]
        arguments |= dict(zip(("mask_batch", "mask_head", "mask_row", "mask_col"), strides))
        if mask.shape[3] > 1:
            arguments["longest"] = mask.shape[3]
        tensors.append(mask.view(torch.uint8))
    outputs = [((*query.shape[:3], v_dim), query.dtype), (tuple(query.shape[:3]), lse_dtype)]
    return run.run(program, tensors, outputs, arguments | run.order_arguments(order))[0]
