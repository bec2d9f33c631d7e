"""A trace as a table of rich: names and shapes, and the numbers of a small one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import table_state

MOST_ROWS, MOST_KEYS, MOST_TABLES = 12, 12, 4  # of numbers that are shown
SHOWN = ("scores", "softcapped", "bias", "alibi", "mask", "masked_scores", "weights", "dropped_weights", "output")


def render(trace: Any) -> Any:
    """A rich renderable."""
    from rich.console import Group
    from rich.table import Table

    title = f"[bold]{trace.title}[/]: rows {_numbers(trace.rows)}, heads {_numbers(trace.heads)}"
    summary = Table()
    for column in ("stage", "shape", "dtype"):
        summary.add_column(column)
    for name, x in trace.items():
        summary.add_row(name, str(tuple(x.shape)), str(x.dtype).removeprefix("torch."))
    if "state_after" in trace:
        shown = table_state.state_tables(trace)
        return Group(title, summary, *(shown or [_too_many(table_state.LIMITS)]))
    weights = trace["weights"]
    *lead, rows, keys = weights.shape
    tables = 1
    for n in lead:
        tables *= n
    if not (rows and keys and tables) or rows > MOST_ROWS or keys > MOST_KEYS or tables > MOST_TABLES:
        return Group(title, summary, _too_many(f"{MOST_ROWS} rows, {MOST_KEYS} keys and {MOST_TABLES} heads in all"))
    return Group(title, summary, *(_head(trace, index, lead) for index in range(tables)))


def _too_many(limits: str) -> str:
    return f"Numbers are shown for up to {limits}: ask for rows= and heads=."


def _head(trace: Any, index: int, lead: list[int]) -> Any:
    from rich.table import Table

    place = torch.unravel_index(torch.tensor(index), lead) if lead else ()
    names = ["batch"] * max(0, len(lead) - 1) + ["head"] * bool(lead)
    numbers = [int(i) for i in place]
    if lead:
        numbers[-1] = int(trace.heads[numbers[-1]])
    title = ", ".join(f"{name} {number}" for name, number in zip(names, numbers))
    table = Table(title=title or None, title_style="bold", show_lines=False)
    shown = [name for name in SHOWN if name in trace and trace[name].shape[-1] <= MOST_KEYS]
    table.add_column("stage")
    table.add_column("row", justify="right")
    width = max(trace[name].shape[-1] for name in shown)
    for j in range(width):
        table.add_column(str(j), justify="right")
    seen = trace["mask"][place]
    for name in shown:
        x = trace[name][place]
        for i, row in enumerate(trace.rows.tolist()):
            cells = _cells(name, x[i], seen[i])
            table.add_row(name if i == 0 else "", str(row), *cells, end_section=i == len(trace.rows) - 1)
    return table


def _cells(name: str, x: Tensor, seen: Tensor) -> list[str]:
    if name == "mask":
        return ["●" if visible else "·" for visible in x.tolist()]
    x = x.double() + 0.0  # no -0
    if name == "output":
        return [f"{n:.4f}" for n in x.tolist()]
    hidden_too = name in ("scores", "softcapped", "bias", "alibi")  # they are there, seen or not
    return [f"{n:.4f}" if visible or hidden_too else "·" for n, visible in zip(x.tolist(), seen.tolist())]


def _numbers(x: Tensor) -> str:
    given = x.tolist()
    if len(given) > 2 and given == list(range(given[0], given[-1] + 1)):
        return f"{given[0]} .. {given[-1]}"
    return ", ".join(map(str, given[:8])) + (", …" if len(given) > 8 else "") if given else "none"
