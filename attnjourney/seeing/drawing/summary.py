"""What a head does, in five numbers, from weights that need not fit in memory at once."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ._blocks import BLOCK_ELEMENTS, WeightBlocks
from ._layers import Weights, as_layers, numbers, whole_numbers


@dataclass(frozen=True)
class HeadStats:
    """Means over the query rows that see a key; NaN where no row counts.

    entropy: in bits; a learned sink is one more thing to attend to. 0: one key gets all.
    distance: |position of the query - position of the key|, in tokens, weighted.
    sink_mass: weight on the first key (or first few, see sink_keys), by the rows behind them.
    previous_mass: weight on the key just before the query.
    self_mass: weight on the query's own position.
    """

    layer: int
    head: int
    entropy: float
    distance: float
    sink_mass: float
    previous_mass: float
    self_mass: float


COLUMNS = {  # header, digits
    "entropy": ("entropy (bits)", "{:.2f}"),
    "distance": ("mean distance", "{:.1f}"),
    "sink_mass": ("first key", "{:.1%}"),
    "previous_mass": ("previous key", "{:.1%}"),
    "self_mass": ("itself", "{:.1%}"),
}


@dataclass(frozen=True)
class HeadSummary:
    """Rows of HeadStats. Print it, with rich or `print`, for a table; `as_dicts()` for programs; `a + b` joins two."""

    rows: tuple[HeadStats, ...]

    def __add__(self, other: HeadSummary) -> HeadSummary:
        return HeadSummary(self.rows + other.rows)

    def as_dicts(self) -> list[dict]:
        return [asdict(row) for row in self.rows]

    def __rich__(self):
        try:
            from rich.table import Table
        except ImportError as error:
            raise ImportError("a HeadSummary is printed with rich: pip install 'attnjourney[viz]'") from error

        table = Table(title="attention heads")
        for header in ("layer", "head", *(header for header, _ in COLUMNS.values())):
            table.add_column(header, justify="right")
        for row in self.rows:
            cells = (form.format(getattr(row, name)) for name, (_, form) in COLUMNS.items())
            table.add_row(str(row.layer), str(row.head), *cells)
        return table

    def __str__(self) -> str:
        table = self.__rich__()
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=100).print(table)
        return out.getvalue().rstrip("\n")


def head_summary(
    query: Tensor,
    key: Tensor,
    *args: Any,
    layer: int = 0,
    sink_keys: int = 1,
    heads: Sequence[int] | Tensor | None = None,
    **options: Any,
) -> HeadSummary:
    """Entropy, mean distance and where the weight goes, for each head of one call of attention, over all batch entries.

    Args:
        query, key, args, options: as in attention_maps; the memory, too.
        layer: what the rows of the table say.
        sink_keys: how many of the first keys count for sink_mass.
        heads: the query heads wanted, all by default.

    Raises ValueError for sink_keys, otherwise what attnjourney.attention_weights raises.
    """
    _check_sink_keys(sink_keys)
    blocks = WeightBlocks(query, key, *args, heads=heads, **options)
    sums = _Sums(len(blocks.heads), sink_keys)
    for head, first, weights in blocks:
        sums.add(head, weights[None], blocks.positions(first, weights.shape[-2]))
    return sums.summary(layer, blocks.heads)


def weights_summary(
    weights: Weights,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[Sequence[int]] | None = None,
    sink_keys: int = 1,
) -> HeadSummary:
    """The same from weights that are there already, over all batch entries; query i stands at key i.

    Args:
        weights: what attnjourney.capture recorded, or tensors: (heads, q_len, kv_len), (layers, heads, q_len, kv_len),
            or a sequence of (*batch, heads, q_len, kv_len), one for each layer.
        layers: their numbers; 0, 1, ... by default.
        heads: for each layer the numbers of its heads; those recorded, or 0, 1, ..., by default.

    Raises ValueError for shapes, for numbers of labels and for sink_keys; TypeError for what holds no weights
    and for what is no number.
    """
    _check_sink_keys(sink_keys)
    found = as_layers(weights)
    layers = whole_numbers("layers", layers, len(found), range(len(found)))
    heads = numbers("heads", heads, len(found), [layer.heads for layer in found])
    summary = HeadSummary(())
    for layer, number, names in zip(found, layers, heads):
        names = whole_numbers("heads", names, len(layer.heads), ())
        weights = layer.weights.movedim(-3, 0)  # (heads, *batch, q_len, kv_len)
        positions = torch.arange(weights.shape[-2], device=weights.device)
        sums = _Sums(len(names), sink_keys)
        at_once = max(1, 16 * BLOCK_ELEMENTS * len(names) // max(1, weights.numel()))
        for first in range(0, len(names), at_once):
            sums.add(first, weights[first : first + at_once], positions)
        summary += sums.summary(number, names)
    return summary


def _check_sink_keys(sink_keys: int) -> None:
    if sink_keys < 1:
        raise ValueError(f"sink_keys: expected at least 1, got {sink_keys}")


class _Sums:
    """Sums over the rows of each head, and how many rows went into each."""

    def __init__(self, heads: int, sink_keys: int):
        self.sink_keys = sink_keys
        self.sums = {name: torch.zeros(heads, dtype=torch.float64) for name in COLUMNS}
        self.counts = {name: torch.zeros(heads, dtype=torch.int64) for name in COLUMNS}

    def add(self, first: int, weights: Tensor, positions: Tensor) -> None:
        """Some rows of the heads from `first` on.

        weights: (heads, *batch, rows, kv_len). positions: (rows,) or (*batch, rows).
        """
        if weights.shape[-2] == 0:
            return
        w = weights.detach().double() if weights.dtype == torch.float64 else weights.detach().float()
        kv_len = w.shape[-1]
        total = w.sum(-1)  # (heads, *batch, rows)
        sees = total > 0
        to_sink = (1 - total).clamp(min=0)  # rounding aside, the share of a learned sink
        to_sink = torch.where(to_sink > 1e-2 if weights.dtype.itemsize == 2 else to_sink > 1e-5, to_sink, 0.0)
        of_keys = w.clamp_min(torch.finfo(w.dtype).tiny).log_().mul_(w).sum(-1)  # 0 log 0 = 0; 3 times as fast as entr
        entropy = (torch.special.entr(to_sink) - of_keys) / math.log(2)
        keys = torch.arange(kv_len, device=w.device, dtype=w.dtype)
        distance = (positions[..., None].to(w.dtype) - keys).abs_().mul(w).sum(-1) / total
        self._count(first, "entropy", entropy, sees)
        self._count(first, "distance", distance, sees)
        self._count(first, "sink_mass", w[..., : self.sink_keys].sum(-1), sees & (positions >= self.sink_keys))
        for name, back in (("previous_mass", 1), ("self_mass", 0)):
            at = positions - back
            there = (at >= 0) & (at < kv_len)
            index = at.clamp(0, max(0, kv_len - 1)).expand(total.shape)[..., None]
            taken = w.gather(-1, index)[..., 0] if kv_len else torch.zeros_like(total)
            self._count(first, name, taken, sees & there)

    def _count(self, first: int, name: str, values: Tensor, where: Tensor) -> None:
        heads = slice(first, first + len(values))
        self.sums[name][heads] += torch.where(where, values, 0).flatten(1).sum(1, dtype=torch.float64).cpu()
        self.counts[name][heads] += where.flatten(1).sum(1).cpu()

    def summary(self, layer: int, heads: Sequence[int]) -> HeadSummary:
        means = {name: (self.sums[name] / self.counts[name]).tolist() for name in COLUMNS}  # 0 / 0 is NaN
        each = (dict(zip(means, values)) for values in zip(*means.values()))  # a head's numbers by name
        return HeadSummary(tuple(HeadStats(layer, head, **values) for head, values in zip(heads, each)))
