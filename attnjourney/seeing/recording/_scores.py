"""What the softmax of each operator reads: its query, key, lse and options, from the arguments and results of a call.

The layers' forward operators give out their projected queries and keys for the backward, and every forward its lse and
stats, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from ..._dtypes import accumulation_dtype
from ..._options import AttentionOptions
from ...block_mask import BlockMask
from ...nn._parts import split_heads
from ...ops._attention_checks import ALIGNMENTS
from ...ops.attention_weights import chosen_weights, row_sums
from ...ops.block_attention import BLOCKS
from ...reference.attention import packed_blocks
from ...reference.mha import attention_mask
from ...reference.sparse_attention import visible_indices
from ._stages import attention_stages
from ._stages_infini import infini_local
from ._stages_longformer import longformer_scores

FUSED = ("cpu", "cuda", "meta")  # devices that have _attention_weights


@dataclass
class Scores:
    """query (..., H, L, E), key (..., Hk, S, E), lse (..., H, L), stats (..., H, L, 2) or None; options as
    torch.ops.attnjourney.attention has them, with attn_mask (a tensor or a BlockMask) and is_causal."""

    query: Tensor
    key: Tensor
    lse: Tensor
    options: dict = field(default_factory=dict)
    stats: Tensor | None = None  # computed where missing
    dtype: torch.dtype | None = None  # of the weights, query's by default
    first_key: Tensor | None = None  # (B,), the number in its sequence of what is key 0 here
    row_mask: Callable[[Tensor], Tensor] | None = None  # rows -> the whole mask of these rows, none in options
    # for trace:
    value: Tensor | Callable[[], Tensor] | None = None  # (..., Hk, S, Ev)
    dropout: dict = field(default_factory=dict)  # dropout_p, dropout_seed
    before: Callable[[], dict[str, Tensor]] = dict  # stages before query and key
    expanded: Callable[[], Scores] | None = None  # the same attention with a key and a value for every head

    @property
    def heads(self) -> int:
        return self.lse.shape[-2] if self.query.dim() >= 3 else 1

    @property
    def length(self) -> int:
        return self.query.shape[-2]

    def of_rows(self, rows: Tensor) -> tuple[Tensor, dict, Tensor]:
        """query, its options, and where these rows stand in it: alone where the whole mask is made for them alone."""
        if self.row_mask is None:
            return self.query, self.options, rows
        query = self.query.index_select(-2, rows.to(self.query.device))
        return query, self.options | {"attn_mask": self.row_mask(rows)}, torch.arange(len(rows))

    def weights(self, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(..., heads, rows, S) in query's dtype and lse (..., heads, rows)."""
        query, options, at = self.of_rows(rows)
        if query.device.type in FUSED:
            lse = self.lse if at is rows else self.lse.index_select(-1, rows.to(self.lse.device))
            others = {name: x for name, x in options.items() if name not in ("attn_mask", "is_causal")}
            call = query, self.key, options.get("attn_mask"), options.get("is_causal", False), others
            stats = self.stats if at is rows and self.stats is not None else row_sums(*call)[1]
            weights = chosen_weights(*call, lse, stats, at, heads)
        else:
            weights = attention_stages(query, self.key, None, heads, at, **options)["weights"].to(query.dtype)
        lse = self.lse.index_select(-1, rows.to(self.lse.device))
        if self.query.dim() >= 3:
            lse = lse.index_select(-2, heads.to(lse.device))
        return weights if self.dtype is None else weights.to(self.dtype), lse


