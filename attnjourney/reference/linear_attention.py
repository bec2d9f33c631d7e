"""Linear attention in plain PyTorch: every key's part of the state, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype

FEATURE_MAPS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": torch.relu,
    "identity": lambda x: x,
    None: lambda x: x,
}

State = tuple[Tensor, Tensor | None]


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] | None = "elu+1",
    is_causal: bool = True,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    key_padding_mask: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """attnjourney.linear_attention as the recurrence S += phi(k) v^T, z += phi(k), out = phi(q) S / (phi(q) z + eps).

    Computed in the inputs' dtype, 16-bit inputs in float32.
    """
    phi = feature_map if callable(feature_map) else FEATURE_MAPS[feature_map]
    wide = accumulation_dtype(query.dtype)
    group = query.shape[1] // max(1, key.shape[1])
    q = phi(query).to(wide) * (1.0 if scale is None else scale)
    k, v = (phi(key).to(wide), value.to(wide))
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    state, normalizer = initial_state or (None, None)
    if state is None:
        state = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    if normalizer is None:
        normalizer = q.new_zeros(*k.shape[:2], k.shape[3])

    def read(row: Tensor, state: Tensor, normalizer: Tensor) -> Tensor:  # (B, Hq, D) -> (B, Hq, Dv)
        s, z = state.repeat_interleave(group, 1), normalizer.repeat_interleave(group, 1)
        out = torch.einsum("bhd,bhde->bhe", row, s)
        if not normalize:
            return out
        denominator = torch.einsum("bhd,bhd->bh", row, z)[..., None] + eps
        empty = denominator == 0
        return torch.where(empty, 0, out / torch.where(empty, 1, denominator))

    rows = []
    for j in range(k.shape[2]):
        state = state + k[:, :, j, :, None] * v[:, :, j, None, :]
        normalizer = normalizer + k[:, :, j]
        if is_causal:
            rows.append(read(q[:, :, j], state, normalizer))
    if not is_causal:
        rows = [read(q[:, :, i], state, normalizer) for i in range(q.shape[2])]
    out = torch.stack(rows, 2) if rows else q.new_zeros(*q.shape[:3], v.shape[3])
    out = out.to(query.dtype)
    return (out, (state, normalizer if normalize else None)) if return_state else out
