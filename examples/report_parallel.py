"""The progress and the report of examples.train_parallel, which one of the ranks writes."""

import math
import tempfile
import time
from pathlib import Path

from rich import progress as bars
from rich.console import Console

from examples import figures, report
from examples.results import Check

ROUNDING = 1e-4  # of a float32 loss after a few steps, relative


class Progress:
    """A bar in a terminal, a line for every tenth of the steps anywhere else. Use as a context."""

    def __init__(self, console: Console, label: str, steps: int, done: int, per_step: int):
        self.console, self.label, self.steps, self.first, self.per_step = console, label, steps, done, per_step
        self.begun, self.bars = time.perf_counter(), None
        if console.is_terminal:
            columns = bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=20), bars.MofNCompleteColumn()
            state, left = bars.TextColumn("{task.fields[state]}"), bars.TimeRemainingColumn(elapsed_when_finished=True)
            self.bars = bars.Progress(*columns, state, left, console=console)
            self.task = self.bars.add_task(label, total=steps, completed=done, state="")

    def __enter__(self) -> "Progress":
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.bars:
            self.bars.stop()

    def rate(self, done: int) -> float:
        """Bytes of text a second."""
        return (done - self.first) * self.per_step / (time.perf_counter() - self.begun)

    def step(self, done: int, loss: float) -> None:
        """Step number `done` ended with this loss in nats per byte."""
        state = f"{loss / math.log(2):6.3f} bits/byte {self.rate(done):8,.0f} bytes/s"
        if self.bars:
            self.bars.update(self.task, completed=done, state=state)
        elif done % max(1, self.steps // 10) == 0 or done == self.steps:
            self.console.print(f"{self.label} step {done:>5}/{self.steps} {state}", highlight=False, soft_wrap=True)


def write(path: Path, name: str, sizes: tuple[int, ...], losses: list[float], alone: list[float], rate: float) -> None:
    """losses: of every step on the mesh, in nats per byte; alone: of the first ones on one rank."""
    mesh = " x ".join(map(str, sizes))
    checks = []
    if alone:
        off = max(abs(a - b) / b for a, b in zip(losses, alone))
        text = f"The losses of {len(alone)} steps are those of one rank: they differ by at most {off:.1e} of them."
        checks.append(Check(off < ROUNDING, text))
    header = ["step", "on the mesh, bits/byte", "on one rank, bits/byte"]
    chosen = sorted({*range(len(alone)), *range(9, len(losses), 10), len(losses) - 1})
    bits = [[f"{x[i] / math.log(2):.6f}" if i < len(x) else "" for x in (losses, alone)] for i in chosen]
    rows = [[str(i + 1), *cells] for i, cells in zip(chosen, bits)]
    with tempfile.TemporaryDirectory() as folder:
        figure, axes = figures.plt.subplots(figsize=(9, 4))
        axes.plot(range(1, len(losses) + 1), [x / math.log(2) for x in losses], label=f"mesh {mesh}", linewidth=4)
        axes.plot(range(1, len(alone) + 1), [x / math.log(2) for x in alone], label="one rank", color="black")
        axes.set(xlabel="step", ylabel="bits per byte")
        axes.legend(frameon=False)
        curve = report.picture(figures.save(figure, Path(folder) / "losses.png"), "Training loss")
    lead = f"{name} on a mesh of data x context x tensor = {mesh}: {rate:,.0f} bytes of text a second"
    sections = [report.Section("Losses", curve + report.table(header, rows))]
    report.write(path, lead, checks, sections, f"attnjourney: {name} on a mesh of ranks")
