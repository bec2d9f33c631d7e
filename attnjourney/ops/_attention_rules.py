"""What attention and block_attention tell PyTorch the same way: the shapes of their results, their batching rules."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ._registry.fakes import empty_lse, empty_stats


def empty_results(query: Tensor, value: Tensor, lead: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and stats, empty, from the leading dimensions of the result."""
    length = query.shape[-2]
    out = query.new_empty((*lead, length, value.shape[-1]))
    return out, empty_lse(query, *lead, length), empty_stats(query, *lead, length)


# ---- torch.func.vmap: the new dimension goes in front, as one more batch dimension. Inputs without it are expanded
# (stride 0), so that their gradients come out per sample. Dropout with randomness="different" is one call with one
# seed, whose bits differ by batch index; "same" needs the same bits for every sample: one call each (None).

_TENSORS = ("query", "key", "value", "attn_mask", "key_lengths", "query_lengths", "sinks", "alibi_slopes")


def to_front(x: Any, in_dim: int | None, size: int) -> Any:
    """A tensor, or None as it is."""
    if x is None:
        return None
    return x.unsqueeze(0).expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)


def align_mask(mask: Any, rank: int) -> Any:
    """(batch, *dims) -> (batch, 1..., *dims) of that rank, as a mask broadcasts from the right."""
    if mask is None or mask.dim() >= rank:
        return mask
    return mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


def per_head(x: Any, batch: int) -> Any:
    """(samples, heads) or (samples, batch, heads) -> (samples * batch, heads)."""
    if x is None:
        return None
    return (x.unsqueeze(1).expand(-1, batch, -1) if x.dim() == 2 else x).flatten(0, 1)


def _fold(info: Any, in_dims: dict, call: dict, expand: bool) -> tuple[dict, int] | None:
    """The arguments of one call over all samples, by name, and a sample's batch size; None: a call a sample."""
    seed = call["dropout_seed"]
    if seed is not None:
        if in_dims["dropout_seed"] is None:
            return None
        call["dropout_seed"] = seed.select(in_dims["dropout_seed"], 0)
    for name in _TENSORS:
        if name in call and (name != "attn_mask" or expand or in_dims[name] is not None):
            call[name] = to_front(call[name], in_dims[name], info.batch_size)
    query, key, value = call["query"], call["key"], call["value"]
    if "attn_mask" in call and (expand or in_dims["attn_mask"] is not None):
        call["attn_mask"] = align_mask(call["attn_mask"], query.dim())
    batch = 1
    for sizes in zip(query.shape[1:-3], key.shape[1:-3], value.shape[1:-3]):
        batch *= next((n for n in sizes if n != 1), 1)
    for name in ("key_lengths", "query_lengths"):
        if call[name] is not None:
            call[name] = call[name].flatten()
    for name in ("sinks", "alibi_slopes"):
        call[name] = per_head(call[name], batch)
    return call, batch


def vmap_forward(operator: OpOverload, info: Any, in_dims: tuple, *arguments: Any) -> tuple | None:
    names = [a.name for a in operator._schema.arguments]
    folded = _fold(info, dict(zip(names, in_dims)), dict(zip(names, arguments)), expand=False)
    return folded and (operator(**folded[0]), (0, 0, 0))


def _fold_all(operator: OpOverload, info: Any, dims: tuple, arguments: tuple) -> tuple[dict, int] | None:
    """_fold, with results, gradients and tangents folded the same way."""
    names = [a.name for a in operator._schema.arguments]
    in_dims, call = dict(zip(names, dims)), dict(zip(names, arguments))
    folded = _fold(info, in_dims, call, expand=True)
    if folded is None:
        return None
    call, batch = folded
    rank = call["query"].dim()
    for name in names:
        base = name.removesuffix("_tangent")
        if base in ("grad_out", "grad_lse", "out", "lse", "stats") or (base != name and base in _TENSORS):
            call[name] = to_front(call[name], in_dims[name], info.batch_size)
            if base == "attn_mask":
                call[name] = align_mask(call[name], rank)
            elif base in ("sinks", "alibi_slopes"):
                call[name] = per_head(call[name], batch)
    return call, batch


def vmap_jvp(operator: OpOverload, info: Any, in_dims: tuple, *arguments: Any) -> tuple | None:
    folded = _fold_all(operator, info, in_dims, arguments)
    return folded and (operator(**folded[0]), (0, 0))


def vmap_gradients(operator: OpOverload, info: Any, in_dims: tuple, *arguments: Any) -> tuple | None:
    names = [a.name for a in operator._schema.arguments]
    given, dims = dict(zip(names, arguments)), dict(zip(names, in_dims))
    shapes = {
        name: to_front(given[name], dims[name], info.batch_size).shape
        for name in ("attn_mask", "sinks", "alibi_slopes")
        if given.get(name) is not None
    }
    folded = _fold_all(operator, info, in_dims, arguments)
    if folded is None:
        return None
    call, batch = folded
    gradients = list(operator(**call))
    need = call["need"]
    inputs = [r.name.removeprefix("grad_").removesuffix("_tangent") for r in operator._schema.returns]
    for bit, name in enumerate(inputs[3:], 3):
        if need >> bit & 1 and name in shapes:
            shape = shapes[name]
            if name != "attn_mask" and len(shape) == 2:  # one for all of a sample's batch
                gradients[bit] = gradients[bit].unflatten(0, (info.batch_size, batch)).sum(1)
            gradients[bit] = gradients[bit].reshape(shape)
    present = (True, True, True, *(name in shapes for name in inputs[3:]))
    return tuple(gradients), tuple(0 if need >> bit & 1 and there else None for bit, there in enumerate(present))
