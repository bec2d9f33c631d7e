"""Linear attention with gates and the delta rule in plain PyTorch: the state, one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype

UPDATES = ("linear", "gated", "delta", "gated_delta", "kda")


def gated_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    update: str = "gated_delta",
    scale: float | None = None,
    qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.gated_linear_attention as the recurrence S = e^g S; S += beta k (v - S^T k)^T; out = scale S^T q.

    Computed in the inputs' dtype, 16-bit inputs in float32.
    """
    if update not in UPDATES:
        raise ValueError(f"update: expected {', '.join(map(repr, UPDATES))}, got {update!r}")
    wide = accumulation_dtype(query.dtype)
    q, k, v = (x.to(wide) for x in (query, key, value))
    if qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * (query.shape[-1] ** -0.5 if scale is None else scale)
    heads, out_heads = v.shape[1], max(query.shape[1], value.shape[1])
    k = k.repeat_interleave(heads // max(1, k.shape[1]), 1)
    q = q.repeat_interleave(out_heads // max(1, q.shape[1]), 1)
    decay = None if gate is None else gate.to(wide).exp()
    rate = None if beta is None else beta.to(wide)
    ends = [0, query.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = query.shape[0] if cu_seqlens is None else len(ends) - 1
    if initial_state is None:
        initial_state = q.new_zeros(sequences, heads, k.shape[-1], v.shape[-1])
    states, rows = [], []
    for n, (begin, end) in enumerate(zip(ends[:-1], ends[1:])):
        state = initial_state if cu_seqlens is None else initial_state[n : n + 1]  # (B, Hv, D, Dv)
        for i in range(begin, end):
            if decay is not None:
                now = decay[:, :, i]
                state = state * (now[..., None] if now.dim() == 3 else now[..., None, None])
            written = v[:, :, i]
            if update not in ("linear", "gated"):
                held = torch.einsum("bhd,bhde->bhe", k[:, :, i], state)
                assert rate is not None
                written = rate[:, :, i, None] * (written - held)
            state = state + k[:, :, i, :, None] * written[:, :, None, :]
            read = state.repeat_interleave(out_heads // max(1, heads), 1)
            rows.append(torch.einsum("bhd,bhde->bhe", q[:, :, i], read))
        states.append(state)
    out = torch.stack(rows, 2) if rows else q.new_zeros(*q.shape[:2], 0, v.shape[3])
    if out.shape[2] < query.shape[2]:  # rows after the last sequence
        out = torch.cat((out, out.new_zeros(*out.shape[:2], query.shape[2] - out.shape[2], out.shape[3])), 2)
    last = torch.cat(states) if states else initial_state
    out = out.to(query.dtype)
    return (out, last) if return_state else out
