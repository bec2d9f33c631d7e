"""Weights of long sequences a block of rows at a time: what attention_maps and head_summary are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops._attention_checks import alignment_index
from ...ops.attention_weights import chosen_weights, row_sums

BLOCK_ELEMENTS = 1 << 18  # of weights at once: 1 MiB in float32


class WeightBlocks:
    """The weights of one call of attention, head after head, in blocks of query rows; never (q_len, kv_len) at once.

    Iterating gives (head, first_row, weights): head counts within `heads`, weights are (*batch, rows, kv_len) in
    query's dtype. The sums of the rows are computed once, when the object is made; what attention
    raises is raised then.
    """

    def __init__(
        self, query: Tensor, key: Tensor, *args: Any, heads: Sequence[int] | Tensor | None = None, **options: Any
    ):
        self.options = bind(*args, **options)
        self.query, self.key = query.detach(), key.detach()
        self.q_len, self.kv_len = query.shape[-2], key.shape[-2]
        options = dict(self.options)
        self.mask, self.is_causal = options.pop("attn_mask"), options.pop("is_causal")
        options["causal_alignment"] = alignment_index(options.get("causal_alignment", "top_left"))
        self.of_operator = options
        self.sums = row_sums(self.query, self.key, self.mask, self.is_causal, options)
        rows = self.sums[0].shape  # (*batch, heads, q_len)
        n_heads = rows[-2] if query.dim() >= 3 else 1
        self.heads = list(range(n_heads)) if heads is None else torch.as_tensor(heads).tolist()
        self.batch = tuple(rows[:-2])
        self.device = query.device

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        rows_at_once = max(1, BLOCK_ELEMENTS // max(1, self.batch_size * self.kv_len))
        for index, head in enumerate(self.heads):
            for first in range(0, self.q_len, rows_at_once):
                rows = torch.arange(first, min(first + rows_at_once, self.q_len))
                weights = chosen_weights(
                    self.query, self.key, self.mask, self.is_causal, self.of_operator, *self.sums, rows, [head]
                )  # (*batch, 1, rows, kv_len), or (rows, kv_len) where query has no heads
                yield index, first, weights.squeeze(-3) if self.query.dim() >= 3 else weights

    @property
    def batch_size(self) -> int:
        return torch.Size(self.batch).numel()

    def positions(self, first: int, rows: int) -> Tensor:
        """Where query rows stand among the keys, (rows,) or (*batch, rows): row i at i; with bottom_right at i + the
        number of keys - the number of queries, each sequence's own."""
        at = torch.arange(first, first + rows, device=self.device)
        if self.options.get("causal_alignment") != "bottom_right":
            return at
        shift: Tensor | int = 0
        for name, length, sign in (("key_lengths", self.kv_len, 1), ("query_lengths", self.q_len, -1)):
            given = self.options.get(name)
            shift = shift + sign * (length if given is None else given.long().view(*self.batch, 1))
        return at + shift


def bind(attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any) -> dict:
    """The options of attention_weights after query and key, by name."""
    for name in ("lse", "rows"):
        if name in options:
            raise TypeError(f"{name}: not an argument here: all rows are read, and lse is computed")
    return {"attn_mask": attn_mask, "is_causal": is_causal, **options}
