"""What the compiled library asks of its surroundings, and what it shows them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attnjourney import _library

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "attnjourney" / "_C_cpu.so"
NODE_LIBRARY = ROOT / "attnjourney" / "_C_node.so"  # by torch's C++ interface, for one torch
CUDA_LIBRARY = ROOT / "build" / "cuda" / "attnjourney" / "_C_cuda.so"
OBJECTS = ROOT / "build" / "release" / "csrc" / "cpu" / "isa"

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="attnjourney/_C_cpu.so is not built in place"),
]


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type letter, demangled name) of every symbol that nm lists."""
    text = subprocess.run(["nm", "-C", *options, path], check=True, capture_output=True, text=True).stdout
    return [(m[1], m[2]) for m in re.finditer(r"^[0-9a-f ]{16} (\S) (.+)$", text, re.MULTILINE)]


def undefined(library: Path = LIBRARY) -> list[str]:
    return [name for _, name in symbols(library, "-D", "--undefined-only")]


def test_no_symbol_of_torchs_unstable_cpp_interface_is_needed():
    assert [name for name in undefined() if re.search(r"\b(at|c10|torch|caffe2)::", name)] == []


@pytest.mark.parametrize("library", [LIBRARY, NODE_LIBRARY], ids=lambda path: path.stem)
def test_no_python_symbol_is_needed(library):
    if not library.exists():
        pytest.skip(f"{library} is not built")
    assert [name for name in undefined(library) if re.match(r"_?Py", name)] == []


def test_only_torchs_c_interface_and_the_compilers_runtime_are_needed():
    torch_c = re.compile(r"(aoti_torch|torch)_\w+")
    runtime = re.compile(r".+@(GLIBC|GLIBCXX|CXXABI|GCC|GOMP|OMP)_[\d.]+")  # libc, libm, libstdc++, libgcc_s, libgomp
    weak = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}  # absent is fine
    needed = undefined()
    assert any(torch_c.fullmatch(name) for name in needed)
    assert [n for n in needed if not (torch_c.fullmatch(n) or runtime.fullmatch(n) or n in weak)] == []


@pytest.mark.parametrize("library", [LIBRARY, CUDA_LIBRARY, NODE_LIBRARY], ids=lambda path: path.stem)
def test_systems_from_glibc_2_28_on_can_load_it(library):
    """csrc/core/older_systems.cpp; for CUDA's runtime older_homes in setup.py. The limits are those of manylinux_2_28,
    which is what torch itself is built for."""
    if not library.exists():
        pytest.skip(f"{library} is not built")
    oldest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
    newer = []
    for name in undefined(library):
        kind, _, version = name.rpartition("@")[2].partition("_")
        numbers = tuple(map(int, re.findall(r"\d+", version)))
        if kind in oldest and numbers > oldest[kind]:
            newer.append(name)
    assert newer == []


def test_only_the_last_error_is_exported():
    assert symbols(LIBRARY, "-D", "--defined-only") == [("T", "attnjourney_last_error")]


def test_what_the_library_of_nodes_exports():
    if not NODE_LIBRARY.exists():
        pytest.skip(f"{NODE_LIBRARY} is not built")
    exported = symbols(NODE_LIBRARY, "-D", "--defined-only")
    assert exported == [("T", "attnjourney_node_add"), ("T", "attnjourney_node_counts")]


@pytest.mark.parametrize("library", [LIBRARY, NODE_LIBRARY], ids=lambda path: path.stem)
def test_no_path_of_the_build_machine_is_in_it(library):
    if not library.exists():
        pytest.skip(f"{library} is not built")
    assert re.findall(rb"[ -~]*(?:site-packages|include/torch)[ -~]*", library.read_bytes()) == []


def test_no_function_compiled_for_a_newer_processor_can_replace_one_for_all_processors():
    """A weak function (an inline one that was not inlined, a template) may be emitted in several object files, and the
    linker keeps one copy for all of them: compiled for AVX-512, it would crash the scalar path of an older processor.
    Kernels sit in an anonymous namespace and use no container; what the files of an instruction set share sits in a
    namespace of its name, in one of them."""
    objects = sorted(OBJECTS.glob("*.o"))
    if not objects:
        pytest.skip("no object files in build/: the library was built elsewhere")
    weak = [name for path in objects for kind, name in symbols(path, "--defined-only") if kind in "Wu"]
    of_a_set = re.compile(r"(void )?attnjourney::(avx2|avx512|amx|neon|scalar)::\w+(<[^()]*>)?\(")
    assert [name for name in weak if not of_a_set.match(name)] == []
    assert sorted(name for name in set(weak) if weak.count(name) > 1) == []


def test_nothing_compiled_for_a_newer_processor_runs_when_the_library_is_loaded():
    """A table that is not a constant would be filled by a constructor in its own file, by its own instructions."""
    objects = sorted(OBJECTS.glob("*.o"))
    if not objects:
        pytest.skip("no object files in build/: the library was built elsewhere")
    dynamic = re.compile(r"_GLOBAL__sub_I|__static_initialization|__cxx_global_var_init")
    assert [
        (path.name, name) for path in objects for _, name in symbols(path, "--defined-only") if dynamic.search(name)
    ] == []


def test_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNJOURNEY_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(ImportError, match="C\\+\\+ library is not built: run `make build` or `pip install .`"):
        _library.load.__wrapped__()


def test_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.10.1+cpu")
    with pytest.raises(ImportError, match="needs torch >= 2.11, and torch 2.10.1"):
        _library.load.__wrapped__()
