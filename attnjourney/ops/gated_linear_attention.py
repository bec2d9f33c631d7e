"""Linear attention with gates and the delta rule: torch.ops.attnjourney.gated_linear_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._registry.fakes import empty_lse
from ._registry.registration import register

UPDATES = ("linear", "gated", "delta", "gated_delta", "kda")
GATED, DELTA = (1, 3, 4), (2, 3, 4)  # those that take a gate, that take beta


@overload
def gated_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = ..., beta: Tensor | None = ..., *,
    update: str = ..., scale: float | None = ..., qk_l2norm: bool = ..., initial_state: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., return_state: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def gated_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = ..., beta: Tensor | None = ..., *,
    update: str = ..., scale: float | None = ..., qk_l2norm: bool = ..., initial_state: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., return_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def gated_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = ..., beta: Tensor | None = ..., *,
    update: str = ..., scale: float | None = ..., qk_l2norm: bool = ..., initial_state: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., return_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
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
    """Causal linear attention with a state that forgets and is corrected. Row after row, with S (D, Dv) a head's state:

        "linear"       S = S + k v^T
        "gated"        S = e^g S + k v^T
        "delta"        S = S + beta k (v - S^T k)^T
        "gated_delta"  S = e^g S, then as "delta"
        "kda"          the same with a gate for every channel of the key: S = diag(e^g) S

    and out = scale S^T q. In chunks of rows, forwards and backwards: time and memory linear in the length. A few rows,
    as in generation, are taken one by one. The state is carried on and differentiated through.

    Papers: gates, Yang et al. 2024 (arXiv 2312.06635); the delta rule in chunks, Yang et al. 2024 (arXiv 2406.06484);
    both, Yang et al. 2025 (Gated DeltaNet, arXiv 2412.06464); "kda", Kimi Team 2025 (Kimi Linear, arXiv 2510.26692).
    The rules are those of ONNX's LinearAttention and of flash-linear-attention.

    Args:
        query: (B, Hq, L, D). float32, float64, bfloat16 or float16; computed in float32 (float64 for float64).
        key: (B, Hk, L, D). Hk divides Hv: value head h goes with key head h // (Hv / Hk).
        value: (B, Hv, L, Dv). A state for each value head. Of Hq and Hv one divides the other: several query heads read
            one state (grouped queries), or several states are read with one query (grouped values).
        gate: g, logarithms: (B, Hv, L), or (B, Hv, L, D) a gate a channel; with "gated", "gated_delta" and (by channel
            only) "kda". Usually negative; -inf forgets everything. Query's dtype or float32.
        beta: (B, Hv, L), how much of the error is corrected; with the delta rules. Query's dtype or float32.
        update: one of the five above.
        scale: D ** -0.5 by default.
        qk_l2norm: rows of query and key are divided by sqrt(sum of squares + 1e-6) first.
        initial_state: (N, Hv, D, Dv), float32 (float64 for float64), of N = B sequences. Zero by default.
        cu_seqlens: (N + 1,) int32 or int64: the one batch item's rows are N sequences, the n-th has the rows
            cu_seqlens[n] .. cu_seqlens[n + 1] - 1. It begins with 0; a sequence may be empty; rows past the last one
            are 0.
        return_state: also return the states after the last rows.

    Returns:
        (B, max(Hq, Hv), L, Dv) in query's dtype; with return_state also (N, Hv, D, Dv), float32 (float64 for float64).

    Raises:
        ValueError: a shape or a number that does not fit; on CUDA a head dimension above 256.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated twice, or in forward mode.
    """
    if update not in UPDATES:
        raise ValueError(f"update: expected {', '.join(map(repr, UPDATES))}, got {update!r}")
    operator = torch.ops.attnjourney.gated_linear_attention_forward.default if return_state else _gated
    return operator(
        query,
        key,
        value,
        gate,
        beta,
        initial_state,
        cu_seqlens,
        update=UPDATES.index(update),
        scale=max(1, query.shape[-1]) ** -0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
    )


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, beta: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, update: int, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {tuple(x.shape)}")
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
    batch, heads, length, dim = query.shape
    kv_heads, v_heads, v_dim = key.shape[1], value.shape[1], value.shape[3]
    if not 0 <= update < len(UPDATES):
        raise ValueError(f"update: expected a number from 0 to {len(UPDATES) - 1}, got {update}")
    sequences = batch
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens: expected shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
        if batch != 1:
            raise ValueError(f"query: expected a batch of 1 with cu_seqlens, got shape {tuple(query.shape)}")
        sequences = cu_seqlens.shape[0] - 1
    for name, given, wanted in (("gate", gate, update in GATED), ("beta", beta, update in DELTA)):
        if (given is not None) != wanted:
            what = "a tensor" if wanted else "None"
            raise ValueError(f"{name}: expected {what} with update '{UPDATES[update]}'")
    rows = (batch, v_heads, length)
    channels = gate is not None and (gate.dim() == 4 or update == 4)
    expect: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "key": (key, (batch, kv_heads, length, dim)),
        "value": (value, (*rows, v_dim)),
        "gate": (gate, (*rows, dim) if channels else rows),
        "beta": (beta, rows),
        "initial_state": (initial_state, (sequences, v_heads, dim, v_dim)),
    }
    for name, (given, shape) in expect.items():
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(given.shape)}")
    out_heads = max(heads, v_heads)
    return query.new_empty((batch, out_heads, length, v_dim)), empty_lse(query, sequences, v_heads, dim, v_dim)


def _flops(*, query: torch.Size, key: torch.Size, value: torch.Size, update: int, **_: Any) -> tuple[int, ...]:
    """Products with the state, the least there is. Forwards S^T q and k v^T, and S^T k with the delta rule. Backwards
    what the states are made of again, two products for each query and for each key and value, two more with the delta
    rule."""
    product = 2 * query[3] * value[3] * query[0] * query[2]
    rows, keys = max(query[1], value[1]), value[1]
    if update in DELTA:
        return product * (rows + 2 * keys), product * (2 * rows + 6 * keys)
    return product * (rows + keys), product * (2 * rows + 3 * keys)


# ---- torch.func.vmap: the new dimension joins the batch. Inputs without it are expanded, so that gradients come out by
# sample. Packed sequences have no batch: a call a sample.


def _fold(signature: Any, info: Any, in_dims: tuple, arguments: tuple) -> Any:
    def one(x, dim):
        if not isinstance(x, Tensor):
            return x
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    names = [a.name for a in signature._schema.arguments]
    named = dict(zip(names, arguments))
    if named["cu_seqlens"] is not None:
        return None
    return signature(**{name: one(x, dim) for name, x, dim in zip(names, arguments, in_dims)})


def _unfold(info: Any, results: Sequence[Tensor] | None) -> tuple[tuple, tuple] | None:
    if results is None:
        return None
    split = [x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) if x.dim() > 1 else x for x in results]
    return tuple(split), tuple(0 if x.dim() > 1 else None for x in results)


def _vmap_forward(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple] | None:
    return _unfold(info, _fold(torch.ops.attnjourney.gated_linear_attention_forward.default, info, in_dims, arguments))


def _vmap_backward(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple] | None:
    return _unfold(info, _fold(torch.ops.attnjourney.gated_linear_attention_backward.default, info, in_dims, arguments))


_gated = register(
    "gated_linear_attention",
    fake=_fake,
    vmap=(_vmap_forward, _vmap_backward),
    autocast=("query", "key", "value"),
    flops=_flops,
)
