"""Layers that a rank runs as a layer of its own heads, on its parts of the parameters: for modules whose attention is
made of more than projections and one operator."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

# what a rank has of a parameter
ROWS, COLUMNS, LAST, PACKED, KEYS, ONCE = "rows", "columns", "last", "packed", "keys", "once"
_SHARED = {ROWS: Shard(0), COLUMNS: Shard(1), LAST: Shard(2), KEYS: Shard(0)}


@dataclass
class Place:
    """Of this rank in the mesh's dimension; of its key head, where ranks share key heads."""

    mesh: DeviceMesh
    ranks: int
    rank: int
    key_rows: tuple[int, int] | None = None  # (first row, rows) of the key head in its projection

    def whole(self, x: Any) -> Any:
        """What every rank has, as it enters a share of the work: its gradient is the sum of theirs."""
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def joined(self, x: Tensor, placement: Any) -> Tensor:
        """What the ranks have parts of, whole on each."""
        shared = DTensor.from_local(x, self.mesh, [placement], run_check=False)
        return shared.redistribute(placements=[Replicate()]).to_local()

    def heads(self, x: Tensor, dim: int) -> Tensor:
        """This rank's of all heads."""
        return self.whole(x).chunk(self.ranks, dim)[self.rank]

    def local(self, parameter: Any, kind: str) -> Tensor:
        local = parameter.to_local()
        if kind == ONCE:  # what is added to a sum over ranks: by one of them
            return self.whole(local) * (self.rank == 0)
        if kind == KEYS and self.key_rows is not None:
            return self.whole(local).narrow(0, *self.key_rows)
        return local


Run = Callable[[nn.Module, Place, tuple, dict[str, Any]], Any]


class LocalHeads(ParallelStyle):
    """kinds: of every parameter; numbers: of the layer of a rank's heads, attributes of `ranks` and `rank`; run: that
    layer's forward with what comes in and goes out."""

    def __init__(self, kinds: dict[str, str], numbers: Callable[[int, int], dict[str, Any]], run: Run):
        super().__init__()
        self.kinds, self.numbers, self.run = kinds, numbers, run

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = copy.copy(module)
        own.__dict__ |= {name: OrderedDict() for name in own.__dict__ if "hooks" in name}  # those of the module itself
        forward = own.__dict__.get("forward")
        if isinstance(forward, partial) and forward.args and forward.args[0] is module:  # as context_parallel leaves it
            own.__dict__["forward"] = partial(forward.func, own, *forward.args[1:])
        place = Place(device_mesh, device_mesh.size(), device_mesh.get_local_rank())
        for name, number in self.numbers(place.ranks, place.rank).items():
            if name == "key_rows":
                place.key_rows = number
            else:
                own.__dict__[name] = number
        for name, parameter in list(module.named_parameters()):
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner).register_parameter(key, self._shared(name, parameter, place))
        module.forward = partial(self._forward, module, own, place)
        return module

    def _shared(self, name: str, parameter: nn.Parameter, place: Place) -> nn.Parameter:
        kind, x = self.kinds[name], parameter.detach()
        if kind == PACKED:  # queries, keys and values, one after the other
            shared = distribute_tensor(x.unflatten(0, (3, -1)), place.mesh, [Shard(1)]).flatten(0, 1)
        else:
            by_key = kind == KEYS and place.key_rows is not None
            placement = Replicate() if by_key else _SHARED.get(kind, Replicate())
            shared = distribute_tensor(x, place.mesh, [placement])
        return nn.Parameter(shared, parameter.requires_grad)

    def _forward(self, module: nn.Module, own: nn.Module, place: Place, *args: Any, **kwargs: Any) -> Any:
        parameters = {name: place.local(p, self.kinds[name]) for name, p in module.named_parameters()}
        own.train(module.training)
        call = partial(torch.func.functional_call, own, parameters)
        return self.run(call, place, args, kwargs)  # type: ignore[arg-type]


def local_layer(module: Any) -> Any:
    """The layer of this rank's heads where LocalHeads has made one, else the module."""
    forward = module.__dict__.get("forward")
    ours = isinstance(forward, partial) and getattr(forward.func, "__func__", None) is LocalHeads._forward
    return forward.args[1] if ours else module


