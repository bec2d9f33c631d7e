"""`make gpu` (tools/gpu.py): its parts, limits and cases, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(*args):
    return subprocess.run([sys.executable, "tools/gpu.py", *args], cwd=ROOT, capture_output=True, text=True)


def test_parts_in_order(tmp_path):
    lines = script("--list", "--out", str(tmp_path)).stdout.splitlines()
    parts = [line.split()[0] for line in lines]
    assert list(dict.fromkeys(parts)) == ["conformance", "tests", "sanitizer", "bench"]
    assert not list(tmp_path.iterdir())


def test_one_part_and_its_cases():
    done = script("--list", "--part", "bench", "--cases", "gqa8")
    assert done.returncode == 0 and all(line.startswith("bench (") for line in done.stdout.splitlines())
    assert done.stdout.count("--case gqa8") == len(done.stdout.splitlines())


def test_an_unknown_part_is_named():
    done = script("--part", "benches")
    assert done.returncode == 2
    assert "--part: unknown benches; there are conformance, tests, sanitizer, bench" in done.stderr


def test_a_failing_part_shows_in_the_summary(tmp_path):
    commands = len(script("--list", "--part", "bench").stdout.splitlines())
    done = script("--part", "bench", "--seconds", "0", "--out", str(tmp_path))
    assert done.returncode == 0
    assert (tmp_path / "summary.txt").read_text().count("skipped: no time left") == commands
    done = script("--part", "bench", "--cases", "there-is-no-such", "--out", str(tmp_path))
    assert done.returncode == 1
    assert (tmp_path / "summary.txt").read_text().count("status 2") == commands


@pytest.mark.parametrize("pattern", ["gpu-bf16", "gpu-flex", "gpu-options"])
def test_the_cases_exist(pattern):
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.cases import GPU_CASES, select
    finally:
        sys.path.remove(str(ROOT))
    found = select(pattern, GPU_CASES)
    assert found and {case.dtype for case in found} == {"bf16"}
    assert all(case.batch * case.heads * case.q_len > 0 and case.batch * case.q_len == 16384 for case in found)
