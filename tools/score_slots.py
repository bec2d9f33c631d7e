"""python -m tools.score_slots: what a score costs beside its multiply-adds, on CPUs that are not here.

Compiles what the float32 forward does with the scores of a register tile, which the main loop has summed (maximum,
exponential, sum of weights, weights to memory), and asks llvm-mca's models of CPUs for its cycles. In the table: cycles
of a vector of scores, the multiply-adds of vectors that the model does in them, and with those the forward's bound, of
the multiply-add peak: a score takes 2 D multiply-adds beside them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.markdown import rows
from tools.main_loops import AARCH64, CPUS, ROOT, X86, Loop, Machine, cycles, disassemble, free_multiply_adds

HEAD_DIMS = (64, 128)
PROBE = """
#include "cpu/isa/vec_{isa}.h"
#include "cpu/isa/tuning_{isa}.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/plain_products.h"
using namespace attnjourney;
using Scores = ScoreTile<float>;
using Sums = Tile<float, Scores::rows, Scores::vectors>;
static_assert(Scores::rows * Scores::vectors == {vectors});
extern "C" void probe(const void* scores, const void* sums) {{
  static_cast<const Scores*>(scores)->softmax<Hidden::no>(*static_cast<const Sums*>(sums), 0, 0, 0);
}}
"""
COMMON = ("-std=c++20", "-O2", "-DNDEBUG", "-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
X86_FLAGS = ("-DATTNJOURNEY_X86=1", "-mfma", "-mf16c")
BUILDS: dict[str, tuple[Machine, tuple[str, ...], int]] = {  # compiler and flags; vectors of a register tile
    "avx2": (X86, ("g++", *X86_FLAGS, "-mavx2"), 6 * 2),
    "avx512": (X86, ("g++", *X86_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"), 8 * 3),
    "neon": (AARCH64, ("aarch64-linux-gnu-g++", "-DATTNJOURNEY_ARM64=1", "-fno-schedule-insns"), 8 * 3),
}


def compiled(isa: str, folder: Path) -> Path:
    _, (compiler, *flags), vectors = BUILDS[isa]
    source, to = folder / f"{isa}.cpp", folder / f"{isa}.o"
    source.write_text(PROBE.format(isa=isa, vectors=vectors))
    command = [compiler, *COMMON, *flags, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return to


def body(disassembly: str, machine: Machine) -> list[str]:
    """The instructions of `probe`."""
    _, _, text = disassembly.partition("<probe>:")
    lines = text.partition("\n\n")[0].splitlines()
    found = [machine.comment.sub("", line.partition("\t")[2]).strip() for line in lines]
    return [x for x in found if x and not x.startswith("ret")]


def slots(code: list[str], isa: str, cpu: str) -> tuple[float, float]:
    """Cycles of a vector of scores; the multiply-adds that the model does in them."""
    machine, _, vectors = BUILDS[isa]
    free = free_multiply_adds(Loop(machine, "probe", tuple(code)))
    taken = cycles(code, machine, cpu) / vectors
    return taken, taken * len(free) / cycles(free, machine, cpu)


def table(isas: list[str]) -> list[str]:
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for isa in isas:
            code = body(disassemble(compiled(isa, Path(folder)), BUILDS[isa][0]), BUILDS[isa][0])
            for cpu in CPUS[isa][1]:
                taken, adds = slots(code, isa, cpu)
                bounds = (f"{2 * d / (2 * d + adds):.2f}" for d in HEAD_DIMS)
                cells.append([isa, cpu, f"{taken:.1f}", f"{adds:.1f}", *bounds])
    return rows(["", "CPU", "cycles", "multiply-adds", *(f"bound, D {d}" for d in HEAD_DIMS)], cells)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m tools.score_slots", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.parse_args(argv)
    isas = [isa for isa, (_, (compiler, *_), _) in BUILDS.items() if shutil.which(compiler)]
    print("\n".join(table(isas)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
