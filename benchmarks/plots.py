"""PNG plots of a results file: speed against length, and how much slower each peer is in each case."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import LogNorm  # noqa: E402

COLOURS = {"ours": "#d62728", "sdpa": "#1f77b4", "sdpa-math": "#7f7f7f", "flex": "#2ca02c", "mha": "#9467bd"}
COLOURS |= {"plain": "#8c564b", "softmax": "#ff7f0e"}


def write(document: dict, folder: Path) -> list[Path]:
    """speed_<pass>.png, ratio.png and crossover.png in the folder, as far as there is something to show; returns the
    paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = [record for record in document["cases"] if any("seconds" in r for r in record["results"].values())]
    written = []
    for which in dict.fromkeys(record["pass"] for record in timed):
        path = folder / f"speed_{which}.png"
        if _speed(document, [record for record in timed if record["pass"] == which], path):
            written.append(path)
    if _ratio(document, timed, folder / "ratio.png"):
        written.append(folder / "ratio.png")
    if _crossover(document, timed, folder / "crossover.png"):
        written.append(folder / "crossover.png")
    return written


def _caption(document: dict) -> str:
    machine = document["gpu"] or f"{document['cpu']}, {document['threads']} thread(s)"
    return f"{machine}, torch {document['torch']}, {document['date'][:10]}, {document['commit'][:10] or 'no commit'}"


def _families(records: list[dict]) -> dict[str, list[dict]]:
    """Records that differ in length (and in the number of heads that goes with it) alone, by title."""
    families: dict[str, list[dict]] = {}
    for record in records:
        shape = record["shape"]
        plain = not (shape["mask"] or shape["dropout"] or shape["layer"]) and shape["layout"] == "bhnd"
        if plain and shape["q_len"] == shape["kv_len"] and record["group"] in ("dense", "shape"):
            group = shape["heads"] // shape["kv_heads"]
            dims = f"D {shape['head_dim']}" + (
                f"/{shape['v_head_dim']}" if shape["v_head_dim"] != shape["head_dim"] else ""
            )
            kind = "causal" if shape["causal"] else "full"
            title = f"{shape['dtype']}, {dims}, {kind}" + (f", groups of {group}" if group > 1 else "")
            families.setdefault(title, []).append(record)
    return families


def _speed(document: dict, records: list[dict], path: Path) -> bool:
    families = _families(records)
    if not families:
        return False
    columns = min(4, len(families))
    rows = math.ceil(len(families) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows + 0.6), squeeze=False, layout="constrained"
    )
    for axis, (title, family) in zip(axes.flat, families.items()):
        family.sort(key=lambda record: record["shape"]["q_len"])
        for name in dict.fromkeys(name for record in family for name in record["results"]):
            points = [
                (r["shape"]["q_len"], r["results"][name]["gflops"])
                for r in family
                if "gflops" in r["results"].get(name, {})
            ]
            if points:
                axis.plot(
                    *zip(*points), marker="o", label=name, color=COLOURS.get(name), zorder=3 if name == "ours" else 2
                )
        if all(record["ceiling"] != "dram" for record in family):
            ceiling = [(r["shape"]["q_len"], r["ceilings"][r["ceiling"]] / 1e9) for r in family]
            axis.plot(
                *zip(*ceiling), linestyle="--", color="black", linewidth=1, label=f"ceiling ({family[0]['ceiling']})"
            )
        lengths = sorted({record["shape"]["q_len"] for record in family})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes.flat[len(families) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("useful GFLOP/s")

    figure.suptitle(f"{records[0]['pass']}: speed against sequence length\n{_caption(document)}", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _ratio(document: dict, records: list[dict], path: Path) -> bool:
    """One row a case, one column a pass and peer; the colour is the logarithm of the peer's time over ours."""
    cells = {
        (record["name"], record["pass"], name): result["ratio"]
        for record in records for name, result in record["results"].items() if name != "ours" and "ratio" in result
    }  # fmt: skip
    if not cells:
        return False
    cases = list(dict.fromkeys(case for case, _, _ in cells))
    order = list(dict.fromkeys(which for _, which, _ in cells))
    columns = sorted(dict.fromkeys(cell[1:] for cell in cells), key=lambda column: order.index(column[0]))
    grid = [[cells.get((case, *column), math.nan) for column in columns] for case in cases]
    figure, axis = plt.subplots(figsize=(4 + 0.8 * len(columns), 2.2 + 0.24 * len(cases)), layout="constrained")
    image = axis.imshow(grid, cmap="RdYlGn", norm=LogNorm(1 / 4, 4), aspect="auto")
    for i, row in enumerate(grid):
        for j, ratio in enumerate(row):
            if not math.isnan(ratio):
                axis.text(j, i, f"{ratio:.2g}", ha="center", va="center", fontsize=7)
    axis.set_xticks(
        range(len(columns)), [f"{which}\n{name}" for which, name in columns], fontsize=7, rotation=45, ha="right"
    )
    axis.set_yticks(range(len(cases)), cases, fontsize=7)
    axis.set_title(f"peer's time over ours (above 1: ours is faster)\n{_caption(document)}", fontsize=9, loc="left")
    bar = figure.colorbar(image, ax=axis, shrink=0.4)
    bar.ax.minorticks_off()
    bar.set_ticks([1 / 4, 1 / 2, 1, 2, 4], labels=["1/4", "1/2", "1", "2", "4"])
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _crossover(document: dict, records: list[dict], path: Path) -> bool:
    """Time a row against length: linear attention beside softmax attention and plain PyTorch."""
    families: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        if "softmax" in record["results"]:
            families.setdefault((record["shape"]["dtype"], record["pass"]), []).append(record)
    if not families:
        return False
    figure, axes = plt.subplots(
        1, len(families), figsize=(3.6 * len(families), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, ((dtype, which), family) in zip(axes.flat, families.items()):
        family.sort(key=lambda record: record["shape"]["q_len"])
        for name in ("ours", "softmax", "plain"):
            points = [
                (r["shape"]["q_len"], r["results"][name]["seconds"] * 1e9 / r["shape"]["q_len"] / r["shape"]["heads"])
                for r in family
                if "seconds" in r["results"].get(name, {})
            ]
            label = "linear (ours)" if name == "ours" else f"linear ({name} PyTorch)" if name == "plain" else name
            if points:
                axis.plot(*zip(*points), marker="o", label=label, color=COLOURS[name])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{dtype} {which}", fontsize=10)
        axis.set_xlabel("sequence length")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("ns a row and head")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(f"linear attention beside softmax attention, causal\n{_caption(document)}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
