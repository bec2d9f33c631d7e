"""How csrc/ is compiled; everything else about the package is in pyproject.toml.

One library per device, attnjourney/_C_<device>.so, built by plain compiler calls against the headers of the installed
torch, which is found without being imported. The result uses PyTorch's stable C interface only: no Python symbol, no
version of Python or torch. A file is compiled again when it, a header it includes, or its command line has changed.
Besides them _C_node.so, autograd nodes by torch's C++ interface: for the installed torch alone, and nothing is missing
without it but some microseconds a call, so that a torch which it cannot be compiled for is no error.

Environment:
  CXX, CXXFLAGS           the compiler (g++; g++ >= 11 or clang++ 19), and flags put after all others
  CUDA_HOME               where bin/nvcc is, if not on PATH; without nvcc there is no _C_cuda.so
  ATTNJOURNEY_CUDA=1, 0   build _C_cuda.so or not, whatever torch is installed (default: if that torch has CUDA)
  ATTNJOURNEY_CUDA_CODE   compute capabilities to make machine code for, besides Hopper's own kernels (80,90,100,120,
                          those of them that nvcc knows); with one alone, which takes half the time, the driver of
                          another GPU compiles a kernel when it is first called
  ATTNJOURNEY_NODE=1, 0   build _C_node.so, or fail; or do not (default: try)
  MAX_JOBS                compilers running at once (default: the number of cores)
  ATTNJOURNEY_SANITIZE=1  address and undefined-behaviour sanitizers, objects in build/sanitize; a list of instruction
                          sets (scalar,avx2) in place of 1: the kernels of these alone, the others as in a release
  ATTNJOURNEY_KERNELS=1   the objects of the CPU kernels alone, nothing is linked: for tests of another machine's
  ATTNJOURNEY_AMX_TWIN=1  the matrix unit of `amx` and `amx_fp16` in plain C++, for tests where there is none, objects
                          in build/twin
"""

import sys

if sys.platform != "linux":
    system = {"win32": "Windows", "darwin": "macOS"}.get(sys.platform, sys.platform)
    sys.exit(
        f"attnjourney is built for Linux on x86-64 or AArch64 and is not supported on {system} yet: it needs an ELF "
        "linker with version scripts, a compiler with GNU inline assembly (g++ >= 11 or clang++ 19) and fork"
    )

import fcntl
import filecmp
import os
import re
import shlex
import shutil
import site
import subprocess
import sysconfig
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).parent.resolve()
MINIMUM_TORCH = (2, 11)
MINIMUM_NVCC = (12, 5)  # the first with cudaGetDriverEntryPointByVersion
# the oldest torch that can load the library: 0x020b000000000000 for 2.11
TORCH_TARGET = f"-DTORCH_TARGET_VERSION={MINIMUM_TORCH[0] << 56 | MINIMUM_TORCH[1] << 48:#018x}ULL"

# of the machine that the library is for; as for any package, _PYTHON_HOST_PLATFORM=linux-aarch64 names another one
MACHINE = sysconfig.get_platform().split("-", 1)[-1]
X86, ARM64 = MACHINE == "x86_64", MACHINE == "aarch64"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# g++ would load all factors of a register tile before its products, and spill accumulators for them
NEON = ["-fno-schedule-insns", "-Wno-ignored-optimization-argument"]
# csrc/cpu/isa/<isa>.cpp and <isa>_*.cpp: (is this machine of the family, flags); the longest matching name counts
ISAS = {
    "scalar": (True, ["-O1"]),  # half the time to compile; only bfloat16 decoding is slower, by a fifth
    "avx2": (X86, AVX2),
    "avx512": (X86, AVX512),
    "avx512_bf16": (X86, [*AVX512, "-mavx512bf16"]),
    "amx": (X86, [*AVX512, "-mavx512bf16"]),  # its own instructions are written in assembly
    "amx_fp16": (X86, [*AVX512, "-mavx512bf16"]),
    "neon": (ARM64, NEON),
    "neon_bf16": (ARM64, [*NEON, "-march=armv8.2-a+bf16"]),
}
CUDA_CODES = ("80", "90", "100", "120")

_wanted = os.environ.get("ATTNJOURNEY_SANITIZE", "0")
SANITIZED = set(ISAS) if _wanted == "1" else set(_wanted.split(",")) - {"", "0"}  # the instruction sets with checks
if not SANITIZED <= set(ISAS):
    sys.exit(f"ATTNJOURNEY_SANITIZE: expected 0, 1 or some of {', '.join(ISAS)}, got {_wanted}")
