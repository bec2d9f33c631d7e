"""Attention over packed sequences of different lengths: torch.ops.attnjourney.varlen_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ._attention_checks import alignment_index, check_sequences
from ._registry.fakes import empty_lse, empty_stats
from ._registry.operator import seed_for
from ._registry.registration import register
from .attention import UNBOUNDED
from .paged_attention import paged_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import VarlenOptions


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = ...,
    is_causal: bool = ..., *, block_table: Tensor | None = ..., return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = ...,
    is_causal: bool = ..., *, block_table: Tensor | None = ..., return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    block_table: Tensor | None = None,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] | None = UNBOUNDED,
    prefix_length: int = 0,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.attention for each of B sequences that lie packed one after the other, without padding.

    Args:
        query: (total_q, Hq, E). float32, float64, bfloat16 or float16.
        key, value: (total_k, Hk, E) and (total_k, Hk, Ev); Hq is a multiple of Hk.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64: sequence b has the rows cu_seqlens_q[b] ..
            cu_seqlens_q[b + 1] - 1, and its keys likewise. They begin with 0; a sequence may be empty. On CUDA they are
            not checked, which would wait for the device: a number that falls or does not fit the tensors counts as
            the nearest that does.
        block_table: (B, max_blocks) int32: key and value are then paged caches, (num_blocks, Hk, block_size, E) and
            (..., Ev), as of attnjourney.decode and PagedKVCache. Key j of sequence b is row j % block_size of block
            block_table[b, j // block_size], and cu_seqlens_k counts the keys that each sequence has there: query
            rows of any length, one of them or a prompt's next thousand, read the caches in place, in one call. For
            rows that are the last of their sequences causal_alignment is "bottom_right". No dropout, no gradient.
        sinks, alibi_slopes: (Hq,) or (B, Hq).
        max_seqlen_q, max_seqlen_k: taken, and not needed: the lengths say it.
        the others: as in attnjourney.attention; alignment, window and prefix are each sequence's own. There is no
            attn_mask.

    Returns:
        (total_q, Hq, Ev); rows past cu_seqlens_q[-1] are 0. With return_lse also (Hq, total_q), float32 (float64 for
        float64), -inf where a row sees no key.

    Raises: as attnjourney.attention; beside a block_table as attnjourney.decode.
    """
    options: dict[str, Any] = dict(
        scale=scale,
        causal_alignment=alignment_index(causal_alignment),
        window_size=UNBOUNDED if window_size is None else window_size,
        prefix_length=prefix_length,
        softcap=softcap or 0.0,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    if block_table is not None:
        if dropout_p != 0:
            raise ValueError(f"dropout_p: expected 0 beside a block_table, got {dropout_p}")
        out, lse = paged_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, is_causal, **options)
        return (out, lse) if return_lse else out
    options["dropout_seed"] = seed_for(query, dropout_p, dropout_seed)
    if not return_lse:
        return _varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_p, is_causal, **options)
    return torch.ops.attnjourney.varlen_attention_forward.default(
        query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_p, is_causal, **options
    )[:2]


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float | None,
    window_size: Sequence[int], softcap: float, sinks: Tensor | None, alibi_slopes: Tensor | None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 3:
            raise ValueError(f"{name}: expected 3 dimensions, got shape {tuple(t.shape)}")
    check_sequences(query, cu_seqlens_q, cu_seqlens_k, scale, window_size, softcap, sinks, alibi_slopes)
    heads = query.shape[1]
    out = query.new_empty((query.shape[0], heads, value.shape[2]))
    return out, empty_lse(query, heads, query.shape[0]), empty_stats(query, heads, query.shape[0])


def _one_call_a_sample(info: Any, in_dims: tuple, *arguments: Any) -> None:
    return None


_varlen_attention = register(
    "varlen_attention",
    fake=_fake,
    vmap=(_one_call_a_sample,) * 4,
    autocast=("query", "key", "value"),
)
