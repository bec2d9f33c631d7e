"""python -m tools.gpu: what `make gpu` does on a machine with a GPU, the commands of tools/gpu_parts.py one by one.

Each command has a limit of its own, and all together take --seconds at most: what finds no time left is skipped, and
the summary says so. A command that does not end in time is interrupted, then killed with everything that it has
started; what it has printed and written by then stays.

OUT/summary.md is written anew after each command. Rows of parts that are not run this time stay in it, so a second call
goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import write
from benchmarks.markdown import rows
from tools.gpu_parts import PARTS, ROOT, Step, steps

GRACE = 5.0  # seconds from the interrupt, on which pytest writes its report, to the end
NO_TIME = "no time left"
ENOUGH = 10.0  # seconds that are worth starting a command for
# the driver keeps what it compiles, should there be no machine code for this GPU
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "CUDA_CACHE_MAXSIZE": str(4 << 30)}

COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|deselected|error)[^=\n]* in [\d.]+s")  # pytest's last line


def stop(process: subprocess.Popen, grace: float) -> None:
    """Interrupts the process and all that it has started, and kills what is left after a while."""
    for number, wait in ((signal.SIGINT, grace), (signal.SIGKILL, 5.0)):  # one that waits for the driver stays
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)


def run(step: Step, limit: float, log: Path) -> str:
    """ "ok", or what went wrong; the output goes to the end of `log`, and its last lines to the terminal."""
    if shutil.which(step.command[0]) is None:
        return f"skipped: no {step.command[0]} on PATH or in CUDA_HOME"
    environment = os.environ | ENVIRONMENT | step.environment
    with log.open("a") as file:
        print(f"--- {step.part}: {step.name}", file=file, flush=True)
        begin = file.tell()
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
        )  # fmt: skip
        grace, status = min(GRACE, limit / 2), None
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                status = process.wait(limit - grace)
            finally:
                stop(process, grace)
    with log.open(errors="replace") as file:
        file.seek(begin)
        text = file.read()
    print("\n".join(text.splitlines()[-12 if status == 0 else -60 :]), flush=True)
    if step.cannot and step.cannot in text:
        return f"skipped: {step.cannot}"
    result = f"no end after {limit - grace:.3g} s" if status is None else f"status {status}" if status else "ok"
    return ": ".join([result, *COUNTS.findall(text)[-1:]])


@dataclass
class Row:
    """A line of the summary."""

    part: str
    name: str
    begun: str = "-"  # UTC
    seconds: str = "-"
    result: str = "-"
    log: str = "-"

    @property
    def failed(self) -> bool:
        return not self.result.startswith(("ok", "skipped"))


class Summary:
    """OUT/summary.md."""

    def __init__(self, out: Path, parts: list[str]):
        """parts: those that are run now; rows of others are kept."""
        self.path = out / "summary.md"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        old = [Row(*(cell.strip() for cell in row)) for row in cells if row[0] in PARTS and len(row) == 6]
        self.rows = [row for row in old if row.part not in parts]

    def add(self, row: Row) -> None:
        """A new row, or what has become of the last one."""
        if not any(row is other for other in self.rows):
            self.rows.append(row)
            self.rows.sort(key=lambda row: PARTS.index(row.part))
        write(self.path, self.text())

    def text(self) -> str:
        of = {part: [row for row in self.rows if row.part == part] for part in PARTS}
        lines = ["# make gpu", ""]
        if any(row.failed for row in of["conformance"]):
            lines += ["**Conformance failed: an instruction does not do what the kernels count on.**", ""]
        if failed := [f"{row.part} {row.name}" for row in self.rows if row.failed]:
            lines += [f"Failed: {', '.join(failed)}.", ""]
        if left := [part for part in PARTS if any(NO_TIME in row.result for row in of[part])]:
            lines += [f"No time was left for some of: `make gpu PART={','.join(left)}` runs them.", ""]
        cells = [list(vars(row).values()) for row in self.rows]
        return "\n".join([*lines, *rows(["part", "what", "begun (UTC)", "seconds", "result", "log"], cells)]) + "\n"


def run_all(chosen: list[Step], seconds: float, out: Path) -> list[Row]:
    """All of them in their order; returns their lines of the summary."""
    summary, end, cleared, done = Summary(out, [step.part for step in chosen]), time.monotonic() + seconds, set(), []
    for step in chosen:
        begin = time.monotonic()
        left = end - begin
        row = Row(step.part, step.name)
        done.append(row)
        if step.skip or left < min(step.seconds, ENOUGH):
            row.result = f"skipped: {step.skip or NO_TIME}"
            summary.add(row)
            continue
        if step.part not in cleared:
            cleared.add(step.part)
            for old in out.glob(f"{step.part}*"):
                old.unlink()
        print(f"--- {step.part}: {step.name}", flush=True)
        row.begun, row.log = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}", f"{step.part}.log"
        row.result = "did not end"
        summary.add(row)
        row.result = run(step, min(step.seconds, left), out / row.log)
        row.seconds = f"{time.monotonic() - begin:.1f}"
        summary.add(row)
    print(summary.text(), flush=True)
    return done


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="where results go")
    p.add_argument("--part", default="", help=f"comma-separated, of {', '.join(PARTS)}; default: all")
    p.add_argument("--cases", default="", help="of the benchmarks, in place of the usual (see benchmarks.run --case)")
    p.add_argument("--seconds", type=float, default=540, help="for everything (default 540)")
    p.add_argument("--list", action="store_true", help="print the commands instead of running them")
    args = p.parse_args(argv)
    parts = [part for part in args.part.split(",") if part] or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        p.error(f"--part: unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    out = args.out.resolve()
    chosen = [step for step in steps(out, args.cases) if step.part in parts]
    if args.list:
        for step in chosen:
            print(f"{step.part} {step.name} ({step.seconds} s): {shlex.join(step.command)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that commands end with this program
    return int(any(row.failed for row in run_all(chosen, args.seconds, out)))


if __name__ == "__main__":
    sys.exit(main())
