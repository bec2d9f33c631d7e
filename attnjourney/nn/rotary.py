"""Rotary position embedding of the modules: their `rope` argument read, the tables it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..positions import check_position_ids, rope_frequencies, rope_tables, yarn_mscale

Tables = tuple[Tensor, Tensor] | tuple[None, None]  # cos and sin; None: nothing is turned


class Rotary:
    """The `rope` argument of a module, read: what turns its queries and keys.

    rope: None (no rotation), the base theta, or a dict with "method" and the parameters of
    attnjourney.rope_frequencies, "theta" (10000.0) and "rotary_dim" (all numbers of a head).
    """

    def __init__(self, rope: float | dict | None, head_dim: int):
        self.rope = rope
        parameters: dict[str, Any] = {}
        if rope is not None:
            parameters = dict(rope) if isinstance(rope, dict) else {"theta": rope}
        self.method = parameters.pop("method", "default")
        self.theta = float(parameters.pop("theta", 10000.0))
        self.rotary_dim = parameters.pop("rotary_dim", head_dim)
        self.parameters = parameters
        if rope is None:
            return
        if self.rotary_dim > head_dim:
            raise ValueError(f"rope: expected a rotary_dim of at most {head_dim}, got {self.rotary_dim}")
        self.inv_freq, self.attention_factor = self._frequencies()

    def _frequencies(self, **parameters: Any) -> tuple[Tensor, float]:
        return rope_frequencies(self.method, self.rotary_dim, self.theta, **self.parameters, **parameters)

    @property
    def score_scale(self) -> float:
        """The factor of the scores that goes with mscale_all_dim in DeepSeek's use of YaRN."""
        mscale = self.parameters.get("mscale_all_dim") or 0.0
        return yarn_mscale(self.parameters["factor"], mscale) ** 2 if self.method == "yarn" and mscale else 1.0

    def check_cache(self) -> None:
        """ValueError where keys in a cache would have been turned by other frequencies than those that follow."""
        if self.rope is not None and self.method in ("dynamic", "longrope") and "seq_len" not in self.parameters:
            raise ValueError(
                f"rope: expected a seq_len beside method {self.method!r} and a cache, whose keys stay as they were "
                "turned while the frequencies change with the length; got none"
            )

    def tables(self, x: Tensor, position_ids: Tensor | None, seq: int | None = None) -> Tables:
        """cos, sin ([batch,] seq, rotary_dim / 2) for the positions of x (batch, seq, embed), made anew in every call:
        a kept table would be wrong after a change of dtype, device, or inference mode."""
        if self.rope is None:
            return None, None
        seq = x.shape[1] if seq is None else seq
        if position_ids is None:
            position_ids = torch.arange(seq, device=x.device)
            longest = seq
        else:
            check_position_ids(position_ids, x.shape[0], seq)
            longest = None
        inv_freq, factor = self.inv_freq, self.attention_factor
        if self.method in ("dynamic", "longrope") and "seq_len" not in self.parameters:
            if longest is None:
                longest = int(position_ids.max()) + 1 if position_ids.numel() else 0
            inv_freq, factor = self._frequencies(seq_len=longest)
        dtype = accumulation_dtype(x.dtype)
        return rope_tables(inv_freq, position_ids, factor, dtype)


def rotate(x: Tensor, tables: Tables, interleaved: bool = False) -> Tensor:
    """x (batch, heads, seq, dim), turned where there are tables."""
    cos, sin = tables
    return x if cos is None else torch.ops.attnjourney.rope(x, cos, sin, interleaved=interleaved)