SANITIZE = bool(SANITIZED)
OBJECTS = Path("build", "release" if MACHINE == os.uname().machine else f"release-{MACHINE}")
BUILD = Path("build", "sanitize") if SANITIZE else OBJECTS
# the matrix unit's kernels, and the file that says who can run them; all other objects are those of the release
TWIN = {"csrc/cpu/isa/amx.cpp", "csrc/cpu/isa/amx_fp16.cpp", "csrc/cpu/dispatch.cpp"}
TWIN = TWIN if os.environ.get("ATTNJOURNEY_AMX_TWIN") == "1" else set()
KERNELS = os.environ.get("ATTNJOURNEY_KERNELS") == "1"
CXX = shlex.split(os.environ.get("CXX") or "g++")
RELEASE = ["-O2", "-DNDEBUG"]  # not -O3: the loops that matter are unrolled by hand
ENTRY = ["-O1", "-DNDEBUG"]  # what calls kernels
WITH_KERNELS = Path("csrc/cpu/layers")  # a folder of entries that hold kernels of their own
WITHOUT_PREFIX = {"older_systems"}  # defines what torch's headers define inline
NODE = Path("csrc/node/node.cpp")  # by torch's C++ interface
EXPORTS = {"_node": ("attnjourney_node_add", "attnjourney_node_counts")}  # of a library by the end of its name
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if SANITIZE else []
# checks as calls and no more than line numbers: otherwise a kernel file compiles for minutes
WITH_CHECKS = [
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "--param=asan-instrumentation-with-call-threshold=0",
    *SANITIZERS,
]
COMMON = ["-std=c++20", TORCH_TARGET, "-Icsrc", *["-DATTNJOURNEY_X86=1"] * X86, *["-DATTNJOURNEY_ARM64=1"] * ARM64]
CXX_FLAGS = ["-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-ffp-contract=off"]  # fused products are written as such; a*b + c rounds twice, on every machine
CXX_FLAGS += ["-Wall", "-Wextra"]
if "clang" in Path(CXX[0]).name:
    CXX_FLAGS += ["-Wno-unknown-warning-option"]  # of g++ alone
else:  # a sixth of the time that kernels are compiled in, and nothing of the time that they take
    RELEASE += [f"-fno-{x}" for x in ("thread-jumps", "ipa-cp", "ipa-icf", "ipa-sra", "ipa-vrp")]
# ptxas reports registers and spills of each kernel; tests/cuda/test_build.py reads them from the .log files
NVCC_FLAGS = [*COMMON, "-O3", "-DNDEBUG", "-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v"]


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def find_torch() -> Path:
    """The installed torch's directory. pip's isolated build runs the same interpreter with another
    sys.path, hence the directories that interpreter would normally use; importing torch would not work there."""
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    places += [*site.getsitepackages([sys.prefix, sys.exec_prefix, sys.base_prefix]), site.getusersitepackages()]
    for torch in (Path(place, "torch") for place in places if place):
        if (torch / "include/torch/csrc/stable/library.h").exists() and (torch / "version.py").exists():
            break
    else:
        raise PlatformError(
            f"attnjourney is compiled against the installed torch, and {sys.executable} has no "
            f"torch >= {dotted(MINIMUM_TORCH)}: install it first (if it is installed, pass --no-build-isolation)"
        )
    version = re.search(r"__version__ = '(.+)'", (torch / "version.py").read_text()).group(1)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MINIMUM_TORCH:
        raise PlatformError(f"attnjourney needs torch >= {dotted(MINIMUM_TORCH)}, found {version} in {torch}")
    return torch


def without_paths(include: Path) -> list[str]:
    """torch's headers put their path, as it is given, resolved, or from here on (so ccache may give it), into error
    texts: without this machine's part."""
    paths = [str(path) for place in (include, include.resolve()) for path in (place, os.path.relpath(place, ROOT))]
    return [f"-ffile-prefix-map={path}/=" for path in dict.fromkeys(paths)]


def torch_mark(torch: Path) -> str:
    """The torch that _C_node.so is for, as attnjourney/_node.py compares it."""
    text = (torch / "version.py").read_text()
    return " ".join(re.search(rf"^{name} = '(.+)'", text, re.MULTILINE)[1] for name in ("__version__", "git_version"))


