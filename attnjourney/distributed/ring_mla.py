"""Multi-head latent attention over a sequence whose rows lie on the ranks of a process group: latents are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from ..ops.mla import _check as check_layer
from ..reference.mla import key_and_value, query_and_latent
from ._agreement import REFUSALS, agree, described
from ._parts import Layout, Visibility
from ._rows import Scores
from ._streams import Stream, StreamedAttention
from .sharding import check_lengths, check_order, lengthened

SCHEMES = ("ring", "all_gather")


def ring_mla(
    x: Tensor,
    num_heads: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    q_a_weight: Tensor | None,
    q_a_norm_weight: Tensor | None,
    q_b_weight: Tensor,
    kv_a_weight: Tensor,
    kv_a_norm_weight: Tensor,
    kv_b_weight: Tensor,
    o_weight: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    group: dist.ProcessGroup | None = None,
    order: str = "contiguous",
    scheme: str = "ring",
) -> Tensor:
    """attnjourney.mla over the whole sequence, of which each rank of the group has a shard and gets the rows of its
    shard. What is sent of a token is its latent and its rotary key, kv_lora_rank + rope numbers (576 in DeepSeek-V3,
    arXiv 2412.19437), not the H * (nope + rope + v_head_dim) of keys and values (40,960), which every rank makes of
    them as they come (Ring Attention, arXiv 2310.01889).

    Args:
        x: this rank's shard (batch, seq, embed); shards may differ in length and be empty.
        cos, sin: the tables of this rank's positions: `shard` of those of the whole, dim 0 or, with a batch, 1.
        group, order: as in ring_attention.
        scheme: "ring" or "all_gather", as in ring_attention.
        the others: as in attnjourney.mla, the same on every rank. A weight's gradient is that of this rank's rows (and
            for kv_b_weight of their sight): the sum over the group is the whole one.

    Returns: (batch, seq, out) in x's dtype.

    Raises, on every rank and before latents are sent:
        ValueError: an argument that does not fit, or differs between ranks; names it, and the two ranks.
        RuntimeError: a dtype that does not fit, or another rank that refused its arguments.
        NotImplementedError: differentiated twice, or in forward mode.
    """
    own = dict(locals())
    error: Exception | None = None
    call: dict[str, str] = {}
    try:
        call = described({name: value for name, value in own.items() if name != "group"}, ("x", "cos", "sin"))
        check_layer(**{name: value for name, value in own.items() if name not in ("group", "order", "scheme")})
        check_order(order)
        if scheme not in SCHEMES:
            raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    except REFUSALS as refused:
        error = refused
    (lengths,) = agree("ring_mla", call, error, group, x.device, [x.shape[1] if x.dim() == 3 else 0])
    check_lengths(order, "x", lengths)

    def turned(x: Tensor) -> Tensor:
        return x if cos is None else torch.ops.attnjourney.rope(x, cos, sin, interleaved=True)

    query, latent, rotary = query_and_latent(
        x, num_heads, qk_nope_head_dim, qk_rope_head_dim, q_a_weight, q_a_norm_weight, q_b_weight, kv_a_weight,
        kv_a_norm_weight, turned, eps,
    )  # fmt: skip
    out = stream_latents(
        query,
        latent,
        rotary.squeeze(1),
        kv_b_weight,
        lengths=lengths,
        is_causal=is_causal,
        scale=scale,
        group=group,
        order=order,
        scheme=scheme,
    )
    return linear(out.transpose(1, 2).flatten(2), o_weight)


def stream_latents(
    query: Tensor, latent: Tensor, rotary: Tensor, kv_b_weight: Tensor, *, lengths: Sequence[int], is_causal: bool,
    scale: float | None, group: dist.ProcessGroup | None, order: str, scheme: str,
) -> Tensor:  # fmt: skip
    """(batch, H, seq, v) of query (batch, H, seq, nope + rope), latent (batch, seq, kv_lora), rotary (batch, seq, rope)
    of this rank's rows, and kv_b_weight (H * (nope + v), kv_lora). lengths: of the shards of all ranks."""
    heads, rope = query.shape[1], rotary.shape[-1]
    nope = query.shape[-1] - rope
    v_dim = kv_b_weight.shape[0] // heads - nope

    def keys_and_values(latent: Tensor, rotary: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return key_and_value(latent, rotary.unsqueeze(1), weight, heads, nope, v_dim)

    stream = Stream(
        group=group,
        layout=Layout(order, tuple(lengths), tuple(lengths)),
        seen=Visibility.of(is_causal, None, 0),
        scores=Scores(scale, False),
        lead=(query.shape[0], heads),
        gathered=scheme == "all_gather",
        v_dim=v_dim,
        expand=keys_and_values,
    )
    latent, rotary = (lengthened(x, max(lengths)).contiguous() for x in (latent, rotary))
    tensors = latent, rotary, kv_b_weight
    return StreamedAttention.apply(stream, query, None, None, None, *tensors)[0]
