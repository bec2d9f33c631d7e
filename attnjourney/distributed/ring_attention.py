"""Attention over a sequence whose rows lie on the ranks of a process group."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .._options import ScoreOptions
from ..ops._attention_checks import check
from ._agreement import REFUSALS, agree, described
from ._parts import Layout, Visibility
from ._rows import Scores
from ._streams import Stream, StreamedAttention
from ._ulysses import heads_for_rows, own_heads, rows_for_heads, ulysses
from .cost import SCHEMES, choose_scheme
from .sharding import check_order

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RingOptions(ScoreOptions, total=False):
    """The options of ring_attention."""

    group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    order: str
    scheme: str
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    cu_seqlens: Tensor | None


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[RingOptions]
) -> Tensor: ...
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[RingOptions]
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    ulysses_group: dist.ProcessGroup | None = None,
    order: str = "contiguous",
    scheme: str = "auto",
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.attention over the whole sequence, of which each rank of the group has a shard and gets the rows of
    its shard. Ring Attention (arXiv 2310.01889), or all-gathered keys and values, or DeepSpeed-Ulysses
    (arXiv 2309.14509).

    Args:
        query, key, value: this rank's shards, (..., H, L / ranks, E), of one shape on every rank. `shard` makes them.
        group: the process group, the default one by default.
        ulysses_group: a group that shares out heads as well (USP, arXiv 2405.07719): this rank's shard is a part of
            that which the ranks of this group have together, `shard(shard(x, group, order), ulysses_group)`. Within it
            heads go for rows by all-to-all, and the ring runs over `group` between ranks of one place in it. Its size
            divides the numbers of heads. On a machine of 8 GPUs: these.
        order: how the sequence is shared out, as in `shard`: "contiguous", or "zigzag" for even causal work.
        scheme: "ring": keys and values go from rank to rank while the last ones are worked on, as far as some row sees
            them. "all_gather": all of them at once. "ulysses": heads are shared out in place of rows; the ranks divide
            the numbers of query and of key heads. "auto": see choose_scheme.
        attn_mask: of this rank's rows and all keys of the whole: broadcasts to (..., Hq, L / ranks, S). bool or
            floating, trained too, as in attnjourney.attention. A rank's gradient is that of its rows. Not with
            "ulysses" and ulysses_group.
        dropout_p: 0; other probabilities are refused, whose bits depend on positions in the whole.
        is_causal, scale, enable_gqa, window_size, prefix_length, softcap: as in attnjourney.attention; positions are
            those of the whole sequence.
        key_lengths: (B,), of the whole sequences.
        cu_seqlens: (sequences + 1,) int32 or int64: the whole is packed sequences, one after the other, as in
            attnjourney.varlen_attention, the same for every entry of the batch; causality, window and prefix are each
            sequence's own. Shards go to ranks with a part of the same sequence and to no others. As many keys as rows;
            not with key_lengths or "ulysses".
        sinks, alibi_slopes: (Hq,) or (B, Hq), the same on every rank. A rank's gradient is that of its rows (its heads
            with "ulysses"): the sum over the group is the whole one. ALiBi makes a bias of (Hq, rows, keys) of each
            pair of different chunks, one at a time.
        return_lse: also return the logarithm of each row's denominator.

    Returns: (..., Hq, L / ranks, Ev); with return_lse also (..., Hq, L / ranks), as attnjourney.attention.

    Raises, on every rank and before keys and values are sent:
        ValueError: an argument that does not fit, or differs between ranks; names it, and the two ranks.
        RuntimeError: a dtype that does not fit, or another rank that refused its arguments.
        NotImplementedError: dropout; differentiated twice, but with "ulysses".
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as attention itself: casts, and computes what is then there
        query, key, value = (_autocast(x) for x in (query, key, value))
    call: dict[str, str] = {}
    error, lead = None, []
    own = dict(locals())
    try:
        call = _described(own)
        lead = _checked(own)
    except REFUSALS as refused:
        error = refused
    for ranks in (group,) if ulysses_group is None else (group, ulysses_group):
        try:
            agree("ring_attention", call, error, ranks, query.device)
        except REFUSALS as refused:
            error = refused  # the ranks of the second group learn of it
    if error is not None:
        raise error
    documents = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    size = dist.get_world_size(group)
    masks: Any = dict(is_causal=is_causal, window_size=window_size, prefix_length=prefix_length)
    if scheme == "auto":
        shapes = (query.shape, key.shape, value.shape)
        scheme = choose_scheme(*shapes, query.dtype, size, order=order, **masks)
        by_rows = not (ulysses_group is None and cu_seqlens is None and attn_mask is None)
        scheme = "ring" if by_rows and scheme == "ulysses" else scheme
    softcap = softcap or 0.0
    with torch.autocast(device, enabled=False):
        if scheme == "ulysses":
            options = dict(scale=scale, enable_gqa=enable_gqa, key_lengths=key_lengths, softcap=softcap, **masks)
            per_head = dict(sinks=sinks, alibi_slopes=alibi_slopes)
            out, lse = ulysses(query, key, value, group, order, options.pop("is_causal"), per_head, options)
        else:
            if ulysses_group is not None:
                query, key, value = (heads_for_rows(x, ulysses_group) for x in (query, key, value))
                sinks, alibi_slopes = (own_heads(x, ulysses_group) for x in (sinks, alibi_slopes))
                lead[-1] //= dist.get_world_size(ulysses_group)
            stream = Stream(
                group=group,
                layout=Layout(order, size, query.shape[-2], key.shape[-2], documents),
                seen=Visibility.of(**masks),
                scores=Scores(scale, enable_gqa, softcap, key_lengths),
                lead=tuple(lead),
                gathered=scheme == "all_gather",
                v_dim=value.shape[-1],
            )
            out, lse = StreamedAttention.apply(stream, query, sinks, alibi_slopes, attn_mask, key, value)
            if ulysses_group is not None:
                out, lse = rows_for_heads(out, lse, ulysses_group)
    return (out, lse) if return_lse else out


def _autocast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _described(arguments: dict[str, Any]) -> dict[str, str]:
    """What must be the same on every rank, as text."""
    apart = ("group", "ulysses_group", "device", "call", "error", "lead")
    text = described({name: x for name, x in arguments.items() if name not in apart})
    lengths = arguments["key_lengths"]
    if lengths is not None and not lengths.is_cuda:
        text["key_lengths"] = f"{lengths.tolist()}"
    if arguments["cu_seqlens"] is not None:  # who sends to whom depends on it
        text["cu_seqlens"] = f"{arguments['cu_seqlens'].tolist()}"
    return text


def _checked(arguments: dict[str, Any]) -> list[int]:
    """The leading dimensions of the result; raises for what does not fit on this rank."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            raise ValueError(f"{name}: expected at least 3 dimensions (..., heads, length, head_dim), got {x.dim()}")
        check_order(arguments["order"], name, x.shape[-2])
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name}: expected dtype {query.dtype}, got {x.dtype}")
    if arguments["dropout_p"] != 0:
        raise NotImplementedError(f"dropout_p: expected 0 in ring_attention, got {arguments['dropout_p']}")
    if arguments["prefix_length"] < 0:
        raise ValueError(f"prefix_length: expected a number of at least 0, got {arguments['prefix_length']}")
    names = ("key_lengths", "sinks", "alibi_slopes")
    options = {name: arguments[name] for name in names if arguments[name] is not None}
    window, softcap = arguments["window_size"], arguments["softcap"]
    options |= dict(window_size=(-1, -1) if window is None else window, softcap=softcap or 0.0)
    lead = check(query, key, value, None, arguments["scale"], arguments["enable_gqa"], **options)
    scheme, size = arguments["scheme"], dist.get_world_size(arguments["group"])
    heads = arguments["ulysses_group"]
    inner = 1 if heads is None else dist.get_world_size(heads)
    most, lengths = key.shape[-2] * size * inner, arguments["key_lengths"]
    if lengths is not None and not lengths.is_cuda and not all(0 <= n <= most for n in lengths.tolist()):
        raise ValueError(f"key_lengths: expected numbers from 0 to {most}, got {lengths.tolist()}")
    if arguments["attn_mask"] is not None:
        _check_mask(arguments, [*lead, query.shape[-2], most])
    if arguments["cu_seqlens"] is not None:
        _check_documents(arguments, key.shape[-2] * size * inner)
    if scheme not in ("auto", *SCHEMES):
        raise ValueError(f"scheme: expected one of auto, {', '.join(SCHEMES)}, got {scheme!r}")
    for name, x in (("query", query), ("key", key)):
        if x.shape[-3] % inner:
            raise ValueError(
                f"{name}: expected a multiple of the {inner} ranks of ulysses_group, got {x.shape[-3]} heads"
            )
        if scheme == "ulysses" and heads is not None:
            raise ValueError("scheme: expected 'ring' or 'all_gather' beside ulysses_group, got 'ulysses'")
        if scheme == "ulysses" and x.shape[-3] % size:
            raise ValueError(f"{name}: scheme 'ulysses' expects a multiple of {size} heads, got {x.shape[-3]}")
    return lead


