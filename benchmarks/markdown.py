"""Results as a Markdown table: a row for each case and pass, ours and everyone beside it."""

from __future__ import annotations


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}x" if value < 10 else f"{value:.0f}x"


def rows(header: list[str], cells: list[list[str]]) -> list[str]:
    right = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(row) + " |" for row in (header, right, *cells)]


def machine(document: dict) -> str:
    """Where, when and how the results came about, and whether the run was cut."""
    device = document["gpu"] or f"{document['cpu']}, {document['isa']}, {document['threads']} thread(s)"
    commit = f", commit {document['commit'][:10]}" if document["commit"] else ""
    unfinished = "" if document.get("finished", True) else " The run did not finish."
    where = f"{device}; torch {document['torch']}; {document['date'][:10]}{commit}; `{document['command']}`."
    return where + unfinished


def _rate(record: dict, result: dict) -> str:
    if record["ceiling"] == "dram":
        return f"{record['bytes'] / result['seconds'] / 1e9:.0f} GB/s"
    return f"{result['gflops'] / 1000:.0f} TFLOP/s" if result["gflops"] >= 1e5 else f"{result['gflops']:.0f} GFLOP/s"


def _ours(record: dict) -> list[str]:
    result = record["results"].get("ours", {})
    if "seconds" not in result:
        return ["failed" if "ours" in record["failed"] else "", "", ""]
    return [duration(result["seconds"]), _rate(record, result), f"{result['fraction']:.0%} {record['ceiling']}"]


def _beside(record: dict, name: str) -> str:
    """Its time over ours; the time itself where ours is missing."""
    result = record["results"].get(name, {})
    if "ratio" not in result and "seconds" in result:
        return duration(result["seconds"])
    return times(result["ratio"]) if "ratio" in result else "failed" if name in record["failed"] else ""


def table(document: dict) -> str:
    """All timed rows so far, and why a contestant failed."""
    records = [r for r in document["cases"] if any("seconds" in x for x in r["results"].values()) or r["failed"]]
    names = list(dict.fromkeys(name for r in records for name in (*r["results"], *r["failed"]) if name != "ours"))
    header = ["case", "pass", "ours", "rate", "of peak", *names]
    cells = [[r["name"], r["pass"], *_ours(r), *(_beside(r, name) for name in names)] for r in records]
    about = "Of peak: useful FLOP, or bytes, over the ceiling named, measured beside it. Others: their time over ours."
    failures = [
        f"- {name} failed in {r['name']} {r['pass']}: {reason}" for r in records for name, reason in r["failed"].items()
    ]
    missing = [f"- {name}: {reason}" for name, reason in document["missing"].items()]
    return "\n".join([machine(document), about, "", *rows(header, cells), "", *failures, *missing]).rstrip() + "\n"
