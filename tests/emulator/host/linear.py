"""Linear attention in the emulator: all kernels of a call, forward and backward, on torch tensors."""

import torch

from attnjourney.ops.linear_attention import FEATURE_MAPS

from . import run

ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}
ALL = 7  # gradients of query, of key and value, of the state


def request(dtype, fault=None, small=False):
    """What build.program takes; small: for GPUs whose blocks have 99 KB of shared memory, head dimensions over 192."""
    chunk = 32 if small or dtype == torch.float64 else 64
    return ("linear", (f"ELEMENT={ELEMENTS[dtype]}", f"CHUNK={chunk}"), fault)


def call(program, query, key, value, state, grads, *, mask=None, blocks=1, need=ALL, order="forward", rows_first=False,
         feature_map, is_causal, scale, normalize, eps):  # fmt: skip
    """[out, denominator, S, z]; with `grads` of these also [gradients of query, key, value, S, z]; and the counts.

    Without normalize there is neither denominator nor z, and what is not wanted is empty.
    """
    (batch, q_heads, q_len, dim), (_, kv_heads, kv_len, v_dim) = query.shape, value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    arguments = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=dim)
    arguments |= dict(v_head_dim=v_dim, causal=is_causal, normalize=normalize, feature_map=FEATURE_MAPS[feature_map])
    arguments |= dict(scale=round(1000 * scale), eps=round(1000 * eps), mask=mask is not None, state=state is not None)
    arguments |= dict(blocks=blocks, need=need, backward=grads is not None, grads=0, **run.order_arguments(order))
    tensors = [query, key, value] + ([] if mask is None else [mask.to(torch.uint8)])
    tensors += [] if state is None else [x.flatten() for x in state if x is not None]
    matrix, vector = batch * kv_heads * dim * v_dim, batch * kv_heads * dim if normalize else 0
    outputs = [((q_len * batch * q_heads * v_dim,), query.dtype), ((batch * q_heads * q_len * normalize,), wide)]
    outputs += [((matrix,), wide), ((vector,), wide)]
    if grads is not None:
        grad_out, *others = grads
        arguments["grads"] = bool(others)
        tensors += [grad_out, *(x.flatten() for x in others)]
        outputs += [((x.numel() if need & bits else 0,), x.dtype) for x, bits in ((query, 1), (key, 2), (value, 2))]
        outputs += [((n if need & 4 else 0,), wide) for n in (matrix, vector)]
    results, counts = run.run(program, tensors, outputs, arguments, rows_first)
    shapes = [(batch, q_heads, q_len, v_dim), (batch, q_heads, q_len), (batch, kv_heads, dim, v_dim)]
    shapes += [(batch, kv_heads, dim), query.shape, key.shape, value.shape]
    shapes += shapes[2:4]
    return [x.view(shape) if x.numel() else x for x, shape in zip(results, shapes)], counts
