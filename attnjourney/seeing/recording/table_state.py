"""The trace of a state as a table of rich: a column for each channel of the values, or of the key."""

from __future__ import annotations

from typing import Any

MOST_ROWS, MOST_CHANNELS, MOST_TABLES = 12, 12, 4  # of numbers that are shown
LIMITS = f"{MOST_ROWS} rows, {MOST_CHANNELS} channels of keys and values, and {MOST_TABLES} heads in all"


def state_tables(trace: Any) -> list:
    """One for each head of each sequence; none where the numbers are too many."""
    batch, heads, rows, *channels = trace["state_after"].shape
    if not 0 < batch * heads <= MOST_TABLES or rows > MOST_ROWS or not all(0 < n <= MOST_CHANNELS for n in channels):
        return []
    return [_table(trace, b, h) for b in range(batch) for h in range(heads)]


def _table(trace: Any, batch: int, head: int) -> Any:
    from rich.table import Table

    table = Table(title=f"batch {batch}, head {int(trace.heads[head])}", title_style="bold")
    for name in ("row", "stage", "channel", *map(str, range(max(trace["state_after"].shape[-2:])))):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for i, row in enumerate(trace.rows.tolist()):
        for name, x in trace.items():
            values = x[batch, head, i].double() + 0.0  # no -0
            lines = values.reshape(-1, values.shape[-1] if values.dim() else 1)
            for d, line in enumerate(lines):  # a state has a line for each channel of the key
                first, last = name == "query" and d == 0, name == "output" and d == len(lines) - 1
                channel = str(d) if values.dim() == 2 else ""
                cells = [f"{n:.4f}" for n in line.tolist()]
                table.add_row(str(row) if first else "", name if d == 0 else "", channel, *cells, end_section=last)
    return table
