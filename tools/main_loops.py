"""python -m tools.main_loops: how near the multiply-add bound the kernels' main loops are on CPUs that are not here.

Takes the innermost loops without a store from the object files of a build (objdump), and asks llvm-mca's models of CPUs
for their cycles. Of each function the loop with most multiply-adds counts. A share of 1 is as many a cycle as a loop of
independent multiply-adds of that kind has by the same model. In the table: the share of a template's longest loop and,
in brackets, the least one of its others. Caches are not in it: every load hits the first level.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mode

from benchmarks.markdown import rows

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS = 200


@dataclass(frozen=True)
class Machine:
    """What disassemblies of an instruction set look like, and what llvm-mca is to be told."""

    objdump: tuple[str, ...]
    comment: re.Pattern  # what follows an instruction
    multiply_add: re.Pattern
    jump: re.Pattern  # its group is the target
    store: re.Pattern
    skipped: re.Pattern  # what is not for llvm-mca
    triple: str
    syntax: str


X86 = Machine(
    objdump=("objdump", "-M", "intel"),
    comment=re.compile(r"\s*(#|<).*"),
    multiply_add=re.compile(r"v(?:fn?m(?:add|sub)\d+p[sd]|dpbf16ps)\b"),
    jump=re.compile(r"j\w+\s+([0-9a-f]+)\b"),
    store=re.compile(r"v?mov\w+\s+(?:\w+ PTR )?\["),
    skipped=re.compile(r"j|call|(?:data16 |cs )*nop"),
    triple="x86_64",
    syntax=".intel_syntax noprefix",
)
AARCH64 = Machine(
    objdump=("aarch64-linux-gnu-objdump",),
    comment=re.compile(r"\s*(//|<).*"),
    multiply_add=re.compile(r"(?:fml[as]\s+v|bfdot\s+v)"),
    jump=re.compile(r"(?:b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+,\s*#\w+,)\s*([0-9a-f]+)\b"),
    store=re.compile(r"st"),
    skipped=re.compile(r"b\b|b\.|bl\b|cb|tb|nop|ret"),
    triple="aarch64",
    syntax=".arch armv8.6-a",
)
CPUS = {
    "avx2": (X86, ("haswell", "skylake", "alderlake", "znver2", "znver3")),
    "avx512": (X86, ("cascadelake", "icelake-server", "sapphirerapids", "znver4")),
    "avx512_bf16": (X86, ("sapphirerapids", "znver4")),
    "neon": (AARCH64, ("neoverse-n1", "neoverse-v1", "neoverse-v2", "apple-m1")),
    "neon_bf16": (AARCH64, ("neoverse-v1", "neoverse-v2")),
}


@dataclass(frozen=True)
class Loop:
    machine: Machine
    function: str
    instructions: tuple[str, ...]

    @property
    def multiply_adds(self) -> list[str]:
        return [x for x in self.instructions if self.machine.multiply_add.match(x)]


def innermost_loops(disassembly: str, machine: Machine = X86) -> list[Loop]:
    """Of objdump -d -C --no-show-raw-insn."""
    found: list[Loop] = []
    function = ""
    code: list[tuple[int, str]] = []  # (address, instruction) of the function

    def close() -> None:
        at = {address: i for i, (address, _) in enumerate(code)}
        ends: list[tuple[int, int]] = []
        for i, (_, text) in enumerate(code):
            jump = machine.jump.match(text)
            start = at.get(int(jump[1], 16), i) if jump else i
            if start < i and not any(a >= start for a, _ in ends):  # none inside
                found.append(Loop(machine, function, tuple(x for _, x in code[start : i + 1])))
            if start < i:
                ends.append((start, i))

    for line in disassembly.splitlines():
        if title := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            close()
            function, code = title[1], []
        elif instruction := re.match(r"\s*([0-9a-f]+):\t(.*)", line):
            code.append((int(instruction[1], 16), machine.comment.sub("", instruction[2]).strip()))
    close()
    return found


def template(function: str) -> str:
    """Its name alone, without namespaces, result, what it is instantiated with, and arguments."""
    name = re.sub(r"attnjourney::|\(anonymous namespace\)::|\b(?:avx|amx|neon)\w*::", "", function)
    depth, result = 0, ""
    for x in name:
        depth -= x == ">"
        result += x if depth == 0 and x != ">" and x != "<" else ""
        depth += x == "<"
    return result.partition("(")[0].rpartition(" ")[2]


def main_loops(disassembly: str, machine: Machine = X86, least: int = 24) -> list[Loop]:
    """Of each function the loop with most multiply-adds, of loops without a store, half of whose instructions are
    those."""
    best: dict[str, Loop] = {}
    for loop in innermost_loops(disassembly, machine):
        n, name = len(loop.multiply_adds), loop.function
        if n < least or 2 * n < len(loop.instructions) or any(machine.store.match(x) for x in loop.instructions):
            continue
        if name not in best or n > len(best[name].multiply_adds):
            best[name] = loop
    return list(best.values())


def in_words_of_llvm(instruction: str) -> str:
    """Broadcasts from memory, as llvm writes them."""
    broadcast = re.search(r"(D|Q)WORD BCST (\[[^]]*\])", instruction)
    if not broadcast:
        return instruction
    width = 64 if "zmm" in instruction else 32 if "ymm" in instruction else 16
    size = width // (4 if broadcast[1] == "D" else 8)
    return instruction.replace(broadcast[0], f"{broadcast[1]}WORD PTR {broadcast[2]}{{1to{size}}}")


def cycles(instructions: list[str], machine: Machine, cpu: str) -> float:
    """Of one iteration."""
    body = [in_words_of_llvm(x) for x in instructions if not machine.skipped.match(x)]
    program = shutil.which("llvm-mca-19") or "llvm-mca"
    command = [program, f"-mtriple={machine.triple}", f"-mcpu={cpu}", f"-iterations={ITERATIONS}", "-"]
    text = "\n".join([machine.syntax, *body]) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if not total:
        raise RuntimeError(f"llvm-mca -mcpu={cpu}: {done.stderr.strip()[:500]}")
    return int(total[1]) / ITERATIONS


def free_multiply_adds(loop: Loop) -> list[str]:
    """As many as hide their latency, of the kind that most of the loop's are."""
    if loop.machine is X86:
        kind, operands = loop.multiply_adds[0].split(maxsplit=1)
        register = re.sub(r"\d+$", "", operands.split(",")[0])
        return [f"{kind} {register}{i},{register}14,{register}15" for i in range(14)]
    kind = mode(re.sub(r"\[\d+\]", "[0]", re.sub(r"\bv\d+", "v%d", x)) for x in loop.multiply_adds)
    return [kind % (i, 30, 15) for i in range(29) if i != 15]


