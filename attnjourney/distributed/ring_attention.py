"""Attention over a sequence whose rows lie on the ranks of a process group."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .._options import ScoreOptions
from ..block_mask import BlockMask
from ..ops._attention_checks import check
from ..ops._layer_checks import check_dropout
from ..ops._registry.operator import seed_for
from ._agreement import REFUSALS, agree, described
from ._parts import Layout, Visibility
from ._rows import Scores
from ._streams import Stream, StreamedAttention
from ._transfer import all_gather
from ._ulysses import heads_for_rows, mask_by_heads, own_heads, rows_for_heads, ulysses
from .cost import SCHEMES, choose_scheme
from .sharding import check_lengths, check_order, chunks, lengthened

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
    attn_mask: Tensor | BlockMask | None
    key_lengths: Tensor | None
    cu_seqlens: Tensor | None
    dropout_seed: Tensor | None
    heads_of_whole: tuple[int, int] | None


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
    attn_mask: Tensor | BlockMask | None = None,
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
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    heads_of_whole: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.attention over the whole sequence, of which each rank of the group has a shard and gets the rows of
    its shard. Ring Attention (arXiv 2310.01889), or all-gathered keys and values, or DeepSpeed-Ulysses
    (arXiv 2309.14509).

    Args:
        query, key, value: this rank's shards, (..., H, L / ranks, E). `shard` makes them; contiguous ones may have any
            lengths and be empty. With ulysses_group of one length.
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
            floating, trained too, as in attnjourney.attention. A rank's gradient is that of its rows; where it is one
            row for all, and heads are shared out, that of its heads. With "ulysses" and ulysses_group its rows are sent
            as those of query are. Or a BlockMask of the whole, the same on every rank, whose blocks begin where shards
            do (with "ulysses": anywhere).
        dropout_p, dropout_seed: as in attnjourney.attention, with the bits of one rank. The seed is the same on every
            rank: where none is given, the first rank's, 8 bytes more to each.
        is_causal, scale, enable_gqa, window_size, prefix_length, softcap: as in attnjourney.attention; positions are
            those of the whole sequence.
        key_lengths: (B,), of the whole sequences.
        cu_seqlens: (sequences + 1,) int32 or int64: the whole is packed sequences, one after the other, as in
            attnjourney.varlen_attention, the same for every entry of the batch; causality, window and prefix are each
            sequence's own. Shards go to ranks with a part of the same sequence and to no others. As many keys as rows;
            not with key_lengths or "ulysses".
        sinks, alibi_slopes: (Hq,) or (B, Hq), the same on every rank. A rank's gradient is that of its rows (its heads
            with "ulysses"): the sum over the group is the whole one.
        heads_of_whole: (first, number): these are heads of a layer that has so many, of which other ranks have the
            others; for the bits of dropout.
        return_lse: also return the logarithm of each row's denominator.

    Returns: (..., Hq, L / ranks, Ev); with return_lse also (..., Hq, L / ranks), as attnjourney.attention.

    Raises, on every rank and before keys and values are sent:
        ValueError: an argument that does not fit, or differs between ranks; names it, and the two ranks.
        RuntimeError: a dtype that does not fit, or another rank that refused its arguments.
        NotImplementedError: differentiated twice, but with "ulysses".
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as attention itself: casts, and computes what is then there
        query, key, value = (_autocast(x) for x in (query, key, value))
    own = dict(locals())
    lead, q_lens, kv_lens, one_row = _agreed(own)
    size, inner = len(q_lens), 1 if ulysses_group is None else dist.get_world_size(ulysses_group)
    own["dropout_seed"] = seed = _seed(query, dropout_p, dropout_seed, group, ulysses_group)
    masks: Any = dict(is_causal=is_causal, window_size=window_size, prefix_length=prefix_length)
    if scheme == "auto":
        shapes = [(*x.shape[:-2], max(n), x.shape[-1]) for x, n in ((query, q_lens), (key, kv_lens), (value, kv_lens))]
        scheme = choose_scheme(shapes[0], shapes[1], shapes[2], query.dtype, size, order=order, **masks)
        by_rows = inner > 1 or cu_seqlens is not None or isinstance(attn_mask, Tensor)
        scheme = "ring" if by_rows and scheme == "ulysses" else scheme
    documents = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    blocks = attn_mask if isinstance(attn_mask, BlockMask) else None
    whole = [tuple(n * inner for n in lengths) for lengths in (q_lens, kv_lens)]
    layout = Layout(order, whole[0], whole[1], documents, 1 if blocks is None else blocks.block_size)
    with torch.autocast(device, enabled=False):
        if scheme == "ulysses":
            out, lse = ulysses(query, key, value, attn_mask, one_row, layout, group, heads_of_whole, _options(own))
        else:
            first, heads = heads_of_whole or (0, query.shape[-3])
            key, value = (lengthened(x, max(kv_lens)) for x in (key, value))
            mask = attn_mask if isinstance(attn_mask, Tensor) else None
            if ulysses_group is not None:
                swapped = partial(heads_for_rows, group=ulysses_group)
                if mask is not None:
                    mask = mask_by_heads(mask, one_row, query, ulysses_group, swapped)
                query, key, value = (swapped(x) for x in (query, key, value))
                sinks, alibi_slopes = (own_heads(x, ulysses_group) for x in (sinks, alibi_slopes))
                lead[-1] //= inner
                own_first = dist.get_rank(ulysses_group) * lead[-1]
                blocks = None if blocks is None else blocks.of_heads(own_first, lead[-1])
                first += own_first
            stream = Stream(
                group=group,
                layout=layout,
                seen=Visibility.of(**masks),
                scores=Scores(
                    scale=scale,
                    enable_gqa=enable_gqa,
                    softcap=softcap or 0.0,
                    key_lengths=key_lengths,
                    dropout=(dropout_p, seed),
                    first_head=first,
                    heads=heads,
                    documents=1 if documents is None else len(documents) - 1,
                ),
                lead=tuple(lead),
                gathered=scheme == "all_gather",
                v_dim=value.shape[-1],
                blocks=blocks,
            )
            out, lse = StreamedAttention.apply(stream, query, sinks, alibi_slopes, mask, key, value)
            if ulysses_group is not None:
                out, lse = rows_for_heads(out, lse, ulysses_group)
    return (out, lse) if return_lse else out


def _autocast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _seed(
    query: Tensor, dropout_p: float, given: Tensor | None, group: dist.ProcessGroup | None,
    ulysses_group: dist.ProcessGroup | None,
) -> Tensor | None:  # fmt: skip
    """The one given, or what the first rank draws. All draw, so that their generators stay in step."""
    seed = seed_for(query, dropout_p, given)
    if seed is None or given is not None:
        return seed
    for ranks in (group,) if ulysses_group is None else (group, ulysses_group):
        seed = all_gather(seed, ranks)[0]
    return seed


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the operator."""
    names = ("dropout_p", "is_causal", "scale", "enable_gqa", "prefix_length", "key_lengths", "sinks", "alibi_slopes")
    window, softcap = arguments["window_size"], arguments["softcap"]
    options = {name: arguments[name] for name in (*names, "dropout_seed")}
    return options | dict(window_size=(-1, -1) if window is None else window, softcap=softcap or 0.0)


