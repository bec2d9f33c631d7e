"""Runs packed rows over a paged cache in the emulator (paged.cpp), on torch tensors."""

import torch

from . import run
from .decode import NUMBERS, _flat


def sm80(dtype, dqk, dv, keys, decode=None):
    kernel = f"KERNEL=Sm80Forward<{NUMBERS[dtype]},{dqk},{dv},{keys},true,true>"
    return ("paged", (kernel,) if decode is None else (kernel, f"DECODE=DecodeMma<{NUMBERS[dtype]},{decode}>"))


def fp32(dtype, dim):
    return ("paged", (f"KERNEL=Fp32ForwardPaged<{NUMBERS[dtype]},{dim}>", "FP32"))


def attention(program, query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, *, is_causal=False, scale=None,
              window_size=(-1, -1), prefix_length=0, causal_alignment="top_left", softcap=0.0, sinks=None,
              alibi_slopes=None, few_rows=16, splits=1, through=False, chunked=True, order="forward"):  # fmt: skip
    """(out, lse) as varlen_attention's; rows of no sequence are NaN. few_rows, splits, through: as in paged.cu."""
    total, heads, dim = query.shape
    batch, v_dim, lanes = len(cu_seqlens_q) - 1, value.shape[3], 16 // query.element_size()
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    (flat_key, k), (flat_value, v) = _flat(key), _flat(value)
    more, given = run._options(query[None].transpose(1, 2), {"softcap": softcap, "scale": scale or 0, "sinks": sinks,
                               "alibi_slopes": alibi_slopes}, batch)  # fmt: skip
    arguments = {
        "batch": batch, "q_len": total, "kv_len": key.shape[2] * block_table.shape[1], "q_heads": heads,
        "kv_heads": key.shape[1], "head_dim": dim, "v_head_dim": v_dim, "left": window_size[0],
        "right": 0 if is_causal else window_size[1], "prefix": prefix_length, "offset": 0,
        "bottom_right": causal_alignment == "bottom_right", "packed": 1, "lengths": 0, "blocks": key.shape[0],
        "block_size": key.shape[2], "max_blocks": block_table.shape[1], "key_size": flat_key.numel(),
        "value_size": flat_value.numel(), "k_outer": k[0], "k_head": k[1], "k_row": k[2], "v_outer": v[0],
        "v_head": v[1], "v_row": v[2], "few_rows": few_rows, "splits": splits, "through": through,
        "chunked": chunked, **more,
    }  # fmt: skip
    wide = torch.nn.functional.pad(query, (0, -dim % lanes))
    padded = v_dim + -v_dim % lanes
    tensors = [cu_seqlens_q.int(), cu_seqlens_k.int(), block_table, wide, flat_key, flat_value, *given]
    outputs = [((total, heads, padded), query.dtype), ((heads, total), lse_dtype)]
    (out, lse), _ = run.run(program, tensors, outputs, arguments | run.order_arguments(order))
    return out[..., :v_dim], lse