def share(loop: Loop, cpu: str) -> float:
    """Of the multiply-adds that the model does in a cycle if they wait for nothing."""
    free = free_multiply_adds(loop)
    taken = cycles(list(loop.instructions), loop.machine, cpu)
    return len(loop.multiply_adds) / taken * cycles(free, loop.machine, cpu) / len(free)


def disassemble(path: Path, machine: Machine) -> str:
    command = [*machine.objdump, "-d", "-C", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def objects(folder: Path, isa: str) -> list[Path]:
    """Those that are compiled for this ISA, whose names begin with it (setup.py)."""
    names = {
        path: [name for name in CPUS if path.stem == name or path.stem.startswith(f"{name}_")]
        for path in sorted(folder.glob(f"{isa}*.o"))
    }
    return [path for path, of_path in names.items() if max(of_path, key=len, default="") == isa]


def families(loops: Iterable[Loop]) -> dict[str, list[Loop]]:
    """Loops by the names of their templates, those with most multiply-adds first."""
    result: dict[str, list[Loop]] = {}
    for loop in sorted(loops, key=lambda loop: -len(loop.multiply_adds)):
        result.setdefault(template(loop.function), []).append(loop)
    return dict(sorted(result.items()))


def cell(loops: list[Loop], cpu: str) -> str:
    """Of the longest loop, and of the one that is furthest from the bound."""
    shares = [share(loop, cpu) for loop in loops]
    return f"{shares[0]:.2f}" + (f" ({min(shares):.2f})" if min(shares) < shares[0] - 0.005 else "")


def table(folders: dict[Machine, Path]) -> str:
    lines: list[str] = []
    for isa, (machine, cpus) in CPUS.items():
        paths = objects(folders[machine], isa)
        if not paths or not shutil.which(machine.objdump[0]):
            lines += [f"{isa}: no objects in {folders[machine]}, or no {machine.objdump[0]}", ""]
            continue
        found = families(loop for path in paths for loop in main_loops(disassemble(path, machine), machine))
        cells = [
            [f"`{name}`", str(len(loops)), str(len(loops[0].multiply_adds)), *(cell(loops, cpu) for cpu in cpus)]
            for name, loops in found.items()
        ]
        lines += rows([f"{isa}: main loops of", "loops", "longest", *cpus], cells) + [""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m tools.main_loops", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    for machine, folder in ((X86, "release"), (AARCH64, "release-aarch64")):
        path = ROOT / "build" / folder / "csrc/cpu/isa"
        p.add_argument(f"--{machine.triple}", type=Path, default=path, help="the objects of a build for it")
    args = p.parse_args(argv)
    if missing := [name for name in ("objdump", "llvm-mca") if not (shutil.which(name) or shutil.which(name + "-19"))]:
        p.error(f"not on PATH: {', '.join(missing)}")
    print(table({X86: args.x86_64, AARCH64: args.aarch64}), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