def wants_cuda() -> bool:
    wanted = os.environ.get("ATTNJOURNEY_CUDA")
    if wanted:
        return wanted != "0"
    try:
        version = (find_torch() / "version.py").read_text()
    except PlatformError:  # said again when there is something to compile
        return False
    return re.search(r"^cuda\b[^=]*= '", version, re.MULTILINE) is not None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)


def cuda_codes(nvcc: str) -> list[str]:
    wanted = os.environ.get("ATTNJOURNEY_CUDA_CODE")
    if wanted:
        codes = wanted.split(",")
        if not all(re.fullmatch(r"\d{2,3}", code) and int(code) >= 80 for code in codes):
            raise PlatformError(
                f"ATTNJOURNEY_CUDA_CODE: expected capabilities from 80 on, such as 80,90, got {wanted!r}"
            )
        return sorted(set(codes), key=int)
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    return [code for code in CUDA_CODES if f"sm_{code}" in known]


def cuda_archs(nvcc: str) -> dict[str, str]:
    """What a .cu file is compiled for, by the first folder that holds it. inst/ has the kernels: as machine code, and
    as PTX, which serves every later GPU; those of inst/sm90 are for Hopper alone. Other files have no kernels."""
    codes = cuda_codes(nvcc)
    machine = ",".join(f"sm_{code}" for code in codes)
    return {
        "csrc/cuda/inst/sm90": "arch=compute_90a,code=sm_90a",
        "csrc/cuda/inst": f"arch=compute_{codes[0]},code=[{machine},compute_{codes[0]}]",
        "csrc/cuda": "arch=compute_80,code=sm_80",
    }


def check_toolkit(nvcc: str, torch: Path) -> tuple[int, ...]:
    """The release of nvcc. The library holds the toolkit's runtime, which may ask for a newer driver than torch's own
    does."""
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", printed)
    if found is None:
        raise PlatformError(f"{nvcc} --version: expected a release, got {printed!r}")
    release = tuple(map(int, found.groups()))
    if release < MINIMUM_NVCC:
        raise PlatformError(f"attnjourney needs nvcc >= {dotted(MINIMUM_NVCC)}, found {dotted(release)}: {nvcc}")
    of_torch = re.search(r"^cuda\b[^=]*= '(\d+)\.", (torch / "version.py").read_text(), re.MULTILINE)
    if of_torch and release[0] > int(of_torch[1]):
        tell(
            f"attnjourney: nvcc {dotted(release)} is of a later CUDA than torch's {of_torch[1]}: with a driver as old "
            "as torch allows, calls on a GPU fail with 'driver version is insufficient'"
        )
    return release


def nvcc_flags(release: tuple[int, ...]) -> list[str]:
    """Machine code compressed for size, a third of what it takes: by the drivers of CUDA 13, as in torch itself."""
    return [*NVCC_FLAGS, *["--compress-mode=size"] * (release >= (13, 0))]


def isa_of(source: Path) -> str:
    names = [isa for isa in ISAS if source.stem == isa or source.stem.startswith(isa + "_")]
    if not names:
        sys.exit(f"{source}: its name must begin with one of setup.py's ISAS: {', '.join(ISAS)}")
    return max(names, key=len)


