"""What nvcc made of the kernels, kernel by kernel: tests/cuda/kernels.txt holds it."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.emulator.host import build

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests/cuda/kernels.txt"
OBJECTS = ROOT / "build/release/csrc/cuda"
COLUMNS = ("registers", "bytes spilled", "bytes of shared memory", "HGMMA")
NONE = "-"
REPORT = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)
STACK = re.compile(
    r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
# named after a kernel, whose shared memory they do not take
PASSES = ("backward_query", "backward_key_value", "fp16x2_query")
# kernels whose first template argument is not what holds kSmemBytes
SHARED = {
    "fp16x2_backward": "{}",
    "fp16x2_planes": "Fp16x2Size<{}>",
    "sm90_fp16x2_forward": "typename Sm90Fp16x2Forward<{}>::Shape",
}


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)


def find_cuobjdump() -> str | None:
    """Beside nvcc, on PATH, or in the packages nvidia-cuda-cuobjdump and -nvdisasm."""
    places = [str(Path(nvcc).resolve().parent) for nvcc in [find_nvcc()] if nvcc] + [os.environ.get("PATH", "")]
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations if packages else ():
        places += map(str, sorted(Path(folder).glob("*/bin")))
    return shutil.which("cuobjdump", path=os.pathsep.join(places))


def names_of(mangled: list[str], archs: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    short = [
        re.sub(r"attnjourney::|void |\(\w+\)(?=\d)|__nv_|\([^()]*\)$", "", name) for name in done.stdout.splitlines()
    ]
    return [f"{arch} {name}" for arch, name in zip(archs, short)]


def ptxas_reports() -> tuple[dict[str, tuple[int, int]], list[str]]:
    """{kernel: (registers, bytes spilled)}, and ptxas' warnings."""
    logs = [path.read_text() for path in sorted(OBJECTS.rglob("*.o.log"))]
    found = [match.groups() for log in logs for match in REPORT.finditer(log)]
    names = names_of([f[0] for f in found], [f[1] for f in found])
    kernels = {name: (int(f[4]), int(f[2]) + int(f[3])) for name, f in zip(names, found)}
    return kernels, [line for log in logs for line in log.splitlines() if re.search(r"\bC75\d\d\b|warning", line)]


def stack_frames() -> list[str]:
    """What has a stack frame though nothing is spilled: arrays that are indexed, or parameters copied, in memory."""
    found = [m.groups() for path in sorted(OBJECTS.rglob("*.o.log")) for m in STACK.finditer(path.read_text())]
    return [name for name, frame, *spilled in found if int(frame) and not any(map(int, spilled))]


def wgmma_counts() -> dict[str, int]:
    """{kernel: HGMMA in all of it}, of those that have some; {} without cuobjdump."""
    tool, counts = find_cuobjdump(), {}
    for path in sorted(OBJECTS.glob("inst/sm90/*.o")) if tool else ():
        sass = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
        parts = [part.split(None, 1) for part in sass.split("Function : ")[1:]]
        found = [len(re.findall("HGMMA", p[1])) for p in parts]
        names = names_of([p[0] for p in parts], ["sm_90a"] * len(parts))
        counts |= {name: n for name, n in zip(names, found) if n}
    return counts


def first_argument(arguments: str) -> str:
    """Of a template, from what follows its `<`."""
    depth = 0
    for i, c in enumerate(arguments):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if depth < 0 or (depth == 0 and c == ","):
            return arguments[:i].strip()
    return arguments


def shared_bytes(kernels: list[str]) -> dict[str, int]:
    """{kernel: its kSmemBytes}, of those that have one: a program prints them."""
    types = {}
    for kernel in kernels:
        name, _, arguments = kernel.split(None, 1)[1].partition("<")
        first = first_argument(arguments)
        if name not in PASSES and (name in SHARED or "<" in first):
            types[kernel] = SHARED.get(name, "{}").format(first)
    used = sorted(set(types.values()))
    headers = sorted((ROOT / "csrc/cuda/kernels").rglob("*.cuh"))
    lines = [f'#include "{header}"' for header in headers]
    lines += ["using namespace attnjourney;", "using bfloat16 = Bf16;", "using __half = Half;"]
    lines += [
        "template <class K> int bytes() { if constexpr (requires { K::kSmemBytes; }) return K::kSmemBytes; return 0; }"
    ]
    lines += ["int main() {", *(f'std::printf("%d\\n", bytes<{t}>());' for t in used), "}"]
    folder = ROOT / "build/cuda"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shared.cpp").write_text("\n".join(lines) + "\n")
    command = [build.CXX, *build.COMMON, *build.CHECKED, "-O0", "-include", str(build.prefix()), f"-I{ROOT / 'csrc'}"]
    command += [
        f"-I{ROOT / 'tests'}",
        str(folder / "shared.cpp"),
        *map(str, build.emulator_objects()),
        "-lubsan",
        "-ldl",
    ]
    subprocess.run([*command, "-o", str(folder / "shared")], check=True, capture_output=True)
    printed = subprocess.run([str(folder / "shared")], capture_output=True, text=True, check=True).stdout.split()
    sizes = dict(zip(used, map(int, printed)))
    return {kernel: sizes[t] for kernel, t in types.items() if sizes[t]}


def present() -> dict[str, tuple[int, int, int | None, int | None]]:
    """{kernel: what COLUMNS say}; None: not of this kernel, or not to be found out here."""
    kernels, _ = ptxas_reports()
    shared, hgmma = shared_bytes(list(kernels)), wgmma_counts()
    return {name: (*pair, shared.get(name), hgmma.get(name)) for name, pair in kernels.items()}


def written(release: str, kernels: dict) -> str:
    head = f"nvcc {release}; {', '.join(COLUMNS)}; kernel"
    lines = []
    for name, (registers, spilled, shared, hgmma) in sorted(kernels.items()):
        lines.append(f"{registers:3} {spilled:3} {shared or NONE:>6} {hgmma or NONE:>3} {name}")
    return "\n".join([head, *lines]) + "\n"


def recorded() -> tuple[str, dict]:
    """The release of nvcc, and what present() said."""
    head, *lines = RECORD.read_text().splitlines()
    fields = [line.split(None, 4) for line in lines]
    return head.split(";")[0].removeprefix("nvcc "), {
        f[4]: tuple(None if x == NONE else int(x) for x in f[:4]) for f in fields
    }
