"""Every instruction set this CPU has gives right values; one that cannot run or is unknown is refused."""

import functools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnjourney

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
X86 = {
    "amx_fp16": AVX512 | {"avx512_bf16", "amx_bf16", "amx_fp16"},
    "amx": AVX512 | {"avx512_bf16", "amx_bf16"},
    "avx512_bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avx2": AVX2,
}
ARM64 = {"neon_bf16": {"asimd", "bf16"}, "neon": {"asimd"}}
# best first, as the library chooses
NEEDS = {**(ARM64 if platform.machine() == "aarch64" else X86), "scalar": set()}


def cpu_flags():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    listed = (line.split(":")[1].split() for line in lines if line.startswith(("flags", "Features")))
    return set(next(listed, ()))


FLAGS = cpu_flags()
UNKNOWN = ("sse9", "AVX2", "avx")
HERE_RUNS = [isa for isa, needs in NEEDS.items() if needs <= FLAGS]


def pays(isa):
    """Whether it is taken unasked: Intel's cores have products of bfloat16 pairs at half the rate of float32."""
    return isa != "avx512_bf16" or "GenuineIntel" not in Path("/proc/cpuinfo").read_text()


DEFAULT = next((isa for isa in HERE_RUNS if pays(isa)), "scalar")
# of all tests: values at every length and dim, empty rows and NaN, lists of blocks, the exact bits of dropout
SELECTION = [
    "attention/test_attention_forward.py::test_values_and_gradients",
    "attention/test_attention_forward.py::test_every_residue_of_the_lengths",
    "attention/test_attention_forward.py::test_first_keys_far_below_or_above_the_rest",
    "attention/test_attention_backward.py::test_gradient_of_lse",
    "attention/test_masks.py::test_causal_and_mask_compose",
    "attention/test_masks.py::test_a_broadcast_mask_equals_its_copy",
    "attention/test_empty_and_nan.py",
    "attention/test_dropout.py::test_keeps_what_the_counter_says",
    "cache/test_decode.py::test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other",
    "linear/test_linear_attention.py::test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other",
    "linear/test_gated_linear_attention.py::test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other",
    "attention/test_block_mask.py::test_values_and_gradients",
    "attention/test_block_mask.py::test_what_is_hidden_does_not_leak",
    "sparse/test_sparse_attention.py::test_values_that_are_a_part_of_the_keys",
    "sparse/test_lightning_indexer.py::test_numbers_that_are_not_finite",
    "attention/test_attention_fp8.py::test_values",
    "attention/test_attention_fp8.py::test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other",
]
# values of options, derivatives, decoding and linear attention: tests/kernels calls the tables of this machine for them
IN_KERNELS = [
    "attention/test_dropout.py::test_values_and_gradients",
    "cache/test_decode.py::test_values",
    "options/test_options.py::test_values_and_gradients",
    "linear/test_linear_attention.py::test_values_and_gradients",
    "linear/test_gated_linear_attention.py::test_values_and_gradients",
    "attention/test_derivatives.py::test_values",
    "attention/test_block_mask.py::test_second_derivatives",
]


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )


# Children of a process that has torch alone: each chooses an instruction set, imports the library and calls it.
CHOICES = """
import json, os, sys, torch
for isa in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["ATTNJOURNEY_ISA"] = isa
        try:
            import attnjourney
            x = torch.ones(1, 1, 4, 8)
            outcome = {"sum": attnjourney.attention(x, x, x).sum().item(), **attnjourney.cpu_info()}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(outcome), flush=True)
        os._exit(0)
    os.wait()
"""