def multihead(module: Any) -> LocalHeads:
    """attnjourney.nn.MultiheadAttention."""
    kinds = {}
    for name, _ in module.named_parameters():
        kind = ROWS if name.endswith("_proj_weight") else LAST if name in ("bias_k", "bias_v") else PACKED
        kinds[name] = {"out_proj.weight": COLUMNS, "out_proj.bias": ONCE}.get(name, kind)
    if module.in_proj_weight is not None:
        kinds["in_proj_weight"] = PACKED

    def numbers(ranks: int, rank: int) -> dict[str, Any]:
        return dict(num_heads=module.num_heads // ranks, _is_one_operator=lambda: False)

    return LocalHeads(kinds, numbers, partial(_run_multihead, module.num_heads))


def _run_multihead(heads: int, call: Any, place: Place, args: tuple, kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
    given: dict[str, Any] = dict(zip((*names, "is_causal"), args)) | kwargs
    if given.get("cache") is not None:
        raise ValueError("cache: expected None in a layer whose heads are shared out over ranks")
    seen: dict[int, Any] = {}
    for name in ("query", "key", "value"):  # one tensor stays one tensor
        x = given[name]
        given[name] = seen.setdefault(id(x), place.whole(x))
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 3:  # (N * H, L, S)
        given["attn_mask"] = place.heads(mask.unflatten(0, (-1, heads)), 1).flatten(0, 1)
    else:
        given["attn_mask"] = place.whole(mask)
    given["key_padding_mask"] = place.whole(given.get("key_padding_mask"))
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    out, weights = call((query, key, value), given)
    if weights is not None:
        if given.get("average_attn_weights", True):
            weights = place.joined(weights / place.ranks, Partial())
        else:
            weights = place.joined(weights, Shard(weights.dim() - 3))
    return place.joined(out, Partial()), weights


def infini(module: Any) -> LocalHeads:
    """attnjourney.nn.InfiniAttention."""
    kinds = {"beta": ROWS}
    for name, _ in module.named_parameters():
        owner, _, key = name.rpartition(".")
        if owner == "o_proj":
            kinds[name] = COLUMNS if key == "weight" else ONCE
        elif owner:
            kinds[name] = ROWS if owner == "q_proj" else KEYS

    def numbers(ranks: int, rank: int) -> dict[str, Any]:
        keys, dim = module.num_kv_heads, module.head_dim
        found: dict[str, Any] = dict(num_heads=module.num_heads // ranks, num_kv_heads=max(1, keys // ranks))
        return found if keys % ranks == 0 else found | dict(key_rows=(rank * keys // ranks * dim, dim))

    return LocalHeads(kinds, numbers, _run_infini)


def _run_infini(call: Any, place: Place, args: tuple, kwargs: dict[str, Any]) -> Any:
    memory = kwargs.get("memory")
    if place.key_rows is not None and (memory is not None or kwargs.get("return_memory")):
        raise ValueError("memory: expected None where ranks share key heads")
    if memory is not None:
        kwargs = {**kwargs, "memory": tuple(place.heads(x, 1) for x in memory)}
    results = call(tuple(place.whole(x) for x in args), kwargs)
    if not kwargs.get("return_memory"):
        return place.joined(results, Partial())
    out, states = results
    return place.joined(out, Partial()), tuple(place.joined(x, Shard(1)) for x in states)


def longformer(module: Any) -> LocalHeads:
    """attnjourney.nn.LongformerSelfAttention, whose heads go out one beside the other."""

    def numbers(ranks: int, rank: int) -> dict[str, Any]:
        heads, dilation = module.num_heads // ranks, module.dilation
        if isinstance(dilation, Sequence):
            dilation = list(dilation)[rank * heads : (rank + 1) * heads]
        return dict(num_heads=heads, dilation=dilation)

    def run(call: Any, place: Place, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return place.joined(call(tuple(place.whole(x) for x in args), kwargs), Shard(2))

    return LocalHeads({name: ROWS for name, _ in module.named_parameters()}, numbers, run)
