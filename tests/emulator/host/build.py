"""Builds and runs the emulator's programs (see emulator.h): g++ alone is needed, no CUDA toolkit.

What is built lies in build/emulator under a name made of everything that went into it, so it is built once. Sources are
taken not to change while a process runs: what it has built or found is kept in memory.
"""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.emulator.host import planted
from tests.emulator.host.planted import Fault

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build/emulator"
MACHINE = ROOT / "tests/emulator/machine"  # the GPU
PROGRAMS = ROOT / "tests/emulator/programs"
CXX = os.environ.get("CXX") or "g++"
COMMON = ("-std=c++20", "-Wall", "-Wextra", "-Wno-terminate", "-Wno-unknown-pragmas")
# The kernel's file: accesses through the hooks of memory.cpp, arrays and alignment checked, registers start as noise.
CHECKS = ("-g1", "-fsanitize=thread,bounds,alignment", "-fno-sanitize-recover=bounds,alignment")
CHECKS += ("--param", "tsan-instrument-func-entry-exit=0", "-ftrivial-auto-var-init=pattern")
CHECKED = ("-O1", *CHECKS)
# What calls the kernels: arguments, tensors, plans.
HOST = ("-O0",)
PARTS = ["scheduler", "memory", "warp", "fp32", "tma", "wgmma", "driver"]


