"""Modules of attnjourney.nn over a sequence whose rows lie on the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from .. import nn as layers
from ..nn._parts import check_sequence, merge_heads, split_heads, split_packed
from ..nn.rotary import Rotary, Tables
from ._agreement import agree, described
from ._local_heads import local_layer
from .ring_attention import ring_attention
from .ring_infini_attention import ring_infini_attention
from .ring_linear_attention import ring_linear_attention
from .ring_mla import stream_latents
from .sharding import check_lengths, check_order, gathered_lengths, positions


@dataclass(frozen=True)
class _Context:
    group: dist.ProcessGroup | None
    order: str
    scheme: str

    def positions(self, x: Tensor) -> Tensor:
        """Of the rows of x (batch, seq, width) in the whole sequence."""
        lengths = gathered_lengths(x.shape[1], self.group, x.device)
        check_lengths(self.order, "x", lengths)
        return positions(self.order, lengths, dist.get_rank(self.group)).to(x.device)

    def tables(self, rotary: Rotary, x: Tensor) -> Tables:
        return (None, None) if rotary.rope is None else rotary.tables(x, self.positions(x))


def context_parallel(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, order: str = "contiguous", scheme: str = "ring"
) -> nn.Module:
    """Makes the attention layers in a module take this rank's shard of the sequence, (batch, seq / ranks, embed), and
    attend to the whole: `ring_attention`, `ring_linear_attention`, `ring_infini_attention`, and `ring_mla`'s latents.
    Everything else in a model that looks at one token alone needs nothing; positions that a model adds itself are
    shared out by `shard` as its tokens are.

    Args:
        module: a model, or one layer; changed in place. Its GroupedQueryAttention, MultiheadLatentAttention,
            CausalSelfAttention, LinearAttention and InfiniAttention are found. Before or after parallelize_module by
            `tensor_parallel_plan`, over another dimension of the mesh.
        group: the ranks that share the sequence out, the default group by default.
        order, scheme: as in ring_attention. Latents go by "ring" or "all_gather". LinearAttention and
            InfiniAttention take "contiguous".

    Returns: the module.

    Raises:
        ValueError: no such layer, an unknown order, a layer with cross-attention, or with rotary frequencies that
            depend on a length it cannot see.
        In forward: what the functions raise; TypeError for masks and caches, which these layers take no more.
    """
    check_order(order)
    found = [(m, _RUNS[type(m)]) for m in module.modules() if type(m) in _RUNS]
    if not found:
        known = ", ".join(kind.__name__ for kind in _RUNS)
        raise ValueError(f"module: expected one with a {known}, got {type(module).__name__}")
    for layer, _ in found:
        _check(layer, order)
    for whole, run in found:
        layer = local_layer(whole)
        layer.forward = partial(run, layer, _Context(group, order, scheme))
    return module


def _check(layer: Any, order: str) -> None:
    name = type(layer).__name__
    if getattr(layer, "kv_dim", None) is not None:
        raise ValueError(f"module: expected a {name} without kv_dim, got {layer.kv_dim}")
    if type(layer) in (layers.LinearAttention, layers.InfiniAttention) and order != "contiguous":
        raise ValueError(f"order: expected 'contiguous' beside a {name}, got {order!r}")
    rotary = getattr(layer, "rotary", None)
    if rotary is not None:
        rotary.check_cache()  # frequencies that change with the length


def _local(x: Tensor, whole: bool = False) -> Tensor:
    """This rank's heads; whole: of what all ranks have, whose gradients are sums over heads."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial()] * x.device_mesh.ndim) if whole else x.to_local()


def _like(out: Tensor, query: Tensor) -> Tensor:
    """(batch, heads, seq, dim) of this rank's heads, shared out as query is."""
    if not isinstance(query, DTensor):
        return out
    return DTensor.from_local(out, query.device_mesh, query.placements, run_check=False)


