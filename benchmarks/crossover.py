"""From which length on linear attention is faster than softmax attention."""

from __future__ import annotations

import math

from rich.console import Console


def find(records: list[dict]) -> list[dict]:
    """For each dtype and pass that has the two side by side at several lengths: the length where their times are equal,
    between two measured ones by a straight line through the logarithms; None where they do not cross."""
    families: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        ratio = record["results"].get("softmax", {}).get("ratio")
        if ratio:
            families.setdefault((record["shape"]["dtype"], record["pass"]), {})[record["shape"]["q_len"]] = ratio
    found = []
    for (dtype, which), ratios in families.items():
        points = sorted(ratios.items())
        at = None
        for (n, a), (m, b) in zip(points, points[1:]):
            if a < 1 <= b:
                share = -math.log(a) / (math.log(b) - math.log(a))
                at = round(math.exp(math.log(n) + share * (math.log(m) - math.log(n))))
        if len(points) > 1:
            found.append({"dtype": dtype, "pass": which, "length": at, "ratios": dict(points)})
    return found


def report(found: list[dict], console: Console) -> None:
    for line in found:
        shown = ", ".join(f"N {n} {ratio:.2f}" for n, ratio in line["ratios"].items())
        at = line["length"]
        if at is None:
            always = min(line["ratios"].values()) >= 1
            text = "faster at every length measured" if always else "no crossover"
        else:
            text = f"faster from N = {at}"
        console.print(
            f"linear attention beside softmax, {line['dtype']} {line['pass']}: {text} (softmax/linear: {shown})",
            soft_wrap=True,
        )