def _agreed(arguments: dict[str, Any]) -> tuple[list[int], list[int], list[int], bool]:
    """(leading dimensions of the result, lengths of the queries and of the keys by rank, whether a mask is one row for
    all): all ranks make the same call, and it fits."""
    query, key, heads = (arguments[name] for name in ("query", "key", "ulysses_group"))
    lead: list[int] = []
    call: dict[str, str] = {}
    error, found = None, []
    try:
        call = _described(arguments)
        lead = _checked(arguments)
    except REFUSALS as refused:
        error = refused
    own = [x.shape[-2] if x.dim() > 1 else 0 for x in (query, key)]
    if isinstance(arguments["attn_mask"], Tensor):
        own.append(_rows_of_mask(arguments["attn_mask"], own[0]))
    for ranks in (arguments["group"],) if heads is None else (arguments["group"], heads):
        try:
            found.append(agree("ring_attention", call, error, ranks, query.device, own))
        except REFUSALS as refused:
            error = refused  # the ranks of the second group learn of it
    if error is not None:
        raise error
    q_lens, kv_lens, *_ = found[0]
    _check_whole(arguments, lead, q_lens, kv_lens)
    masks = found[-1][2:]
    return lead, q_lens, kv_lens, any(ROW_FOR_ALL in m and ROWS not in m for m in masks)