def _attend(context: _Context, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if isinstance(query, DTensor) and not (isinstance(key, DTensor) and options.get("sinks") is None):
        raise ValueError("module: expected key heads that the ranks of its tensor parallelism divide, and no sinks")
    first_head, heads = 0, query.shape[1]
    if isinstance(query, DTensor):
        first_head = query.device_mesh.get_local_rank() * (heads // query.device_mesh.size())
    out = ring_attention(
        _local(query), _local(key), _local(value), group=context.group, order=context.order, scheme=context.scheme,
        enable_gqa=True, heads_of_whole=(first_head, heads), **options,
    )  # fmt: skip
    return merge_heads(_like(out, query))


def _grouped(layer: layers.GroupedQueryAttention, context: _Context, x: Tensor) -> Tensor:
    check_sequence("x", x, layer.q_proj.in_features)
    tables = context.tables(layer.rotary, x)
    query, (key, value) = layer._query(x, tables), layer._key_value(x, tables)
    options = dict(is_causal=layer.is_causal, dropout_p=layer.dropout if layer.training else 0.0)
    return layer.o_proj(_attend(context, query, key, value, **options, **layer._score_options()))


def _packed(layer: layers.CausalSelfAttention, context: _Context, x: Tensor) -> Tensor:
    check_sequence("x", x, layer.qkv_proj.in_features)
    query, key, value = split_packed(layer.qkv_proj(x), layer.num_heads)
    dropout_p = layer.dropout if layer.training else 0.0
    return layer.out_proj(_attend(context, query, key, value, is_causal=True, dropout_p=dropout_p))


def _latent(layer: layers.MultiheadLatentAttention, context: _Context, x: Tensor) -> Tensor:
    check_sequence("x", x, layer.kv_a_proj_with_mqa.in_features)
    tables, rope = context.tables(layer.rotary, x), layer.qk_rope_head_dim
    query, both = layer._query(x, tables), layer._latent(x, tables)
    latent, rotary = _local(both, whole=True).split([both.shape[-1] - rope, rope], -1)
    weight = _local(layer.kv_b_proj.weight)
    tensors = dict(query=_local(query), latent=latent, rotary=rotary, kv_b_weight=weight)
    call = described(tensors | {"scheme": context.scheme}, ("query", "latent", "rotary"))
    (lengths,) = agree("context_parallel", call, None, context.group, x.device, [x.shape[1]])
    out = stream_latents(
        **tensors, lengths=lengths, is_causal=layer.is_causal, scale=layer.scale, group=context.group,
        order=context.order, scheme=context.scheme,
    )  # fmt: skip
    return layer.o_proj(merge_heads(_like(out, query)))


def _linear(layer: layers.LinearAttention, context: _Context, x: Tensor) -> Tensor:
    check_sequence("x", x, layer.q_proj.in_features)
    query = split_heads(layer.q_proj(x), layer.num_heads)
    key, value = (split_heads(p(x), layer.num_kv_heads) for p in (layer.k_proj, layer.v_proj))
    if isinstance(query, DTensor) and not isinstance(key, DTensor):
        raise ValueError("module: expected key heads that the ranks of its tensor parallelism divide")
    out = ring_linear_attention(_local(query), _local(key), _local(value), group=context.group, **layer.options)
    return layer.o_proj(merge_heads(_like(out, query)))


def _infini(layer: layers.InfiniAttention, context: _Context, x: Tensor) -> Tensor:
    check_sequence("x", x, layer.q_proj.in_features)
    query, key, value = layer.heads_of(x)
    cos, sin = layer.tables(x)  # a shard begins with a segment
    out = ring_infini_attention(
        query, key, value, layer.beta, group=context.group, segment_length=layer.segment_length, update=layer.update,
        cos=cos, sin=sin, truncate=layer.truncate,
    )  # fmt: skip
    return layer.o_proj(merge_heads(out))


_RUNS: dict[type, Callable[..., Tensor]] = {
    layers.GroupedQueryAttention: _grouped,
    layers.CausalSelfAttention: _packed,
    layers.MultiheadLatentAttention: _latent,
    layers.LinearAttention: _linear,
    layers.InfiniAttention: _infini,
}
