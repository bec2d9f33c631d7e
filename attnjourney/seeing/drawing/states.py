"""The picture of a state layer: what weight each value still has, and how fast each head forgets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..recording import StateRecord
from .figures import MUTED, RAMP, RULE, STYLE, _matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNED = ("#7a2e05", "#e08a4c", *RAMP[:1], RAMP[3], RAMP[5])  # below 0, none, above


def state_figure(
    record: StateRecord, path: str | os.PathLike | None = None, *, sequence: int = 0, title: str | None = None
) -> Figure:
    """A column for each head: above, the weight of each past value in each output, where the record has weights; below,
    the half-life of the state at each token, where the layer has gates.

    Colours are on one scale, of the square root of a weight, so that small ones show; weights below 0 are orange. A
    half-life that differs by channel is drawn as its median and the band from the shortest to the longest. It is drawn
    from 0.1 tokens to ten times the length, what lies beyond at the edge.

    Args:
        record: of attnjourney.capture, one of its `states`; for weights with state_weights=True and all rows.
        path: where to write the picture (PNG, or what the name's suffix says).
        sequence: which of the batch.
        title: above it all.

    Returns the matplotlib.figure.Figure.

    Raises ImportError without matplotlib, TypeError for another kind of record, ValueError for one without weights and
    gates, with some rows only, without heads, or without that sequence.
    """
    matplotlib = _matplotlib()
    if not isinstance(record, StateRecord):
        raise TypeError(f"record: expected a StateRecord of attnjourney.capture, got {type(record).__name__}")
    weights, half_life = _of(record, record.weights, sequence), _of(record, record.half_life, sequence)
    heads = record.heads.tolist()
    if not heads or (weights is None and half_life is None):
        raise ValueError(
            f"record: expected heads, and weights (capture with state_weights=True) or gates, got {record!r}"
        )
    if weights is not None and record.rows.tolist() != list(range(weights.shape[-1])):
        raise ValueError(f"record: expected weights of all rows from 0, got rows {record.rows.tolist()}")

    heights = [2.3] * (weights is not None) + [1.3] * (half_life is not None)
    with matplotlib.rc_context(STYLE):
        size = (1.3 + 2.3 * len(heads), 0.5 + sum(heights) + (0.3 if title else 0))
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(heights), len(heads), squeeze=False, sharey="row", height_ratios=heights)
        for axes, head in zip(panels[0], heads):
            axes.set_title(f"head {head}", fontsize=9, pad=4)
        if weights is not None:
            _weights(matplotlib, figure, panels[0], weights)
        if half_life is not None:
            _half_life(panels[-1], half_life)
        if title:
            figure.suptitle(title, fontsize=12)
        if path is not None:
            figure.savefig(path, dpi=120)
    return figure


def _of(record: StateRecord, x: Tensor | None, sequence: int) -> Tensor | None:
    if x is None:
        return None
    if not -x.shape[0] <= sequence < x.shape[0]:
        raise ValueError(f"sequence: expected one of {x.shape[0]} of {record.name!r}, got {sequence}")
    return x[sequence].detach().double().cpu()


def _weights(matplotlib: Any, figure: Any, panels: Any, weights: Tensor) -> None:
    """weights (heads, L, L)."""
    finite = weights[weights.isfinite()]
    peak = (finite.abs().max().item() if finite.numel() else 0.0) or 1.0
    cmap = matplotlib.colors.LinearSegmentedColormap.from_list("attnjourney-signed", SIGNED)
    norm = matplotlib.colors.FuncNorm((_root, _square), -peak, peak)
    for axes, of_head in zip(panels, weights):
        extent = (0, weights.shape[2], weights.shape[1], 0)
        image = axes.imshow(of_head.numpy(), cmap=cmap, norm=norm, aspect="auto", extent=extent)
        axes.set_xlabel("value written", color=MUTED)
        axes.tick_params(length=0, labelsize=7.5)
    panels[0].set_ylabel("output", color=MUTED)
    bar = figure.colorbar(image, ax=list(panels), label="weight", ticks=[-peak, -peak / 4, 0, peak / 4, peak])
    bar.outline.set_visible(False)


def _root(x: Any) -> Any:
    return abs(x) ** 0.5 * ((x > 0) * 2 - 1)


def _square(x: Any) -> Any:
    return x * abs(x)


def _half_life(panels: Any, half_life: Tensor) -> None:
    """half_life (heads, L) or, by channel, (heads, L, D)."""
    shown = half_life.clamp(0.1, max(1.0, 10.0 * half_life.shape[1]))
    for axes, of_head in zip(panels, shown):
        tokens = range(len(of_head))
        if of_head.dim() == 2:
            axes.fill_between(tokens, of_head.amin(1).numpy(), of_head.amax(1).numpy(), color=RAMP[1], linewidth=0)
            of_head = of_head.median(1).values
        axes.plot(tokens, of_head.numpy(), color=RAMP[4], linewidth=1)
        axes.set(yscale="log", xlim=(0, max(1, len(of_head) - 1)), ylim=(0.08, 12.0 * max(0.1, half_life.shape[1])))
        axes.set_xlabel("token", color=MUTED)
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.tick_params(which="both", length=0, labelsize=7.5)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("half-life (tokens)", color=MUTED)
