"""Tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from .markdown import duration


def amount(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def head(document: dict, console: Console) -> None:
    what = document["gpu"] or document["cpu"]
    console.print(
        f"{what}, {document['threads']} thread(s), attnjourney: {document['isa']}, torch {document['torch']}: "
        f"{document['torch_isa']}, {document['date']}",
        soft_wrap=True,
    )
    if document["load"] > 0.5:
        console.print(f"  the machine is busy: load {document['load']}", style="yellow")
    for name, reason in document["missing"].items():
        console.print(f"  {name}: {reason}", style="dim")


def ceilings(found: dict[str, float], console: Console) -> None:
    parts = (
        f"{name} {value / 1e9:.0f} {'GB/s' if name.startswith('dram') else 'GFLOP/s'}" for name, value in found.items()
    )
    console.print("ceilings: " + ", ".join(parts), soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(result: dict) -> str:
    """Time over ours, in green where ours is faster; the time itself where ours is missing."""
    if "ratio" not in result:
        return duration(result["seconds"]) if "seconds" in result else "-"
    return f"[{'green' if result['ratio'] >= 1 else 'red'}]{result['ratio']:.2f}"


def in_full(t: Table, console: Console) -> None:
    """Prints all of a table, also where the terminal is narrow."""
    width = t.__rich_measure__(console, console.options.update(max_width=1000)).maximum
    Console(file=console.file, width=max(width, console.width), force_terminal=console.is_terminal).print(t)


def of_peak(record: dict, result: dict) -> str:
    """Fraction of the record's ceiling; for bf16 of the fp32 peak too, which is what kernels that widen can reach."""
    text = f"{result['fraction']:.3f} {record['ceiling']}"
    if record["ceiling"] == "bf16":
        text = f"{result['gflops'] * 1e9 / record['ceilings']['fma']:.3f} fma, {text}"
    return text


def table(document: dict, console: Console) -> None:
    """One line for each case and pass: ours, then each peer's time over ours, its error and its memory."""
    records = document["cases"]
    names = list(dict.fromkeys(name for record in records for name in record["results"] if name != "ours"))
    scaling = any("scaling" in result for record in records for result in record["results"].values())
    columns = ["time", "GFLOP/s", "of peak", *(["speed-up"] if scaling else []), "err", "mem"]
    for name in names:
        columns += [f"{name}/ours", "err", "mem"]
    t = Table(padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    for column in ("case", "pass", *columns):
        t.add_column(column, justify="left" if column in ("case", "pass") else "right", no_wrap=True)
    for record in records:
        ours = record["results"].get("ours", {})
        cells = ["-"] * 3
        if "seconds" in ours:
            cells = [duration(ours["seconds"]), f"{ours['gflops']:.1f}", of_peak(record, ours)]
        if scaling:
            cells.append(_number(ours.get("scaling"), ".2f"))
        cells += [_number(ours.get("error"), ".0e"), amount(ours.get("memory"))]
        for name in names:
            result = record["results"].get(name, {})
            cells += [_ratio(result), _number(result.get("error"), ".0e"), amount(result.get("memory"))]
        t.add_row(record["name"], record["pass"], *cells)
    in_full(t, console)
    notes = [
        "of peak: useful FLOP (or bytes) over the ceiling named, measured beside it",
        "peer/ours: its time over ours, above 1 ours is faster",
        "err: largest difference from fp64",
        "mem: peak MiB beyond inputs and outputs",
    ]
    console.print("; ".join(notes), style="dim", soft_wrap=True)
    for record in records:
        for name, reason in record["failed"].items():
            text = f"{name} failed in {record['name']} {record['pass']}: {reason}"
            console.print(text, style="red", markup=False, soft_wrap=True)
    skipped = sorted({(name, reason) for record in records for name, reason in record["skipped"].items()})
    for name, reason in skipped:
        cases = sorted({record["name"] for record in records if record["skipped"].get(name) == reason})
        shown = ", ".join(cases[:4]) + (f" and {len(cases) - 4} more" if len(cases) > 4 else "")
        console.print(f"  {name}: {reason} ({shown})", style="dim", markup=False, highlight=False, soft_wrap=True)


def listing(cases, peers, device: str, console: Console) -> None:
    t = Table("case", "group", "GFLOP forward", "MB forward", "quick", box=box.SIMPLE_HEAD)
    for case in cases:
        work = f"{case.flops('forward') / 1e9:.3g}", f"{case.bytes('forward') / 1e6:.3g}"
        t.add_row(case.name, case.group, *work, "x" if case.quick else "")
    in_full(t, console)
    t = Table("peer", "what it is", "here", box=box.SIMPLE_HEAD)
    for peer in peers:
        t.add_row(peer.name, peer.about, peer.missing(device) or "yes")
    in_full(t, console)
