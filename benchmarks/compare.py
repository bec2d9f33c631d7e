"""python -m benchmarks.compare OLD.json NEW.json: what got slower, relative to the ceiling measured beside it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

TOLERANCE = 0.05


@dataclass
class Change:
    name: str
    which: str
    before: float  # fraction of the ceiling
    after: float

    @property
    def slowdown(self) -> float:
        """Time now over time before at the same ceiling; 1.1: 10 % slower."""
        return self.before / self.after


@dataclass
class Comparison:
    changes: list[Change]
    incomparable: list[str]  # in both files, but not the same measurement

    def slower(self, tolerance: float = TOLERANCE) -> list[Change]:
        return [change for change in self.changes if change.slowdown > 1 + tolerance]

    def faster(self, tolerance: float = TOLERANCE) -> list[Change]:
        return [change for change in self.changes if change.slowdown < 1 / (1 + tolerance)]


def compare(old: dict, new: dict) -> Comparison:
    """Our own figures in two result files, case by case and pass by pass.

    Fractions of the ceiling are compared, not times: another clock speed does not count as a change. Cases whose shape,
    threads or ceiling differ are listed as incomparable.
    """
    before = {(record["name"], record["pass"]): record for record in old["cases"]}
    result = Comparison([], [])
    for record in new["cases"]:
        past = before.get((record["name"], record["pass"]))
        ours = [r["results"].get("ours", {}) for r in (past, record) if r is not None]
        if len(ours) < 2 or not all("fraction" in r for r in ours):
            continue
        label = f"{record['name']} {record['pass']}"
        for key in ("shape", "threads", "ceiling", "clock"):
            if past[key] != record[key]:
                result.incomparable.append(f"{label}: {key} was {past[key]}, is {record[key]}")
                break
        else:
            result.changes.append(Change(record["name"], record["pass"], *(r["fraction"] for r in ours)))
    return result


def report(old: dict, new: dict, console: Console) -> int:
    """Prints what changed; 1 if anything is slower, else 0."""
    if old["cpu"] != new["cpu"] or old["gpu"] != new["gpu"]:
        console.print(f"note: measured on another machine: {old['gpu'] or old['cpu']}", style="yellow")
    comparison = compare(old, new)
    slower = comparison.slower()
    for word, style, changes in (("slower", "red", slower), ("faster", "green", comparison.faster())):
        for change in sorted(changes, key=lambda c: c.slowdown, reverse=word == "slower"):
            factor = change.slowdown if word == "slower" else 1 / change.slowdown
            console.print(
                f"{word}: {change.name} {change.which}: {change.before:.3f} -> {change.after:.3f} of the ceiling, "
                f"{factor:.2f} times",
                style=style, highlight=False, soft_wrap=True,
            )  # fmt: skip
    for text in comparison.incomparable:
        console.print(f"not compared: {text}", style="yellow", highlight=False, soft_wrap=True)
    console.print(
        f"{len(comparison.changes)} compared with {old['date']}: {len(slower)} slower by more than {TOLERANCE:.0%}"
    )
    return 1 if slower else 0


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    p.add_argument("old", type=Path)
    p.add_argument("new", type=Path)
    args = p.parse_args(argv)
    return report(json.loads(args.old.read_text()), json.loads(args.new.read_text()), Console())


if __name__ == "__main__":
    sys.exit(main())