def _check_documents(arguments: dict[str, Any], most: int) -> None:
    ends: list[int] = arguments["cu_seqlens"].tolist()
    if arguments["key_lengths"] is not None or arguments["scheme"] == "ulysses":
        given = "key_lengths" if arguments["key_lengths"] is not None else "scheme 'ulysses'"
        raise ValueError(f"cu_seqlens: expected None beside {given}, got {ends}")
    if arguments["query"].shape[-2] != arguments["key"].shape[-2]:
        rows, keys = (arguments[name].shape[-2] for name in ("query", "key"))
        raise ValueError(f"key: expected as many keys as rows beside cu_seqlens, {rows}, got {keys}")
    if not ends or ends[0] != 0 or ends[-1] > most or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens: expected numbers that rise from 0 to at most {most}, got {ends}")


def _check_mask(arguments: dict[str, Any], whole: list[int]) -> None:
    mask, query = arguments["attn_mask"], arguments["query"]
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"attn_mask: expected dtype torch.bool, torch.float32 or {query.dtype}, got {mask.dtype}")
    fits = 2 <= mask.dim() <= len(whole) and all(n in (1, w) for n, w in zip(reversed(mask.shape), reversed(whole)))
    if not fits:
        raise ValueError(
            f"attn_mask: expected a shape of 2 dimensions or more that broadcasts to {tuple(whole)}, this rank's rows "
            f"and all keys, got {tuple(mask.shape)}"
        )
    if arguments["scheme"] == "ulysses" or arguments["ulysses_group"] is not None:
        raise ValueError("attn_mask: expected None beside scheme 'ulysses' or ulysses_group, got a tensor")
