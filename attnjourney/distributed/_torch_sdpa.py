"""torch's own `context_parallel` and `_ContextParallel` on the CPU: their table of attention operators has CUDA's
alone, and refuses that of the CPU. Importing this adds it: attention by a ring over the ranks of the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..ops._registry.operator import Signature
from ..ops._stats import stats_of
from ._agreement import agree, described
from ._parts import Layout, Visibility
from ._rows import KEY, QUERY, VALUE, Scores
from ._streams import Backward, Stream, attended
from .sharding import check_lengths, lengthened

try:
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
except ImportError:  # an earlier torch, whose tables have other places
    torchs = None  # type: ignore[assignment]

aten = torch.ops.aten
_FORWARD = Signature(aten._scaled_dot_product_flash_attention_for_cpu.default)
_BACKWARD = Signature(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
ROWS = -2  # the dimension that is shared out


class _Call:
    """One call of either operator, its DTensors as this rank's shards."""

    def __init__(self, named: dict[str, Any]):
        if named["dropout_p"] > 0:
            raise NotImplementedError(
                f"dropout_p: expected 0 under torch's context_parallel on the CPU, got {named['dropout_p']}; "
                "ring_attention takes others"
            )
        self.mesh = named["query"].device_mesh
        if self.mesh.ndim != 1:
            raise ValueError(f"query: expected a mesh of one dimension, got {self.mesh}")
        self.local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in named.items()}
        self.query, self.key, self.value = (self.local[name] for name in ("query", "key", "value"))
        self.mask = self.local["attn_mask"]
        causal, group = named["is_causal"], self.mesh.get_group()
        balanced = causal and torchs._cp_options.enable_load_balance
        order = "zigzag" if balanced else "contiguous"
        facts = dict(query=self.query, key=self.key, value=self.value, is_causal=causal, scale=named["scale"])
        own = [self.query.shape[ROWS], self.key.shape[ROWS]]
        free = ("query", "key", "value")
        q_lens, kv_lens = agree("context_parallel", described(facts, free), None, group, self.query.device, own)
        for name, lengths in (("query", q_lens), ("key", kv_lens)):
            check_lengths(order, name, lengths)
        self.longest = max(kv_lens)
        self.stream = Stream(
            group=group,
            layout=Layout(order, tuple(q_lens), tuple(kv_lens)),
            seen=Visibility.of(causal, None, 0),
            scores=Scores(named["scale"], enable_gqa=self.key.shape[-3] != self.query.shape[-3]),
            lead=tuple(self.query.shape[:-2]),
            gathered=False,
            v_dim=self.value.shape[-1],
        )

    def sent(self) -> tuple[Tensor, Tensor]:
        return lengthened(self.key, self.longest), lengthened(self.value, self.longest)

    def shared(self, x: Tensor, dim: int = 2) -> DTensor:
        return DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False)


@torch.no_grad()
def _forward(operator: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    call = _Call(_FORWARD.named(args, kwargs))
    out, lse, _ = attended(call.stream, call.query, None, None, call.mask, *call.sent())
    return call.shared(out), call.shared(lse)


@torch.no_grad()
def _backward(operator: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    call = _Call(_BACKWARD.named(args, kwargs))
    lse = call.local["logsumexp"]
    results = call.local["out"], lse, stats_of(lse)
    need = QUERY | KEY | VALUE
    work = Backward(call.stream, need, call.local["grad_out"], None, call.query, call.sent(), None, call.mask, results)
    of_key, of_value = (g[..., : call.key.shape[ROWS], :] for g in work.of_tensors())
    gradients = zip((work.grad_query, of_key, of_value), (call.query, call.key, call.value))
    return tuple(call.shared(g.to(x.dtype)) for g, x in gradients)


if torchs is not None:
    handlers: dict[Any, Any] = torchs.custom_ops
    handlers |= {_FORWARD.operator: _forward, _BACKWARD.operator: _backward}
