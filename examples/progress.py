"""How far the training is: bars in a terminal, a few lines anywhere else (a log file, a pipe)."""

import math
import time

from rich import progress as bars
from rich.console import Console

from examples.config import Config
from examples.model import VARIANTS


class Progress:
    """Use as a context; `begin` once per variant, then `step` after each step."""

    def __init__(self, console: Console, config: Config):
        self.console, self.config = console, config
        self.bars = None
        if console.is_terminal:
            self.bars = bars.Progress(
                bars.TextColumn("{task.description:<11}"),
                bars.BarColumn(bar_width=20),
                bars.MofNCompleteColumn(),
                bars.TextColumn("{task.fields[state]:<32}"),
                bars.TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
            )
            self.tasks = {
                name: self.bars.add_task(variant.label, total=config.steps, start=False, state="")
                for name, variant in VARIANTS.items()
            }

    def __enter__(self) -> "Progress":
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.bars:
            self.bars.stop()

    def note(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def begin(self, name: str, done: int) -> None:
        """`done` steps are already in the checkpoint."""
        self.started, self.first = time.perf_counter(), done
        state = "" if done == 0 else "from the checkpoint"
        if self.bars:
            self.bars.reset(self.tasks[name], completed=done, state=state)
        elif done:
            self.line(name, done, "  " + state)

    def step(self, name: str, done: int, loss: float) -> None:
        """Step number `done` ended with this loss in nats per byte."""
        per_step = self.config.batch * self.config.context
        speed = (done - self.first) * per_step / (time.perf_counter() - self.started)
        state = f"{loss / math.log(2):6.3f} bits/byte {speed:8,.0f} bytes/s"
        if self.bars:
            self.bars.update(self.tasks[name], completed=done, state=state)
        elif done % max(1, self.config.steps // 4) == 0 or done == self.config.steps:
            self.line(name, done, state)

    def line(self, name: str, done: int, state: str) -> None:
        text = f"{VARIANTS[name].label:<11} step {done:>5}/{self.config.steps} {state}"
        self.console.print(text, highlight=False, soft_wrap=True)
