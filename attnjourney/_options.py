"""The options of the attention functions as types, each named once: `**options: Unpack[AttentionOptions]`."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class ScoreOptions(TypedDict, total=False):
    """Which keys a row sees, and what is done to a score before the softmax."""

    scale: float | None
    window_size: tuple[int, int] | None
    prefix_length: int
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None


class DecodeOptions(ScoreOptions, total=False):
    """Of attnjourney.decode and mla_decode."""

    is_causal: bool
    attn_mask: Tensor | None


class VarlenOptions(ScoreOptions, total=False):
    """Of attnjourney.varlen_attention."""

    causal_alignment: str
    dropout_seed: Tensor | None


class AttentionOptions(VarlenOptions, total=False):
    """Of attnjourney.attention."""

    enable_gqa: bool
    key_lengths: Tensor | None
    query_lengths: Tensor | None