class StagedScores(Scores):
    """Of what is not one softmax: stages(heads, rows) gives weights and lse."""

    def __init__(self, query: Tensor, stages: Callable[[Tensor, Tensor], dict[str, Tensor]]):
        super().__init__(query, query, query[..., 0])
        self.stages = stages

    def weights(self, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        stages = self.stages(heads, rows)
        return stages["weights"].to(self.query.dtype), stages["lse"]


class PackedScores(Scores):
    """Sequences packed one after the other: query (total, H, E), key (total, Hk, E), lse (H, total), stats
    (H, total, 2)."""

    def __init__(self, query, key, lse, stats, ends_q, ends_k, options):
        super().__init__(query, key, lse, options, stats)
        self.ends = ends_q.tolist(), ends_k.tolist()

    @property
    def length(self) -> int:
        return max((b - a for a, b in zip(self.ends[0], self.ends[0][1:])), default=0)

    def weights(self, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(B, heads, rows, longest S) and (B, heads, rows): 0 and -inf beyond a sequence's own rows and keys; negative
        rows count from each sequence's own end."""
        batch, longest = len(self.ends[0]) - 1, max((b - a for a, b in zip(self.ends[1], self.ends[1][1:])), default=0)
        weights = self.query.new_zeros(batch, len(heads), len(rows), longest)
        lse = self.lse.new_full(weights.shape[:3], -torch.inf)
        for b in range(batch):
            q, k = (slice(ends[b], ends[b + 1]) for ends in self.ends)
            own = torch.where(rows < 0, rows + (q.stop - q.start), rows)
            here = ((own >= 0) & (own < q.stop - q.start)).nonzero().squeeze(1)
            options = {
                name: x[b] if name in ("sinks", "alibi_slopes") and x is not None and x.dim() == 2 else x
                for name, x in self.options.items()
            }
            query, key = self.query[q].transpose(0, 1), self.key[k].transpose(0, 1)
            scores = Scores(
                query,
                key,
                self.lse[:, q],
                options | {"enable_gqa": True},
                self.stats if self.stats is None else self.stats[:, q],
            )
            part, part_lse = scores.weights(heads, own[here])
            weights[b, :, here, : k.stop - k.start], lse[b, :, here] = part, part_lse
        return weights, lse


_OPTIONS = ("attn_mask", "is_causal", *(name for name in AttentionOptions.__annotations__ if name != "dropout_seed"))


def _options(call: dict) -> dict:
    return {name: call[name] for name in _OPTIONS if name in call}


def _dropout(call: dict) -> dict:
    return {name: call[name] for name in ("dropout_p", "dropout_seed")}


def _stats(outputs: tuple) -> Tensor | None:
    """Those of op_forward; attention_with_lse has none."""
    return outputs[2] if len(outputs) > 2 else None


def _attention(call: dict, outputs: tuple) -> Scores:
    query, key, value = call["query"], call["key"], call["value"]
    return Scores(query, key, outputs[1], _options(call), _stats(outputs), value=value, dropout=_dropout(call))


def _block_attention(call: dict, outputs: tuple) -> Scores:
    query, key = call["query"], call["key"]
    offsets, index, partial, elements = (call[name] for name in BLOCKS)
    mask = BlockMask(offsets, index, partial, elements, query.shape[-2], key.shape[-2])
    options = _options(call) | {"attn_mask": mask}
    return Scores(query, key, outputs[1], options, _stats(outputs), value=call["value"], dropout=_dropout(call))


def _sparse(call: dict, outputs: tuple) -> Scores:
    query, key, indices = call["query"], call["key"], call["indices"]
    names = ("query_block_size", "is_causal", "key_lengths")
    visible = {name: call[name] for name in names} | {"causal_alignment": ALIGNMENTS[call["causal_alignment"]]}

    def row_mask(rows: Tensor) -> Tensor:
        at, seen = visible_indices(indices, query.shape[2], key.shape[2], **visible)
        at, seen = (x.index_select(2, rows.to(x.device)) for x in (at, seen))
        times = torch.zeros(*at.shape[:3], key.shape[2], dtype=accumulation_dtype(query.dtype), device=at.device)
        if key.shape[2]:
            times.scatter_add_(3, at, seen.to(times.dtype))
        mask = times.log() if (times > 1).any() else times > 0  # a key that is named twice has twice the weight
        return mask.repeat_interleave(query.shape[1] // mask.shape[1], 1) if mask.shape[1] > 1 else mask

    options = {name: call[name] for name in ("scale", "enable_gqa", "softcap", "sinks")}
    return Scores(query, key, outputs[1], options, row_mask=row_mask, value=call["value"])


def _varlen(call: dict, outputs: tuple) -> Scores:
    return PackedScores(
        call["query"],
        call["key"],
        outputs[1],
        _stats(outputs),
        call["cu_seqlens_q"],
        call["cu_seqlens_k"],
        _options(call),
    )


def _paged(call: dict, outputs: tuple) -> Scores:
    key = packed_blocks(call["key"], call["cu_seqlens_k"], call["block_table"])
    offsets = call["cu_seqlens_q"], call["cu_seqlens_k"]
    return PackedScores(call["query"], key, outputs[1], None, *offsets, _options(call))


def _gpt(call: dict, outputs: tuple) -> Scores:
    _, _, lse, stats, qkv = outputs
    query, key, value = (split_heads(x, call["num_heads"]) for x in qkv.chunk(3, -1))
    return Scores(query, key, lse, {"is_causal": True}, stats, value=value, dropout=_dropout(call))


def _gqa(call: dict, outputs: tuple) -> Scores:
    _, query, key, value, _, lse, stats = outputs
    counts = {"q": call["num_heads"], "k": call["num_kv_heads"], "v": call["num_kv_heads"]}
    query, key, value = (split_heads(x, n) for x, n in zip((query, key, value), counts.values()))

    def before() -> dict[str, Tensor]:
        if call["cos"] is None:
            return {}
        raw = (split_heads(linear(call["x"], call[f"{n}_weight"], call[f"{n}_bias"]), counts[n]) for n in "qk")
        return dict(zip(("query_unrotated", "key_unrotated"), raw))

    options = {"is_causal": call["is_causal"], "enable_gqa": True}
    return Scores(query, key, lse, options, stats, value=value, before=before)


def _mla(call: dict, outputs: tuple) -> Scores:
    _, query, kv, kv_a, _, q_a, _, _, lse, stats = outputs
    heads, nope, rope = call["num_heads"], call["qk_nope_head_dim"], call["qk_rope_head_dim"]
    rank, eps = kv_a.shape[-1] - rope, call["eps"]
    k_pe = kv_a[..., rank:]  # already turned; of all heads
    kv = split_heads(kv, heads)
    key = torch.cat([kv[..., :nope], k_pe.unsqueeze(1).expand(-1, heads, -1, -1)], -1)

    def before() -> dict[str, Tensor]:
        stages, weight = {}, call["kv_a_norm_weight"]
        if call["cos"] is not None:
            norm = call["q_a_norm_weight"]
            hidden = call["x"] if norm is None else rms_norm(q_a, norm.shape, norm, eps)
            stages["query_unrotated"] = split_heads(linear(hidden, call["q_b_weight"]), heads)
            stages["k_pe_unrotated"] = linear(call["x"], call["kv_a_weight"][rank:])
        return stages | {"latent": rms_norm(kv_a[..., :rank], weight.shape, weight, eps), "k_pe": k_pe}

    options = {"is_causal": call["is_causal"], "scale": call["scale"]}
    return Scores(split_heads(query, heads), key, lse, options, stats, value=kv[..., nope:], before=before)


def _mha(call: dict, outputs: tuple) -> Scores:
    _, _, lse, _, projected = outputs  # stats are in the unit of the combined mask, which is made again here
    query, key, value, heads = call["query"], call["key"], call["value"], call["num_heads"]
    batch, length, embed = query.shape
    keys = length if key is None else key.shape[1]
    # `projected` holds one block per distinct input; the projections of a block lie side by side (csrc/layers/mha.cpp)
    with_query = 3 if key is None and value is None else 2 if key is None else 1
    first = projected[: batch * length * with_query * embed].view(batch, length, with_query * embed)
    q = first[..., :embed]
    if key is None:
        k = first[..., embed : 2 * embed]
    else:
        width = embed * (2 if value is None else 1)
        k = projected[first.numel() :][: batch * keys * width].view(batch, keys, width)[..., :embed]
    if value is not None:
        v = projected[projected.numel() - batch * keys * embed :].view(batch, keys, embed)
    else:
        v = (first if key is None else projected[first.numel() :].view(batch, keys, -1))[..., -embed:]
    scores = Scores(
        split_heads(q, heads), split_heads(k, heads), lse, value=split_heads(v, heads), dropout=_dropout(call)
    )
    attn_mask, padding, is_causal = call["attn_mask"], call["key_padding_mask"], call["is_causal"]
    if attn_mask is None or padding is None:
        scores.options = {"is_causal": is_causal, "attn_mask": attention_mask(attn_mask, padding, heads)}
        return scores

    def row_mask(rows: Tensor) -> Tensor:  # both masks together would be (batch, heads or 1, L, S)
        rows = rows.to(attn_mask.device)
        mask: Any = attention_mask(attn_mask.index_select(-2, rows), padding, heads)
        if not is_causal:
            return mask
        past = torch.arange(keys, device=rows.device) <= rows.unsqueeze(1)
        return mask & past if mask.dtype == torch.bool else torch.where(past, mask, -torch.inf)

    scores.row_mask = row_mask
    return scores


def _over_cache(call: dict, lengths: Tensor, longest: int) -> dict:
    """The options of an attention over keys 0 .. longest - 1, whose query rows are the last of each sequence."""
    options = _options(call) | {"causal_alignment": 1, "key_lengths": lengths}
    mask = call["attn_mask"]
    if mask is not None and mask.dim():
        options["attn_mask"] = mask[..., :longest]
    return options


def _decode(call: dict, outputs: tuple) -> Scores:
    query, key, value, lengths = (call[name] for name in ("query", "key", "value", "lengths"))
    table, capacity = call["block_table"], key.shape[2]
    longest = int(lengths.max()) if lengths.numel() else 0
    first_key, in_order = None, lambda x: x
    if call["ring"]:
        first_key = (lengths - capacity).clamp(min=0)
        lengths, longest = lengths - first_key, min(longest, capacity)
        columns = first_key[:, None] + torch.arange(longest, device=key.device)  # (B, longest)
        slots = (columns % capacity)[:, None, :, None]
        mask = call["attn_mask"]
        if mask is not None and mask.dim() and mask.shape[-1] != 1:
            mask = mask[(None,) * (4 - mask.dim())].expand(query.shape[0], -1, -1, -1)
            at = columns.clamp(max=mask.shape[-1] - 1)[:, None, None, :].expand(*mask.shape[:3], -1)
            call = call | {"attn_mask": mask.gather(-1, at)}

        def in_order(x: Tensor) -> Tensor:
            return x.gather(2, slots.expand(-1, x.shape[1], -1, x.shape[3]))
    elif table is not None:
        blocks = table[:, : -(-longest // capacity)].clamp(min=0).long()

        def in_order(x: Tensor) -> Tensor:
            return x[blocks].transpose(1, 2).flatten(2, 3)  # (B, Hkv, longest or more, E)

    options = _over_cache(call, lengths, longest) | {"enable_gqa": True}
    key = in_order(key)[:, :, :longest]
    return Scores(
        query, key, outputs[1], options, first_key=first_key, value=lambda: in_order(value)[:, :, :longest]
    )  # fmt: skip


def _mla_decode(call: dict, outputs: tuple) -> Scores:
    """In the latent space, where one key serves all heads: [q_nope W_UK, q_rope] . [c, k_rope]."""
    query, latent, lengths, weight = (call[name] for name in ("query", "latent", "lengths", "kv_b_weight"))
    longest = int(lengths.max()) if lengths.numel() else 0
    if call["block_table"] is not None:
        latent = latent[call["block_table"][:, : -(-longest // latent.shape[1])].clamp(min=0).long()].flatten(1, 2)
    latent = latent[:, :longest].unsqueeze(1)
    rank, heads, width = weight.shape[1], query.shape[1], query.shape[-1]
    nope = width - (latent.shape[-1] - rank)
    wide = accumulation_dtype(query.dtype)
    up = weight.unflatten(0, (heads, -1)).to(wide)  # (H, nope + v, rank)
    absorbed = torch.cat([query[..., :nope].to(wide) @ up[:, :nope], query[..., nope:].to(wide)], -1)
    options = _over_cache(call, lengths, longest)
    if options["scale"] is None:
        options["scale"] = width**-0.5
    if options["attn_mask"] is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(wide)

    def expanded() -> Scores:
        c, k_pe = latent[..., :rank], latent[..., rank:]
        kv = c.to(wide) @ up.mT  # (B, H, longest, nope + v)
        key = torch.cat([kv[..., :nope], k_pe.to(wide).expand(-1, heads, -1, -1)], -1)
        before = {"latent": c.squeeze(1), "k_pe": k_pe.squeeze(1)}
        return Scores(query.to(wide), key, outputs[1], options, value=kv[..., nope:], before=lambda: before)

    return Scores(absorbed, latent.to(wide), outputs[1], options, dtype=query.dtype, expanded=expanded)


def _infini(call: dict) -> Scores:
    query, key, cos, sin, segment = (call[name] for name in ("query", "key", "cos", "sin", "segment_length"))
    return StagedScores(query, lambda heads, rows: infini_local(query, key, None, cos, sin, segment, heads, rows))


def _longformer(call: dict) -> Scores:
    call = {name: x for name, x in call.items() if name != "dropout_p"}
    return StagedScores(call["query"], lambda heads, rows: longformer_scores(**call, heads=heads, rows=rows))


# functions made of several operators (attnjourney/ops/_registry/call_observers.py), from their arguments
FUNCTIONS = {"infini_attention": _infini, "longformer_attention": _longformer}

PACKED = ("varlen_attention", "paged_attention")  # whose records have rows of each sequence
READERS: dict[str, Callable[[dict, tuple], Scores]] = {
    "attention": _attention,
    "block_attention": _block_attention,
    "varlen_attention": _varlen,
    "paged_attention": _paged,
    "gpt_attention": _gpt,
    "gqa": _gqa,
    "mla": _mla,
    "mha": _mha,
    "sparse_attention": _sparse,
    "decode": _decode,
    "mla_decode": _mla_decode,
}