def sources(*patterns: str) -> list[Path]:
    return [path.relative_to(ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def shared_sources() -> list[Path]:
    """What no device has of its own, compiled once: every library links these objects, for they share no symbols."""
    folders = ("core", "attention", "decode", "linear", "sparse", "layers")
    return sources(*(f"csrc/{folder}/*.cpp" for folder in folders))


def families(files: Iterable[Path]) -> dict[Path, list[Path]]:
    """The entry and neutral files of a folder are compiled as one, in a third of the time: what they take from torch's
    headers is compiled once. Kernel files are as large as that each."""
    found: dict[Path, list[Path]] = {}
    for file in files:
        alone = file.suffix == ".cu" or file.parent.name == "isa" or file.stem in WITHOUT_PREFIX or file == NODE
        found.setdefault(file if alone else file.parent.with_suffix(".cpp"), []).append(file)
    return found


def cpu_sources() -> list[Path]:
    # Instruction-set files last, simplest first: of an inline function emitted twice the linker keeps the first copy,
    # and that one must run on every machine.
    apart = {*sources("csrc/cpu/isa/*.cpp"), NODE}
    entries = [source for source in sources("csrc/**/*.cpp") if source not in apart]
    isa = [source for source in sources("csrc/cpu/isa/*.cpp") if ISAS[isa_of(source)][0]]
    return isa if KERNELS else [*entries, *sorted(isa, key=lambda source: list(ISAS).index(isa_of(source)))]


def extensions() -> list[Extension]:
    found = [Extension("attnjourney._C_cpu", [str(s) for s in cpu_sources()])]
    if find_nvcc() and wants_cuda() and not SANITIZE and not KERNELS:
        cuda = [*shared_sources(), *sources("csrc/cuda/**/*.cu")]
        found.append(Extension("attnjourney._C_cuda", [str(s) for s in cuda]))
    if os.environ.get("ATTNJOURNEY_NODE") != "0" and not KERNELS:
        optional = os.environ.get("ATTNJOURNEY_NODE") != "1"
        found.append(Extension("attnjourney._C_node", ["csrc/core/older_systems.cpp", str(NODE)], optional=optional))
    return found


def tell(line: str) -> None:
    """Prints the line; pip shows nothing of what a build prints, so there it goes to the terminal, if there is one."""
    print(line, flush=True)
    if "PIP_BUILD_TRACKER" in os.environ:
        try:
            with open("/dev/tty", "w") as terminal:
                print(line, file=terminal)
        except OSError:
            pass


def write_if_new(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Step:
    """One compiler or linker call: runs only if its inputs or its command line changed since its output was made."""

    def __init__(self, output: Path, command: list[str], inputs: list[Path], after: "Step | None" = None):
        self.output, self.command = output, command
        self.after = after  # its output is needed
        self.running: Future[None] | None = None
        self.record = output.with_name(output.name + ".cmd")  # the command line that made the output
        self.depfile = output.with_suffix(".d")  # compiler calls write their headers there
        self.inputs = inputs

    def is_current(self) -> bool:
        if self.after and not self.after.is_current():
            return False
        try:
            made = self.output.stat().st_mtime_ns
            if self.record.read_text() != shlex.join(self.command):
                return False
            inputs = self.inputs
            if self.output.suffix != ".so":
                rule = self.depfile.read_text().replace("\\\n", " ").split(":", 1)[1]
                inputs = [*inputs, *map(Path, shlex.split(rule))]
            return all(path.stat().st_mtime_ns <= made for path in inputs)
        except FileNotFoundError:
            return False

    def run(self) -> None:
        if self.after and self.after.running:
            self.after.running.result()
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.record.unlink(missing_ok=True)
        result = subprocess.run(self.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.output.with_name(self.output.name + ".log").write_text(result.stdout)
        printed = re.sub(r"(?m)^(ptxas info .*|    \d+ bytes stack frame.*|\s*)\n", "", result.stdout)
        tell(f"{self.output}\n{printed}".rstrip())
        if result.returncode != 0:
            raise CompileError(f"this command failed with status {result.returncode}:\n{shlex.join(self.command)}")
        self.record.write_text(shlex.join(self.command))


OLDER_HOMES = {"libpthread.so.0": ("pthread_", "sem_"), "libdl.so.2": ("dl",), "librt.so.1": ("shm_",)}


def older_homes(library: Path, folder: Path) -> list[str]:
    """Libraries to link so that `library`, already linked once, loads with glibc 2.28. glibc 2.34 has moved threads,
    dlopen and shared memory into libc under new versions, and CUDA's static runtime takes them. The stubs made here say
    what the system's libraries of their names have had ever since: the first version of each function."""
    wanted = set(re.findall(r" U (\w+)@GLIBC_2\.3\d\b", dynamic_symbols(library)))
    libc = subprocess.run([*CXX, "-print-file-name=libc.so.6"], check=True, capture_output=True, text=True).stdout
    first: dict[str, str] = {}
    for name, version in re.findall(r" \w (\w+)@(GLIBC_[\d.]+)$", dynamic_symbols(Path(libc.strip())), re.MULTILINE):
        first.setdefault(name, version)
    made = []
    for home, prefixes in OLDER_HOMES.items():
        versions = {name: first[name] for name in sorted(wanted & set(first)) if name.startswith(prefixes)}
        if versions:
            script, source, stub = folder / f"{home}.map", folder / f"{home}.s", folder / home
            script.write_text("".join(f"{version} {{ }};\n" for version in sorted(set(versions.values()))))
            functions = (
                f".globl stub_{name}\n.type stub_{name}, @function\nstub_{name}: ret\n"
                f".symver stub_{name}, {name}@@{version}\n"
                for name, version in versions.items()
            )
            source.write_text(".text\n" + "".join(functions) + '.section .note.GNU-stack,"",@progbits\n')
            options = [f"-Wl,-soname,{home}", f"-Wl,--version-script={script}"]
            subprocess.run([*CXX, "-shared", "-nostdlib", *options, str(source), "-o", str(stub)], check=True)
            made.append(str(stub))
    return made


def dynamic_symbols(library: Path) -> str:
    return subprocess.run(["nm", "-D", str(library)], check=True, capture_output=True, text=True).stdout


class BuildLibraries(build_ext):
    def run(self) -> None:
        os.chdir(ROOT)
        BUILD.mkdir(parents=True, exist_ok=True)
        lock = open(BUILD / "lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build in the same tree waits
        nvcc = find_nvcc()
        if nvcc and any(extension.name.endswith("_cuda") for extension in self.extensions):
            self.nvcc_flags = nvcc_flags(check_toolkit(nvcc, find_torch()))
            self.cuda_archs = cuda_archs(nvcc)
        self.prefix = self.compile_prefix()
        steps = {extension.name: self.compile_steps(extension) for extension in self.extensions}
        # all libraries at once, so that no core waits for the last file of one; in each the slowest files, isa, first,
        # which do not wait for the prefix
        queue = [*[self.prefix] * (not KERNELS), *(step for own in steps.values() for step in reversed(own))]
        stale = {step.output: step for step in queue if not step.is_current()}
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        if stale:
            names = " and ".join(Path(self.get_ext_filename(extension.name)).name for extension in self.extensions)
            isas = ", ".join(isa for isa, (of_this_machine, _) in ISAS.items() if of_this_machine)
            count = f"{len(stale)} of {len({step.output for step in queue})} files, {jobs} at once"
            tell(f"attnjourney builds {names} with CPU kernels for {isas}: {count}, by {CXX[0]}; all take minutes")
        with ThreadPoolExecutor(jobs) as pool:
            for step in stale.values():
                step.running = pool.submit(step.run)
            for step in stale.values():
                if step.output != BUILD / NODE.with_suffix(".o"):
                    step.running.result()
        self.extensions = [x for x in self.extensions if self.is_there(x, stale)]
        for extension in self.extensions if not KERNELS else ():
            built = self.link(extension.name, [step.output for step in steps[extension.name]], stale)
            target = Path(self.get_ext_fullpath(extension.name))
            if not (target.exists() and filecmp.cmp(built, target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                fresh = target.with_name(target.name + ".new")
                shutil.copy2(built, fresh)
                fresh.replace(target)  # in one step: a running process keeps the file it has loaded

    def is_there(self, extension: Extension, stale: dict[Path, Step]) -> bool:
        """Whether all files of the library were compiled; only an optional one may have failed."""
        step = stale.get(BUILD / NODE.with_suffix(".o"))
        if not extension.name.endswith("_node") or step is None:
            return True
        try:
            step.running.result()
        except CompileError:
            if not extension.optional:
                raise
            version = torch_mark(find_torch()).split()[0]
            tell(f"attnjourney: no autograd nodes in C++ for torch {version}, see above: Python's serve, small calls "
                 "take longer")  # fmt: skip
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            return False
        return True

    def entry_command(self, release: list[str]) -> list[str]:
        """What compiles a file that knows torch."""
        flags = WITH_CHECKS if SANITIZE else release
        include = find_torch() / "include"
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))
        return [*CXX, *COMMON, *flags, *CXX_FLAGS, *without_paths(include), "-isystem", str(include), *extra]

    def compile_prefix(self) -> Step:
        """torch's headers, which take most of an entry file's compilation, compiled once for all of them."""
        header = BUILD / "prefix.h"
        text = "".join(
            f"#include <torch/csrc/stable/{name}.h>\n" for name in ("accelerator", "library", "ops", "tensor")
        )
        write_if_new(header, text)
        output = BUILD / "prefix.h.gch"
        command = [*self.entry_command(ENTRY), "-x", "c++-header", "-MD", "-MF", str(output.with_suffix(".d"))]
        return Step(output, [*command, str(header), "-o", str(output)], [header])

    def compile_steps(self, extension: Extension) -> list[Step]:
        include = find_torch() / "include"
        headers = ["-isystem", str(include)]
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))

        steps = []
        for source, files in families(map(Path, extension.sources)).items():
            twin = ["-DATTNJOURNEY_AMX_TWIN=1"] if TWIN & set(map(str, files)) else []
            of_isa = isa_of(source) if source.parent.name == "isa" else None
            checked = SANITIZE and (of_isa is None or of_isa in SANITIZED)
            folder = Path("build", "twin") if twin else BUILD if checked or not SANITIZE else OBJECTS
            output = folder / source.with_suffix(".o")
            after = None
            if files != [source]:
                source = folder / source
                write_if_new(source, "".join(f'#include "{file.relative_to("csrc")}"\n' for file in files))
            if source == NODE:  # no prefix, and no limit to the stable interface
                torch = find_torch()
                macros = f'-DATTNJOURNEY_TORCH="{torch_mark(torch)}"'
                flags = [flag for flag in COMMON if flag != TORCH_TARGET] + (WITH_CHECKS if SANITIZE else ENTRY)
                command = [*CXX, *flags, *CXX_FLAGS, macros, *without_paths(include), *headers, *extra]
            elif source.suffix == ".cu":
                arch = next(arch for folder, arch in self.cuda_archs.items() if source.is_relative_to(folder))
                command = [find_nvcc(), "-ccbin", CXX[0], *self.nvcc_flags, "-gencode", arch, *headers]
                if not source.is_relative_to("csrc/cuda/inst"):  # these know no torch
                    command += [f"-Xcompiler={flag}" for flag in without_paths(include)]
            elif of_isa is None:
                kernels = files[0].parent == WITH_KERNELS
                command = [*self.entry_command(RELEASE if kernels else ENTRY), *twin]
                if not kernels and source.stem not in WITHOUT_PREFIX:  # made by the same flags
                    after = self.prefix
                    command += ["-include", str(after.output.with_suffix(""))]
            else:
                flags = WITH_CHECKS if checked else RELEASE
                command = [*CXX, *COMMON, *flags, *CXX_FLAGS, *ISAS[of_isa][1], *twin, *headers, *extra]
            command += ["-MD", "-MF", str(output.with_suffix(".d")), "-c", str(source), "-o", str(output)]
            steps.append(Step(output, command, [source], after))
        return steps

    def link(self, name: str, objects: list[Path], fresh: Container[Path]) -> Path:
        """Links the library `name`, unless it is current and none of its objects is fresh."""
        # The library registers its operators when it is loaded, and exports what attnjourney/_errors.py reads.
        # No rpath: torch is already there.
        names = next((names for end, names in EXPORTS.items() if name.endswith(end)), ("attnjourney_last_error",))
        exports = BUILD / f"{name.split('.')[-1]}.map"
        exports.write_text(f"{{ global: {'; '.join(names)}; local: *; }};\n")
        output = (Path("build", "twin") if TWIN else BUILD) / f"{name.split('.')[-1]}.so"
        link = ["-shared", "-o", str(output), *map(str, objects), f"-L{find_torch() / 'lib'}"]
        if name.endswith("_cuda"):
            command = [find_nvcc(), "-ccbin", CXX[0], "-cudart", "static", *link]
            command += ["-Xlinker", f"--version-script={exports}"]
        else:
            checks = [] if SANITIZE else ["-Wl,-z,defs"]
            command = [*CXX, *SANITIZERS, *link, *checks, f"-Wl,--version-script={exports},--as-needed"]
        # libstdc++ before torch, which has copies of some of its functions
        libraries = ["-lstdc++", "-ltorch_cpu", "-ltorch", "-lc10"]
        step = Step(output, [*command, *libraries], objects)
        if any(path in fresh for path in objects) or not step.is_current():
            step.run()
            homes = older_homes(output, BUILD) if name.endswith("_cuda") and X86 else []
            stubs = [word for home in homes for word in ("-Xlinker", home)]
            if stubs:
                Step(output, [*command, *stubs, *libraries], objects).run()
                step.record.write_text(shlex.join(step.command))
        return output

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python version in the name: it holds no Python symbol

    def get_source_files(self) -> list[str]:
        headers = sources("csrc/**/*.h", "csrc/**/*.cuh")
        return [str(path) for path in [*sources("csrc/**/*.cpp", "csrc/**/*.cu"), *headers]]


class Wheel(bdist_wheel):
    def run(self) -> None:
        # an earlier build may have left files there that are no longer part of the package
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel})
