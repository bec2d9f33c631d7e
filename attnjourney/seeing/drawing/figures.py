"""PNG pictures by matplotlib: a heat map per layer and head, and what each head does. No window, no global state."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..recording import Record
from ._layers import Layer, Weights, as_layer, as_layers, numbers
from .maps import AttentionMaps
from .summary import COLUMNS, HeadSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAMP = ("#ffffff", "#d3e3f6", "#8fbbe8", "#3f84d0", "#14509c", "#08234f")  # of the page, too: from no weight to all
INK, MUTED, RULE = "#1d2329", "#59636e", "#c9d0d8"
MAX_TOKEN_LABELS = 48
STYLE = {"font.size": 9, "axes.edgecolor": RULE, "axes.linewidth": 0.6, "text.color": INK}
STYLE |= {"xtick.color": MUTED, "ytick.color": MUTED, "axes.labelcolor": INK, "axes.titlecolor": INK}


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("the pictures are drawn with matplotlib: pip install 'attnjourney[viz]'") from error
    return matplotlib


def heatmap(
    maps: AttentionMaps | Weights | Sequence[AttentionMaps],
    path: str | os.PathLike | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    title: str | None = None,
    color_scale: str = "sqrt",
) -> Figure:
    """A heat map per layer (downwards) and head (across), all with one colour scale; one layer alone is wrapped.

    Args:
        maps: AttentionMaps of one sequence, a record of attnjourney.capture, or weights (heads, q_len, kv_len); of
            several layers: a sequence of those, all that was captured, or weights (layers, heads, q_len, kv_len).
            Layers may differ in heads.
        path: where to write the picture (PNG, or what the name's suffix says).
        layers, heads: the numbers in the titles; 0, 1, ... by default, or those that maps and records know.
        tokens: of a sequence that attends to itself: labels for both axes, drawn up to 48 of them.
        title: above it all.
        color_scale: "sqrt" shows small weights, too; "linear".

    Returns the matplotlib.figure.Figure.

    Raises ImportError without matplotlib, ValueError for shapes, labels of another number and color_scale.
    """
    matplotlib = _matplotlib()
    if color_scale not in ("sqrt", "linear"):
        raise ValueError(f"color_scale: expected 'sqrt' or 'linear', got {color_scale!r}")
    rows = _as_maps(maps)
    if not rows or not all(m.values.shape[0] for m in rows):
        raise ValueError("maps: expected at least one layer of at least one head, got none")
    known = layers is not None or len(rows) > 1
    layers = numbers("layers", layers, len(rows), range(len(rows)))
    named = [numbers("heads", heads, len(m.heads), m.heads) for m in rows]
    for m in rows:
        if tokens is not None and not len(tokens) == m.q_len == m.kv_len:
            raise ValueError(
                f"tokens: expected {m.q_len} = {m.kv_len} of them, for queries and keys, got {len(tokens)}"
            )

    grid = _Grid([len(m.heads) for m in rows], title is not None)
    peak = max((m.values.max().item() for m in rows if m.values.numel()), default=0.0) or 1.0
    cmap = matplotlib.colors.LinearSegmentedColormap.from_list("attnjourney", RAMP)
    norm = matplotlib.colors.PowerNorm(0.5 if color_scale == "sqrt" else 1.0, 0.0, peak)
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(grid.width, grid.height))
        for i, m in enumerate(rows):
            for j, head in enumerate(named[i]):
                row, col = grid.place(i, j)
                axes = figure.add_axes(grid.box(row, col))
                extent = (0, m.kv_len, m.q_len, 0)
                image = axes.imshow(m.values[j].tolist(), cmap=cmap, norm=norm, aspect="auto", extent=extent)
                bottom = row == grid.n_rows - 1 or (grid.wrapped and j + grid.n_cols >= len(m.heads))
                _ticks(axes, m, tokens, grid, show_x=bottom, show_y=col == 0)
                alone = grid.single or (grid.wrapped and j == 0)  # the one place for the layer's number
                if grid.wrapped or row == 0 or named[i][j : j + 1] != named[0][j : j + 1]:
                    axes.set_title(
                        f"layer {layers[0]}, head {head}" if alone and known else f"head {head}", fontsize=9, pad=4
                    )
                if col == 0 and known and not grid.wrapped and not grid.single:
                    axes.set_ylabel(f"layer {layers[i]}", fontsize=9)
        figure.text(*grid.at(grid.middle_x, 0.14), "key (looked at)", ha="center", color=MUTED)
        figure.text(*grid.at(0.12, grid.middle_y), "query (looks)", va="center", rotation=90, color=MUTED)
        if title:
            figure.text(*grid.at(grid.left, grid.height - 0.28), title, fontsize=12, va="center")
        bar = figure.add_axes(grid.bar())
        figure.colorbar(image, cax=bar, label=_meaning(rows[0])).outline.set_visible(False)
        bar.tick_params(length=2)
        if path is not None:
            cells = max(max(m.values.shape[-2:]) for m in rows)
            figure.savefig(path, dpi=min(300, max(120, math.ceil(cells / grid.inches))))
    return figure


class _Grid:
    """Where everything is, in inches from the lower left: a row of panels per layer, or one layer's wrapped."""

    right, bottom = 0.95, 0.6  # for the colour bar and the labels

    def __init__(self, heads: list[int], title: bool):
        self.wrapped = len(heads) == 1 and heads[0] > 4
        self.n_cols = math.ceil(math.sqrt(heads[0])) if self.wrapped else max(heads)
        self.n_rows = math.ceil(heads[0] / self.n_cols) if self.wrapped else len(heads)
        self.single = self.n_rows * self.n_cols == 1
        self.inches = 5.2 if self.single else 2.3 if self.n_rows * self.n_cols <= 24 else 1.25  # of a panel
        self.left, self.top = 0.6 if self.single else 0.75, 0.75 if title else 0.45
        self.gap = 0.16 if self.inches > 2 else 0.09
        self.gap_down = self.gap + (0.2 if self.wrapped else 0.0)  # room for titles
        self.width = self.left + self.n_cols * (self.inches + self.gap) - self.gap + self.right
        self.height = self.top + self.n_rows * (self.inches + self.gap_down) - self.gap_down + self.bottom
        self.middle_x = (self.left + self.width - self.right) / 2
        self.middle_y = (self.bottom + self.height - self.top) / 2

    def place(self, layer: int, head: int) -> tuple[int, int]:
        return divmod(head, self.n_cols) if self.wrapped else (layer, head)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """As parts of the figure, which is what matplotlib takes."""
        return x / self.width, y / self.height

    def box(self, row: int, col: int) -> tuple[float, float, float, float]:
        """(x, y, width, height) of a panel."""
        y = self.height - self.top - row * (self.inches + self.gap_down) - self.inches
        return *self.at(self.left + col * (self.inches + self.gap), y), *self.at(self.inches, self.inches)

    def bar(self) -> tuple[float, float, float, float]:
        length = min(2.6, self.n_rows * self.inches)
        return *self.at(self.width - 0.78, self.middle_y - length / 2), *self.at(0.12, length)


def summary_figure(summary: HeadSummary, path: str | os.PathLike | None = None, *, title: str | None = None) -> Figure:
    """A dot per head for each number of a HeadSummary: a line per head where they are few, else a line per layer.

    Returns the matplotlib.figure.Figure; writes it to `path`. Raises ImportError without matplotlib, ValueError for a
    summary without rows.
    """
    matplotlib = _matplotlib()
    if not summary.rows:
        raise ValueError("summary: expected at least one head, got none")
    by_head = len(summary.rows) <= 32
    layers = sorted({row.layer for row in summary.rows})
    keys: list[Any] = [(row.layer, row.head) for row in summary.rows] if by_head else list(layers)
    lines = [keys.index((row.layer, row.head) if by_head else row.layer) for row in summary.rows]
    with matplotlib.rc_context(STYLE):
        height = 0.95 + 0.24 * len(keys) + (0.3 if title else 0)
        figure = matplotlib.figure.Figure(figsize=(9.5, height))
        panels = figure.subplots(1, len(COLUMNS), sharey=True)
        for axes, (name, (header, form)) in zip(panels, COLUMNS.items()):
            values = [getattr(row, name) for row in summary.rows]
            if by_head:
                axes.hlines(lines, 0, values, color=RAMP[1], linewidth=2.2)
            axes.scatter(values, lines, s=22, color=RAMP[4], alpha=1 if by_head else 0.55, linewidths=0, zorder=3)
            axes.set_title(header, fontsize=9)
            share = form.endswith("%}")
            finite = [value for value in values if math.isfinite(value)]
            axes.set_xlim(0, 1.03 if share else 1.08 * max([*finite, 1e-9]))
            if share:
                axes.set_xticks((0, 0.5, 1), ("0", "50 %", "100 %"))
            else:
                axes.locator_params(axis="x", nbins=3)
            axes.tick_params(length=0)
            axes.grid(axis="x", color=RULE, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[:].set_visible(False)
        labels = [f"layer {layer}, head {head}" for layer, head in keys] if by_head else [f"layer {n}" for n in keys]
        panels[0].set_yticks(range(len(keys)), labels)
        panels[0].set_ylim(len(keys) - 0.4, -0.6)
        if title:
            figure.text(0.01, 1 - 0.2 / height, title, fontsize=12, va="center")
        figure.tight_layout(rect=(0, 0, 1, 1 - (0.3 if title else 0) / height), w_pad=1.6)
        if path is not None:
            figure.savefig(path, dpi=140)
    return figure


def _as_maps(maps: Any) -> list[AttentionMaps]:
    """Layers of one sequence: values (heads, rows, cols)."""
    if isinstance(maps, AttentionMaps):
        maps = [maps]
    elif isinstance(maps, (Tensor, Record)):
        maps = as_layers(maps)
    return [m.of_one_sequence() if isinstance(m, AttentionMaps) else _of_weights(m) for m in maps]


def _of_weights(layer: Layer | Tensor | Record) -> AttentionMaps:
    layer = layer if isinstance(layer, Layer) else as_layer(layer)
    weights = layer.of_one_sequence()
    q_len, kv_len = weights.shape[1:]
    return AttentionMaps(weights.float(), tuple(layer.heads), q_len, kv_len, (1, 1), "mean")


def _ticks(
    axes: Any, maps: AttentionMaps, tokens: Sequence[str] | None, grid: _Grid, *, show_x: bool, show_y: bool
) -> None:
    if tokens is not None and len(tokens) <= MAX_TOKEN_LABELS:
        size = max(3.0, min(9.0, 52 * grid.inches / len(tokens)))
        at = [i + 0.5 for i in range(len(tokens))]
        style = {"fontsize": size, "family": "monospace"}
        labels = [str(token).replace("$", r"\$") for token in tokens]
        axes.set_xticks(at, labels if show_x else [], rotation=90 if max(map(len, labels)) > 1 else 0, **style)
        axes.set_yticks(at, labels if show_y else [], **style)
    else:
        axes.locator_params(nbins=4 if grid.inches > 2 else 2, integer=True)
        if not grid.single:  # the last number would run into the neighbour's first
            axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick < 0.95 * maps.kv_len])
            axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick < 0.95 * maps.q_len])
        if not show_x:
            axes.set_xticklabels([])
        if not show_y:
            axes.set_yticklabels([])
        axes.tick_params(labelsize=7.5)
    axes.tick_params(length=0, pad=2)


def _meaning(maps: AttentionMaps) -> str:
    """What a colour stands for."""
    rows, keys = maps.tile
    if (rows, keys) == (1, 1):
        return "attention weight"
    tile = f"{keys} keys" if rows == keys else f"{rows} x {keys}"
    return {
        "share": f"share of attention, tiles of {tile}",
        "mean": f"mean weight, tiles of {tile}",
        "max": f"largest weight, tiles of {tile}",
    }[maps.pool]
