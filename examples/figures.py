"""The report's pictures: PNG files drawn by matplotlib."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window

import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from examples.model import VARIANTS  # noqa: E402

COLOR = {
    "mha": "#1f6fb4",
    "torch-mha": "#6b7480",
    "gpt": "#e0702b",
    "torch-sdpa": "#b4bbc4",
    "gqa": "#2a9763",
    "mla": "#8e4bb0",
}
WIDTH = {"mha": 9, "torch-mha": 6, "gpt": 3.5, "torch-sdpa": 1.2}  # these coincide: each lies inside the one before
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})


SMALLEST = 1e-7  # bits; an fp32 loss has no digits below


def save(figure: plt.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def smooth(values: Tensor, window: int) -> Tensor:
    """Mean of each value and up to window - 1 values before it."""
    total = torch.cat([torch.zeros(1), values.cumsum(0)])
    end = torch.arange(1, len(values) + 1)
    start = (end - window).clamp(min=0)
    return (total[end] - total[start]) / (end - start)


def losses(path: Path, losses: dict[str, list[float]], bigram: float) -> Path:
    """Training loss of all variants, and below it how far each is from its twin on PyTorch's own attention."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7.5), height_ratios=(3, 1.3), sharex=True)
    steps = range(1, len(losses["mha"]) + 1)
    window = max(1, len(steps) // 40)
    curves = {name: smooth(torch.tensor(values) / math.log(2), window) for name, values in losses.items()}
    for name, curve in curves.items():
        top.plot(steps, curve.tolist(), label=VARIANTS[name].label, color=COLOR[name], linewidth=WIDTH.get(name, 2))
    top.axhline(bigram, color="#b3261e", linestyle=":", label="bigram, held-out text")
    lowest, highest = min(c.min().item() for c in curves.values()), max(c.max().item() for c in curves.values())
    if lowest < 4.5:  # the way down from 8 bits is the same for all; leave the room to what differs
        top.set_ylim(lowest - 0.15, min(highest, 5.0))
    top.set(ylabel="bits per byte", title="Training loss" + (f" (mean of {window} steps)" if window > 1 else ""))
    top.legend(ncols=2, frameon=False)

    pairs = [("torch-mha", "torch-sdpa", "#30363d")]  # PyTorch beside itself: what rounding alone does
    for name, variant in VARIANTS.items():
        if variant.twin:
            pairs.append((name, variant.twin, COLOR[name]))
    for first, second, color in pairs:
        distance = (torch.tensor(losses[first]) - torch.tensor(losses[second])).abs() / math.log(2)  # (steps,)
        label = f"{VARIANTS[first].label} and {VARIANTS[second].label}"
        bottom.plot(steps, distance.clamp(min=SMALLEST).tolist(), color=color, linewidth=1.1, label=label)
    bottom.set_yscale("log")
    bottom.set_ylim(bottom=SMALLEST / 2)
    bottom.set(xlabel="step", ylabel="bits per byte", title="Distance between curves that began with the same weights")
    bottom.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.62))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    figure.tight_layout()
    return save(figure, path)


def beyond(path: Path, bits: dict[str, Tensor], labels: dict[str, str], context: int) -> Path:
    """Loss by position, one curve per method of rotary positions: bits (T,) by method."""
    figure, axes = plt.subplots(figsize=(9, 5))
    window = max(1, context // 4)
    for name, values in bits.items():
        style = {"color": "#30363d", "linestyle": "--"} if name == "default" else {}
        curve = smooth(values, window)[window // 2 :]
        axes.plot(range(window // 2, len(values)), curve.tolist(), label=labels[name], linewidth=1.8, **style)
    axes.axvline(context, color="#b3261e", linestyle=":")
    axes.set(xlabel="position", ylabel="bits per byte", title=f"Held-out text (mean of {window} positions)")
    axes.text(context, axes.get_ylim()[1], " trained length", color="#b3261e", va="top")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return save(figure, path)


def bars(
    path: Path, values: dict[str, float], title: str, unit: str, form: str, line: tuple[float, str] | None = None
) -> Path:
    """One horizontal bar per variant with its value beside it; `line` is a value to compare with and its name."""
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.5 * len(values)))
    names = list(values)
    labels = [VARIANTS[name].label for name in names]
    drawn = axes.barh(labels, values.values(), color=[COLOR[name] for name in names], height=0.7)
    axes.bar_label(drawn, [form.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    largest = max([*values.values(), line[0] if line else 0])
    axes.set_xlim(0, 1.15 * largest)
    axes.grid(axis="x", alpha=0.25)
    axes.set(title=title, xlabel=unit)
    if line:
        value, name = line
        axes.axvline(value, color="#b3261e", linestyle=":")
        axes.text(value, -0.55, f"{name} {form.format(value)}", color="#b3261e", ha="center", va="bottom")
        axes.set_title(title, pad=24)
    return save(figure, path)


def attention(path: Path, weights: Tensor, text: bytes, title: str) -> Path:
    """A heat map per layer and head: weights (layers, heads, T, T), rows are queries, columns are keys."""
    layers, heads, length, _ = weights.shape
    width, height = 2.9 * heads + 0.6, 2.9 * layers + 0.6  # inches
    figure, grid = plt.subplots(layers, heads, figsize=(width, height), squeeze=False)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    letters = [chr(byte) if 32 < byte < 127 else "␣" if byte == 32 else "·" for byte in text]
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            seen = weights[layer, head].masked_fill(future, float("nan"))  # the future stays white
            image = axes.imshow(seen.tolist(), cmap="magma_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=10)
            for axis, outer in ((axes.xaxis, layer == layers - 1), (axes.yaxis, head == 0)):  # a tick takes long
                axis.set_ticks(range(length) if outer else [], letters if outer else [], fontsize=6, family="monospace")
            axes.tick_params(length=0, pad=2)
    figure.supxlabel("key: the byte that is looked at", fontsize=12)
    figure.supylabel("query: the byte that looks", fontsize=12)
    figure.suptitle(title, fontsize=14)
    figure.subplots_adjust(0.73 / width, 0.73 / height, 0.925, 1 - 0.9 / height, wspace=0.06, hspace=0.14)
    figure.colorbar(image, cax=figure.add_axes((0.945, 0.3, 0.012, 0.4)), label="attention weight")
    return save(figure, path)
