"""What the layers share when they run over a cache: which of the new tokens are real, and where they stand."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import Cache


class NewTokens:
    """The new tokens of a layer's input x (batch, seq, width), those of the padding moved to the front.

    A cache takes the last tokens of a row, so that padding on the left needs nothing, and padding anywhere else is
    brought there.

    Attributes:
        x: x in that order.
        counts: (batch,) int64, real tokens of each row; None: all.
        positions: (batch, seq), where each token stands in its sequence; 0 in the padding.
    """

    def __init__(self, cache: Cache, x: Tensor, key_padding_mask: Tensor | None, position_ids: Tensor | None = None):
        batch, seq = x.shape[:2]
        check_batch(cache, batch)
        self.x, self.counts, self.order = x, None, None
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool:
                raise RuntimeError(
                    f"key_padding_mask: expected dtype torch.bool beside a cache, which keeps no numbers of it, "
                    f"got {key_padding_mask.dtype}"
                )
            if key_padding_mask.shape != (batch, seq):
                shape = tuple(key_padding_mask.shape)
                raise ValueError(f"key_padding_mask: expected shape ({batch}, {seq}), got {shape}")
            real = ~key_padding_mask
            self.order = torch.argsort(real.to(torch.uint8), dim=1, stable=True)  # (batch, seq)
            self.counts = real.sum(1)
            self.x = self.sort(x)
        if position_ids is not None:
            self.positions = position_ids
            if self.order is not None:
                self.positions = position_ids.expand(batch, seq).gather(1, self.order)
        else:
            first = cache.lengths if self.counts is None else cache.lengths + self.counts - seq
            self.positions = (first[:, None] + torch.arange(seq, device=x.device)).clamp(min=0)

    def sort(self, x: Tensor) -> Tensor:
        """x (batch, seq, width) in the order of the tokens."""
        return x if self.order is None else x.gather(1, self.order.unsqueeze(-1).expand(-1, -1, x.shape[2]))

    def restore(self, out: Tensor) -> Tensor:
        """out (batch, seq, width) in the order of the input."""
        if self.order is None:
            return out
        return out.gather(1, self.order.argsort(1).unsqueeze(-1).expand(-1, -1, out.shape[2]))


def check_batch(cache: Cache, batch: int) -> None:
    if cache.lengths.shape[0] != batch:
        raise ValueError(f"cache: expected one of the batch size of the input, {batch}, got {cache.lengths.shape[0]}")


def check_cache(cache: Cache, kind: type | tuple[type, ...], dropout_p: float = 0.0) -> None:
    """A cache of that kind; no dropout: what was dropped would not be what the next step sees."""
    if not isinstance(cache, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(k.__name__ for k in kinds)
        raise TypeError(f"cache: expected a {names}, got {type(cache).__name__}")
    if dropout_p > 0:
        raise ValueError(
            f"cache: expected a layer in evaluation or without dropout beside one, got dropout {dropout_p}"
        )
