"""Plans by which torch's parallelize_module shares out the heads of the modules of attnjourney.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from .. import nn as layers
from . import dtensor as dtensor  # the operators' rules
from ._local_heads import infini, longformer, multihead

Plan = dict[str, ParallelStyle]


def tensor_parallel_plan(module: nn.Module, ranks: int = 1) -> Plan:
    """The plan for torch.distributed.tensor.parallel.parallelize_module that shares out the heads of one module of
    attnjourney.nn (Megatron-LM, arXiv 1909.08053): projections to heads by their rows, the projection from heads by its
    columns, one all-reduce forward and one backward. What comes in and out is whole on every rank.

    Args:
        module: any of attnjourney.nn with heads.
        ranks: the size of the mesh's dimension. It divides the heads. Where it does not divide the key heads, every
            rank keeps the projections of keys and values whole.

    Returns: the style of each submodule; "" is the module itself. For a model: the plan of each layer, its names behind
        the layer's.

    Dropout has the bits of one rank where torch.manual_seed is the same on all. MultiheadAttention and
    LongformerSelfAttention take none, as their bits are a matter of all heads.

    Raises:
        NotImplementedError: another module. ValueError: heads that `ranks` does not divide; dropout in those two.
    """
    make = _PLANS.get(type(module))
    if make is None:
        known = ", ".join(kind.__name__ for kind in _PLANS)
        raise NotImplementedError(f"module: expected one of {known}, got {type(module).__name__}")
    heads: Any = module.num_heads
    if ranks < 1 or heads % ranks:
        raise ValueError(f"ranks: expected a divisor of the {heads} heads, got {ranks}")
    dropout: Any = getattr(module, "dropout", 0.0)
    if type(module) in _WITHOUT_DROPOUT and dropout > 0:
        raise ValueError(f"module: expected a dropout of 0, got {dropout}")
    return make(module, ranks)


def _columns() -> ParallelStyle:
    return ColwiseParallel(use_local_output=False)


def _grouped(module: Any, ranks: int) -> Plan:
    plan: Plan = {"q_proj": _columns(), "o_proj": RowwiseParallel()}
    norms = ["q_norm"]
    if module.num_kv_heads % ranks == 0:
        plan |= {"k_proj": _columns(), "v_proj": _columns()}
        norms.append("k_norm")
    for name in norms:
        if getattr(module, name, None) is not None:  # (batch, heads, seq, head_dim)
            plan[name] = SequenceParallel(sequence_dim=1, use_local_output=False)
    return plan


def _latent(module: Any, ranks: int) -> Plan:
    query = "q_proj" if module.q_proj is not None else "q_b_proj"
    whole = {name: _Whole() for name in ("kv_a_proj_with_mqa", "kv_a_layernorm")}
    return {query: _columns(), "kv_b_proj": _columns(), "o_proj": RowwiseParallel(), **whole}


def _packed(module: Any, ranks: int) -> Plan:
    return {"qkv_proj": _PackedColumns(), "out_proj": RowwiseParallel()}


def _infini(module: Any, ranks: int) -> Plan:
    if module.num_kv_heads % ranks and ranks % module.num_kv_heads:
        raise ValueError(f"ranks: expected a divisor or a multiple of {module.num_kv_heads} key heads, got {ranks}")
    return {"": infini(module)}


_PLANS: dict[type, Callable[[Any, int], Plan]] = {
    layers.GroupedQueryAttention: _grouped,
    layers.LinearAttention: _grouped,
    layers.MultiheadLatentAttention: _latent,
    layers.CausalSelfAttention: _packed,
    layers.MultiheadAttention: lambda module, ranks: {"": multihead(module)},
    layers.InfiniAttention: _infini,
    layers.LongformerSelfAttention: lambda module, ranks: {"": longformer(module)},
}
_WITHOUT_DROPOUT = (layers.MultiheadAttention, layers.LongformerSelfAttention)


def _replicated(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    """Plain tensors as DTensors that every rank has whole."""
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        if isinstance(x, Tensor) and not isinstance(x, DTensor)
        else x
        for x in inputs
    )


class _Whole(ParallelStyle):
    """A module that every rank runs alike, beside tensors that are shared out: its result is a DTensor, the gradient of
    which is summed over the ranks before it goes on."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[Replicate()])

        return distribute_module(module, device_mesh, None, _replicated, whole)


class _PackedColumns(ParallelStyle):
    """A projection to queries, keys and values, one after the other: each rank has the rows of its heads in all three
    parts. The parameters are DTensors of their own shape."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                parts = distribute_tensor(parameter.detach().unflatten(0, (3, -1)), mesh, [Shard(1)])
                module.register_parameter(key, nn.Parameter(parts.flatten(0, 1), parameter.requires_grad))

        return distribute_module(module, device_mesh, share, _replicated, None)