def unsupported() -> str | None:
    """Why the emulator cannot run here, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the emulator switches fibers in x86-64 assembly; this is {platform.machine()}"
    if shutil.which(CXX) is None:
        return f"no compiler: {CXX}"
    return None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def _name(*inputs: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in inputs:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def _sources(*files: Path) -> list[bytes]:
    return [part for path in sorted(files) for part in (path.name.encode(), path.read_bytes())]


def _kernels(csrc: Path) -> list[Path]:
    """The files that kernels are made of."""
    core = (csrc / f"core/{name}.h" for name in ("constants", "mask", "philox"))
    return [*core, *csrc.glob("*/*params.h"), *csrc.glob("cuda/**/*.cuh")]


@functools.cache
def _digest(csrc: Path) -> str:
    """Of the files that kernels are made of; the name of a copy with a fault says all that is in it."""
    return csrc.name if csrc.parent == BUILD else _name(*_sources(*_kernels(csrc)))


def _once(target: Path, make) -> Path:
    """make(temporary path) unless target is there already; whoever else wants it, thread or process, waits."""
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        path = target.with_name(f"{target.name}.lock")
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                fresh = target.with_name(f"{target.name}.{os.getpid()}")
                make(fresh)
                fresh.replace(target)
            path.unlink(missing_ok=True)
    return target


@functools.cache
def emulator_objects() -> list[Path]:
    headers = [path.read_bytes() for path in sorted(MACHINE.glob("*.h"))]

    def compile_part(part: str) -> Path:
        source = MACHINE / f"{part}.cpp"
        target = BUILD / f"{part}-{_name(*headers, source.read_bytes())}.o"
        return _once(target, lambda out: _run([CXX, *COMMON, "-O3", "-c", str(source), "-o", str(out)]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_part, PARTS))


@functools.cache
def prefix(flags: tuple[str, ...] = CHECKED) -> Path:
    """What every program includes of the emulator, compiled once for all of them."""
    headers = ["driver.h", "ptx_sm90.h", "ptx_fp32.h"]
    text = "".join(f'#include "{MACHINE / header}"\n' for header in headers)

    def make(out: Path) -> None:
        out.mkdir()
        (out / "prefix.h").write_text(text)
        command = [CXX, *COMMON, *flags, f"-I{ROOT / 'tests'}", "-x", "c++-header", str(out / "prefix.h")]
        _run([*command, "-o", str(out / "prefix.h.gch")])

    name = _name(text, CXX, *COMMON, *flags, *_sources(*MACHINE.glob("*.h")))
    return _once(BUILD / f"prefix-{name}", make) / "prefix.h"


def _object(file: Path, flags: tuple[str, ...], defines: tuple[str, ...], csrc: Path) -> Path:
    files = [file, *PROGRAMS.rglob("*.h"), *MACHINE.glob("*.h")]
    name = _name(CXX, *COMMON, *flags, *_sources(*files), _digest(csrc), *defines)

    def make(out: Path) -> None:
        command = [CXX, *COMMON, *flags, "-include", str(prefix(flags)), f"-I{csrc}", f"-I{ROOT / 'tests'}"]
        command += [f"-D{d}" for d in defines]
        _run([*command, "-x", "c++", "-c", str(file), "-o", str(out)])

    return _once(BUILD / f"{file.stem}-{name}.o", make)


@functools.cache
def _built(source: str, defines: tuple[str, ...], faults: tuple[Fault, ...]) -> Path:
    file, kernels = PROGRAMS / f"{source}.cpp", PROGRAMS / f"kernels/{source}.h"
    product = ROOT / "csrc"
    csrc = _sources_with(faults) if faults else product
    if kernels.exists():
        instance = "INSTANCE(...)={} decltype(__VA_ARGS__) __VA_ARGS__"
        checked = _object(kernels, CHECKED, (*defines, instance.format("template")), csrc)
        objects = [checked, _object(file, HOST, (*defines, instance.format("extern template")), product)]
    else:
        objects = [_object(file, CHECKED, defines, csrc)]
    objects += emulator_objects()

    def make(out: Path) -> None:
        _run([CXX, *map(str, objects), "-lubsan", "-ldl", "-o", str(out)])

    return _once(BUILD / f"{source}-{_name(*(path.name for path in objects))}", make)


_companions: dict[tuple, tuple[Fault, ...]] = {}  # of a program with a fault: all faults that are compiled into it


def program(source: str, defines: tuple[str, ...] = (), fault: Fault | None = None) -> tuple[str, ...]:
    """programs/<source>.cpp, with the product's kernels or with a fault in them: the command that runs it.

    Where there is programs/kernels/<source>.h, it is compiled on its own, checked, and <source>.cpp only calls the
    instances it names; of a kernel with a fault that alone is compiled, the calls being the product's. A function that
    both have is taken from the checked object, which is linked first.
    """
    if fault is None:
        return (str(_built(source, defines, ())),)
    faults = _companions.get((source, defines, fault), (fault,))
    return str(_built(source, defines, faults)), f"fault={faults.index(fault) + 1}"


def build_all(requests: list[tuple]) -> None:
    """Makes program(*request) for all of them, as many at once as there are cores, and all faults of a program in one:
    it is told at run time which of them it has."""
    together: dict[tuple, list[Fault]] = {}
    for request in requests:
        source, defines, fault = (*request, *((), None)[len(request) - 1 :])
        faults = together.setdefault((source, defines, fault is None), [])
        faults += [fault] if fault and fault not in faults else []
    for (source, defines, _), faults in together.items():
        _companions.update({(source, defines, fault): tuple(faults) for fault in faults})
    emulator_objects()
    for flags in (CHECKED, HOST):
        prefix(flags)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: _built(*item[0][:2], tuple(item[1])), together.items()))


def _sources_with(faults: tuple[Fault, ...]) -> Path:
    """A copy of csrc/ with faults, of which a program is told one: see planted.py."""
    files: dict[str, dict[int, tuple[str, str]]] = {}
    for number, (file, old, new) in enumerate(faults, 1):
        files.setdefault(file, {})[number] = (old, new)
    texts = {}
    for file, some in files.items():
        try:
            texts[file] = planted.switched((ROOT / "csrc/cuda/kernels" / file).read_text(), some)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def make(out: Path) -> None:
        for source in _kernels(ROOT / "csrc"):
            copy = out / source.relative_to(ROOT / "csrc")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
        for file, text in texts.items():
            (out / "cuda/kernels" / file).write_text(text)

    parts = [part for file, text in sorted(texts.items()) for part in (file, text)]
    return _once(BUILD / f"faulty-{_name(_digest(ROOT / 'csrc'), *parts)}", make)