UNKNOWN, ROW_FOR_ALL, ROWS = range(3)  # what a rank's mask has for its rows; unknown of a rank with one row


def _rows_of_mask(mask: Tensor, rows: int) -> int:
    if rows < 2 or mask.dim() < 2:
        return UNKNOWN
    return ROW_FOR_ALL if mask.shape[-2] == 1 else ROWS


def _described(arguments: dict[str, Any]) -> dict[str, str]:
    """What must be the same on every rank, as text."""
    apart = ("group", "ulysses_group", "device", "heads_of_whole")
    free = ("query", "key", "value", "attn_mask") if arguments["ulysses_group"] is None else ()
    text = described({name: x for name, x in arguments.items() if name not in apart}, free)
    for name in ("key_lengths", "cu_seqlens", "dropout_seed"):
        x = arguments[name]
        if x is not None and (name == "cu_seqlens" or not x.is_cuda):  # who sends to whom depends on it
            text[name] = f"{x.tolist()}"
    return text


def _checked(arguments: dict[str, Any]) -> list[int]:
    """The leading dimensions of the result; raises for what does not fit on this rank."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    check_order(arguments["order"])
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            raise ValueError(f"{name}: expected at least 3 dimensions (..., heads, length, head_dim), got {x.dim()}")
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name}: expected dtype {query.dtype}, got {x.dtype}")
    check_dropout(arguments["dropout_p"])
    if arguments["prefix_length"] < 0:
        raise ValueError(f"prefix_length: expected a number of at least 0, got {arguments['prefix_length']}")
    names = ("key_lengths", "sinks", "alibi_slopes")
    options = {name: arguments[name] for name in names if arguments[name] is not None}
    window, softcap = arguments["window_size"], arguments["softcap"]
    options |= dict(window_size=(-1, -1) if window is None else window, softcap=softcap or 0.0)
    lead = check(query, key, value, None, arguments["scale"], arguments["enable_gqa"], **options)
    if arguments["attn_mask"] is not None:
        _check_mask(arguments, lead)
    _check_scheme(arguments)
    return lead


def _check_scheme(arguments: dict[str, Any]) -> None:
    scheme, size = arguments["scheme"], dist.get_world_size(arguments["group"])
    heads = arguments["ulysses_group"]
    inner = 1 if heads is None else dist.get_world_size(heads)
    if scheme not in ("auto", *SCHEMES):
        raise ValueError(f"scheme: expected one of auto, {', '.join(SCHEMES)}, got {scheme!r}")
    if scheme == "ulysses" and heads is not None:
        raise ValueError("scheme: expected 'ring' or 'all_gather' beside ulysses_group, got 'ulysses'")
    for name in ("query", "key"):
        count = arguments[name].shape[-3]
        if count % inner:
            raise ValueError(f"{name}: expected a multiple of the {inner} ranks of ulysses_group, got {count} heads")
        if scheme == "ulysses" and count % size:
            raise ValueError(f"{name}: scheme 'ulysses' expects a multiple of {size} heads, got {count}")


def _check_whole(arguments: dict[str, Any], lead: list[int], q_lens: list[int], kv_lens: list[int]) -> None:
    """What depends on the lengths of all shards: the same on every rank, and so is what it raises."""
    heads, order, mask = (arguments[name] for name in ("ulysses_group", "order", "attn_mask"))
    inner = 1 if heads is None else dist.get_world_size(heads)
    for name, lengths in (("query", q_lens), ("key", kv_lens)):
        check_lengths(order, name, [n * inner for n in lengths])
    rows, keys, lengths = sum(q_lens) * inner, sum(kv_lens) * inner, arguments["key_lengths"]
    if lengths is not None and not lengths.is_cuda and not all(0 <= n <= keys for n in lengths.tolist()):
        raise ValueError(f"key_lengths: expected numbers from 0 to {keys}, got {lengths.tolist()}")
    if arguments["cu_seqlens"] is not None:
        _check_documents(arguments, q_lens, kv_lens, keys)
    if isinstance(mask, Tensor) and mask.shape[-1] not in (1, keys):
        raise ValueError(f"attn_mask: expected {keys} keys or 1, those of the whole, got shape {tuple(mask.shape)}")
    if isinstance(mask, BlockMask):
        if mask.shape[2:] != (rows, keys):
            raise ValueError(
                f"attn_mask: expected a BlockMask of the whole, {rows} rows and {keys} keys, got {tuple(mask.shape)}"
            )
        if arguments["scheme"] != "ulysses":
            _check_blocks(mask, order, [[n * inner for n in lengths] for lengths in (q_lens, kv_lens)])


def _check_blocks(mask: BlockMask, order: str, lengths: list[list[int]]) -> None:
    for of_ranks in lengths:
        for rank in range(len(of_ranks)):
            for start, rows in chunks(order, of_ranks, rank):
                if rows and start % mask.block_size:
                    raise ValueError(
                        f"attn_mask: expected a BlockMask whose block size divides where shards begin, got "
                        f"{mask.block_size} and {start} (scheme 'ulysses' takes any)"
                    )


def _check_documents(arguments: dict[str, Any], q_lens: list[int], kv_lens: list[int], most: int) -> None:
    ends: list[int] = arguments["cu_seqlens"].tolist()
    beside = {
        "key_lengths": arguments["key_lengths"] is not None,
        "scheme 'ulysses'": arguments["scheme"] == "ulysses",
        "a BlockMask": isinstance(arguments["attn_mask"], BlockMask),
    }
    for given, there in beside.items():
        if there:
            raise ValueError(f"cu_seqlens: expected None beside {given}, got {ends}")
    if q_lens != kv_lens:
        raise ValueError(f"key: expected as many keys as rows beside cu_seqlens, {q_lens} on the ranks, got {kv_lens}")
    if not ends or ends[0] != 0 or ends[-1] > most or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens: expected numbers that rise from 0 to at most {most}, got {ends}")


def _check_mask(arguments: dict[str, Any], lead: list[int]) -> None:
    """A tensor of this rank's rows, the number of keys apart, or a mask of blocks."""
    mask, query = arguments["attn_mask"], arguments["query"]
    if isinstance(mask, BlockMask):
        batch, heads = mask.shape[:2]
        items = math.prod(lead[:-1])
        if batch not in (1, items) or heads not in (1, lead[-1]):
            raise ValueError(
                f"attn_mask: expected a BlockMask of {items} batch items or 1 and {lead[-1]} heads or 1, got "
                f"{tuple(mask.shape)}"
            )
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor or a BlockMask, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"attn_mask: expected dtype torch.bool, torch.float32 or {query.dtype}, got {mask.dtype}")
    want = [*lead, query.shape[-2]]
    rest = mask.shape[:-1]
    if not 2 <= mask.dim() <= len(want) + 1 or not all(n in (1, w) for n, w in zip(reversed(rest), reversed(want))):
        raise ValueError(
            f"attn_mask: expected a shape of 2 dimensions or more that broadcasts to {tuple(want)} and all keys, "
            f"this rank's rows, got {tuple(mask.shape)}"
        )