@functools.cache
def outcomes():
    """What each choice of ATTNJOURNEY_ISA comes to; "": none."""
    choices = ["", *NEEDS, *UNKNOWN]
    result = run("-c", CHOICES, *choices, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    return dict(zip(choices, map(json.loads, result.stdout.splitlines()), strict=True))


OF_FLOAT16 = ("-k", "torch.float16 and not bfloat16")


def isa_of(process_environment):
    """The instruction set that a fresh process uses."""
    result = run("-c", "import attnjourney; print(attnjourney.cpu_info()['isa'])", **process_environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(not FLAGS, reason="no /proc/cpuinfo with x86 flags")
@pytest.mark.parametrize("isa", NEEDS)
def test_values_on(isa):
    if isa not in HERE_RUNS:
        pytest.skip(f"this CPU has no {isa}")
    if isa.startswith("amx"):  # by itself it takes sizes that few tests have; but for float16 both are the same
        only = OF_FLOAT16 if isa == "amx_fp16" else ()
        run_selection(SELECTION, *only, ATTNJOURNEY_ISA=isa, ATTNJOURNEY_TUNING="matrix")
        return
    if isa == (os.environ.get("ATTNJOURNEY_ISA") or DEFAULT):
        pytest.skip(f"{isa} is what all other tests run on")
    # but for bfloat16 the kernels of avx512 are those of avx512_bf16, which the other tests run on
    only = ("-k", "bfloat16") if (isa, DEFAULT) == ("avx512", "avx512_bf16") else ()
    run_selection(SELECTION, *only, ATTNJOURNEY_ISA=isa)


def run_selection(selection, *options, **environment):
    tests = [str(TESTS / test) for test in selection]
    options = ("-q", "-x", "-p", "no:cacheprovider", "--durations=0", "--tb=short", *options)
    result = run("-m", "pytest", *options, *tests, OMP_NUM_THREADS="1", **environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and "failed" not in result.stdout


@pytest.mark.skipif(
    "avx512_bf16" not in HERE_RUNS, reason="this CPU has no avx512_bf16, which the kernel needs as well"
)
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="no sources to build from")
def test_the_kernel_of_a_matrix_unit_on_a_twin_of_it():
    """The kernels of `amx` and `amx_fp16`, their matrix instructions replaced by the same in C++: three files are
    built anew."""
    twin = {"ATTNJOURNEY_AMX_TWIN": "1"}
    built = run("setup.py", "-q", "build_ext", "--build-lib", "build/twin", **twin)
    assert built.returncode == 0, built.stdout + built.stderr
    library = {"ATTNJOURNEY_LIBRARY_DIR": str(ROOT / "build/twin/attnjourney")}
    for isa in ("amx", "amx_fp16"):
        library["ATTNJOURNEY_ISA"] = isa
        assert isa_of(library) == isa
    library["ATTNJOURNEY_TUNING"] = "matrix"
    run_selection(SELECTION + IN_KERNELS, *OF_FLOAT16, **library)
    library["ATTNJOURNEY_ISA"] = "amx"
    run_selection(SELECTION + IN_KERNELS, "-k", "bfloat16 or nan or row or length", **library)


@pytest.mark.parametrize("name", ("amx", "MATRIX"))
def test_an_unknown_tuning_is_refused(name):
    result = run("-c", "import attnjourney; attnjourney.cpu_info()", ATTNJOURNEY_TUNING=name)
    expected = f"ATTNJOURNEY_TUNING: expected 'generic', 'intel' or 'matrix', got '{name}'"
    assert result.returncode != 0 and expected in result.stderr


# prints the tuning, and how many keys the forward takes at a time at two head dimensions
BLOCKS = """
import attnjourney, json, torch
info = attnjourney.cpu_info()
plans = [attnjourney.explain(*(torch.zeros(1, 1, 512, dim),) * 3) for dim in (32, 64)]
print(json.dumps([info["tuning"], *((p["tuning"], p["forward"]["key_block"]) for p in plans)]))
"""


def blocks_of(**environment):
    result = run("-c", BLOCKS, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.skipif("avx512" not in HERE_RUNS, reason="long key blocks are those of AVX-512")
@pytest.mark.parametrize("name, keys", [("generic", 144), ("intel", 288)])
def test_a_tuning_chooses_the_key_blocks(name, keys):
    info, (of_small, small), (of_large, large) = blocks_of(ATTNJOURNEY_TUNING=name, ATTNJOURNEY_ISA="avx512")
    assert (info["name"], info["forced"], of_small, of_large) == (name, name, name, name)
    assert (small, large) == (144, keys)


@pytest.mark.skipif(not FLAGS, reason="no /proc/cpuinfo with x86 flags")
def test_the_tuning_is_that_of_the_vendor():
    info = blocks_of(ATTNJOURNEY_TUNING="")[0]
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}
    given = re.search(r"^vendor_id\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert info["vendor"] == vendor.get(given[1] if given else "", info["vendor"])
    assert info["name"] == ("intel" if info["vendor"] == "intel" else "generic") and info["forced"] == ""
    for level, kind in ((0, "l1"), (2, "l2")):  # of index0, index1 one is of instructions
        cache = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}")
        if info[f"{kind}_bytes"] and cache.exists():
            assert f"{info[f'{kind}_bytes'] // 1024}K" == (cache / "size").read_text().strip()
            assert f"{info[f'{kind}_ways']}" == (cache / "ways_of_associativity").read_text().strip()


@pytest.mark.parametrize("name", ("generic", "intel"))
def test_values_with_the_tuning(name):
    others = ("amx_fp16", "amx", "avx512_bf16")  # which take most of it themselves
    isa = next(isa for isa in HERE_RUNS if isa not in others)
    selection = ["attention/test_attention_forward.py::test_longer_than_a_tile"]
    run_selection(selection, ATTNJOURNEY_TUNING=name, ATTNJOURNEY_ISA=isa)


@pytest.mark.skipif(not FLAGS, reason="no /proc/cpuinfo with x86 flags")
def test_an_isa_this_cpu_lacks_is_refused():
    lacking = [isa for isa in NEEDS if isa not in HERE_RUNS]
    if not lacking:
        pytest.skip("this CPU runs every instruction set")
    for isa in lacking:
        error = outcomes()[isa]["error"]
        assert error.startswith("RuntimeError: ") and "ATTNJOURNEY_ISA" in error and isa in error


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_isa_is_refused(name):
    error = outcomes()[name]["error"]
    assert error.startswith("RuntimeError: ")
    for part in ("ATTNJOURNEY_ISA", *NEEDS, repr(name)):
        assert part in error


def test_an_empty_choice_is_no_choice():
    assert outcomes()[""]["sum"] == 32


@pytest.mark.skipif(not FLAGS, reason="no /proc/cpuinfo with x86 flags")
def test_the_best_isa_is_taken_and_a_forced_one_is_used():
    assert attnjourney.cpu_info()["found"] == HERE_RUNS
    assert outcomes()[""]["isa"] == DEFAULT
    for isa in HERE_RUNS:
        assert (outcomes()[isa]["isa"], outcomes()[isa]["sum"]) == (isa, 32)
