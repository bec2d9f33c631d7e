"""Gated linear attention in the emulator: all kernels of a call, forward or backward, on torch tensors."""

import torch

from attnjourney.ops.gated_linear_attention import DELTA, UPDATES

from . import run
from .linear import ELEMENTS

NAMES = ("query", "key", "value", "gate", "beta", "initial_state")


def request(dtype, fault=None):
    """What build.program takes."""
    return ("gated", (f"ELEMENT={ELEMENTS[dtype]}",), fault)


def call(program, tensors, *, update="gated_delta", scale=None, qk_l2norm=False, cu_seqlens=None, grads=None, need=63,
         order="forward", rows_first=False):  # fmt: skip
    """[out, state], with `grads` of these the gradients of what `need` asks for, and the counts.

    `tensors`: by name, None where there is none. Gradients that are not wanted are empty.
    """
    query, key, value, gate, beta, initial = (tensors[name] for name in NAMES)
    (batch, q_heads, length, dim), kv_heads, (_, v_heads, _, v_dim) = query.shape, key.shape[1], value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    arguments = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, v_heads=v_heads, len=length, head_dim=dim)
    arguments |= dict(
        v_head_dim=v_dim, gate=0 if gate is None else gate.dim() - 2, delta=UPDATES.index(update) in DELTA
    )
    arguments |= dict(scale=round(1000 * (dim**-0.5 if scale is None else scale)), norm=qk_l2norm, need=need)
    arguments |= dict(state=initial is not None, sequences=0 if cu_seqlens is None else sequences)
    arguments |= dict(backward=grads is not None, grad_state=grads is not None and grads[1] is not None)
    given = [query, key, value] + [x.to(wide) for x in (gate, beta) if x is not None]
    given += [] if initial is None else [initial.flatten()]
    given += [] if cu_seqlens is None else [torch.tensor(cu_seqlens, dtype=torch.int32)]
    states = (sequences, v_heads, dim, v_dim)
    if grads is None:
        shapes = [((batch, max(q_heads, v_heads), length, v_dim), query.dtype), (states, wide)]
    else:
        given += [grads[0]] + ([] if grads[1] is None else [grads[1].to(wide).flatten()])
        wanted = [x for x in (query, key, value, gate, beta) if x is not None] + ([] if initial is None else [initial])
        dtypes = [query.dtype] * 3 + [wide] * (len(wanted) - 3)
        bits = [1 << i for i, name in enumerate(NAMES) if tensors[name] is not None]
        shapes = [(tuple(x.shape) if need & bit else (0,), dtype) for x, bit, dtype in zip(wanted, bits, dtypes)]
    flat = [((torch.Size(shape).numel(),), dtype) for shape, dtype in shapes]
    results, counts = run.run(program, given, flat, arguments | run.order_arguments(order), rows_first)
    return [x.view(shape) for x, (shape, _) in zip(results, shapes)], counts
