"""Linear attention, causal in chunks or over all keys: torch.ops.attnjourney.linear_attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._ops import OpOverload

from ._registry.fakes import empty_lse
from ._registry.registration import register

FEATURE_MAPS = {"identity": 0, "relu": 1, "elu+1": 2}

State = tuple[Tensor, Tensor | None]


@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, feature_map: str | Callable[[Tensor], Tensor] | None = ...,
    is_causal: bool = ..., scale: float | None = ..., normalize: bool = ..., eps: float = ...,
    key_padding_mask: Tensor | None = ..., initial_state: State | None = ..., return_state: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, feature_map: str | Callable[[Tensor], Tensor] | None = ...,
    is_causal: bool = ..., scale: float | None = ..., normalize: bool = ..., eps: float = ...,
    key_padding_mask: Tensor | None = ..., initial_state: State | None = ..., return_state: Literal[True],
) -> tuple[Tensor, State]: ...  # fmt: skip
@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, feature_map: str | Callable[[Tensor], Tensor] | None = ...,
    is_causal: bool = ..., scale: float | None = ..., normalize: bool = ..., eps: float = ...,
    key_padding_mask: Tensor | None = ..., initial_state: State | None = ..., return_state: bool,
) -> Tensor | tuple[Tensor, State]: ...  # fmt: skip
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
    """phi(q_i) S_i / (phi(q_i) z_i + eps) with S_i = sum_j phi(k_j) v_j^T and z_i = sum_j phi(k_j) over the keys that
    row i sees, in time and memory linear in the length (Katharopoulos et al. 2020, arXiv 2006.16236).

    One function for the three forms: all keys at once (is_causal=False), causal in chunks, and one step at a time
    (length 1 with the state of the step before). Every form carries the state on and is differentiated through it.

    Args:
        query: (B, Hq, L, D). float32, float64, bfloat16 or float16; computed in float32 (float64 for float64).
        key: (B, Hk, S, D). Hq is a multiple of Hk: query head h reads the state of head h // (Hq / Hk). S = L if
            is_causal.
        value: (B, Hk, S, Dv).
        feature_map: phi: "elu+1", "relu", "identity" (or None), or a function of queries and keys, called on both.
        is_causal: row i sees keys 0 .. i, else all.
        scale: factor of phi(query), 1 by default: there is no 1 / sqrt(D). With eps = 0 and normalize it cancels.
        normalize: False leaves out the denominator, as flash-linear-attention does (whose scale is D ** -0.5).
        eps: added to the denominator. A denominator of 0 gives 0.
        key_padding_mask: (B, S) bool, True where a key does not exist.
        initial_state: (S, z) of the keys before: (B, Hk, D, Dv) and (B, Hk, D), float32 (float64 for float64); z is
            None without normalize. Nothing by default.
        return_state: also return (S, z) after the last key.

    Returns:
        (B, Hq, L, Dv) in query's dtype; with return_state also (S, z), z None without normalize.

    Raises:
        ValueError: a shape or a number that does not fit. RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated twice, or in forward mode.
    """
    if callable(feature_map):
        query, key, number = feature_map(query), feature_map(key), FEATURE_MAPS["identity"]
    elif feature_map is None or feature_map in FEATURE_MAPS:
        number = FEATURE_MAPS[feature_map or "identity"]
    else:
        names = ", ".join(repr(name) for name in FEATURE_MAPS)
        raise ValueError(f"feature_map: expected {names}, None or a function, got {feature_map!r}")
    state, normalizer = _parts(initial_state)
    operator = torch.ops.attnjourney.linear_attention_forward.default if return_state else _linear_attention
    result = operator(
        query,
        key,
        value,
        key_padding_mask,
        state,
        normalizer,
        feature_map=number,
        is_causal=is_causal,
        scale=1.0 if scale is None else scale,
        normalize=normalize,
        eps=eps,
    )
    if not return_state:
        return result
    out, _, state, normalizer = result
    return out, (state, normalizer if normalize else None)


def _parts(state: State | None) -> tuple[Tensor | None, Tensor | None]:
    if state is None:
        return None, None
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise ValueError(f"initial_state: expected a pair (S, z), got {type(state).__name__}")
    matrix, normalizer = state
    return matrix, normalizer


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, initial_state: Tensor | None, initial_normalizer: Tensor | None,
    is_causal: bool, normalize: bool, key_padding_mask: Tensor | None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {tuple(x.shape)}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
    batch, heads, length, dim = query.shape
    kv_heads, kv_len, v_dim = key.shape[1], key.shape[2], value.shape[3]
    expect: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "key": (key, (batch, kv_heads, kv_len, dim)),
        "value": (value, (batch, kv_heads, kv_len, v_dim)),
        "key_padding_mask": (key_padding_mask, (batch, kv_len)),
        "initial_state": (initial_state, (batch, kv_heads, dim, v_dim)),
        "initial_normalizer": (initial_normalizer, (batch, kv_heads, dim)),
    }
    for name, (given, shape) in expect.items():
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(given.shape)}")
    if is_causal and length != kv_len:
        raise ValueError(f"key: expected as many keys as query rows with is_causal, {length}, got {kv_len}")
    return (
        query.new_empty((batch, heads, length, v_dim)),
        empty_lse(query, *((batch, heads, length) if normalize else (0,))),
        empty_lse(query, batch, kv_heads, dim, v_dim),
        empty_lse(query, *((batch, kv_heads, dim) if normalize else (0,))),
    )


def _flops(*, query: torch.Size, key: torch.Size, value: torch.Size, **_: Any) -> tuple[int, ...]:
    """Products with the state, the least there is: q S and k^T v forwards; backwards these again (one of them), and
    two products of each gradient with a state, and its own."""
    state = 2 * query[3] * value[3]
    rows, keys = query[0] * query[1] * query[2], key[0] * key[1] * key[2]
    return state * (rows + keys), state * (2 * rows + 3 * keys)


# ---- torch.func.vmap: the new dimension joins the batch. Inputs without it are expanded, so that gradients come out by
# sample; tensors of the shape (0,) stand for what is not there.


def _fold(signature: OpOverload, info: Any, in_dims: tuple, arguments: tuple) -> Any:
    def one(x, dim):
        if not isinstance(x, Tensor):
            return x
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.new_empty(0) if x.numel() == 0 and x.dim() <= 2 else x.flatten(0, 1)

    names = [a.name for a in signature._schema.arguments]
    return signature(**{name: one(x, dim) for name, x, dim in zip(names, arguments, in_dims)})


def _unfold(info: Any, results: Sequence[Tensor]) -> tuple[tuple, tuple]:
    split = [x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) if x.dim() > 1 else x for x in results]
    return tuple(split), tuple(0 if x.dim() > 1 else None for x in results)


def _vmap_forward(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
    return _unfold(info, _fold(torch.ops.attnjourney.linear_attention_forward.default, info, in_dims, arguments))


def _vmap_backward(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
    return _unfold(info, _fold(torch.ops.attnjourney.linear_attention_backward.default, info, in_dims, arguments))


_linear_attention = register(
    "linear_attention",
    fake=_fake,
    vmap=(_vmap_forward, _vmap_backward),
    autocast=("query", "key", "value"),
    flops=_flops,
)
