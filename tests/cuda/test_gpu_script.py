"""`make gpu` (tools/gpu.py) without a GPU: its parts, limits and cases, and a whole run of stand-ins."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import ceilings, peers, run  # noqa: E402
from benchmarks.cases import GPU_CASES, select  # noqa: E402
from tools import gpu, gpu_calls, gpu_parts  # noqa: E402
from tools.gpu_parts import Step  # noqa: E402

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"^(?:pytestmark = |@)pytest\.mark\.cuda", re.M)


def shell(part, name, script, seconds=5.0, **more):
    return Step(part, name, ["sh", "-c", script], seconds, **more)


def test_parts_are_in_order_and_fit():
    steps = gpu_parts.steps(Path("out"))
    parts = [step.part for step in steps]
    assert tuple(dict.fromkeys(parts)) == gpu_parts.PARTS and parts == sorted(parts, key=gpu_parts.PARTS.index)
    assert len({(step.part, step.name) for step in steps}) == len(steps)
    seconds = {part: sum(step.seconds for step in steps if step.part == part) for part in gpu_parts.PARTS}
    assert sum(seconds.values()) <= 800  # of 15 minutes, in which the machine starts too
    assert seconds["conformance"] + seconds["warmup"] + seconds["tests"] <= 540  # of one command of ten
    assert seconds["sanitizer"] + seconds["bench"] <= 540


def test_one_part_and_its_cases(capsys, tmp_path):
    assert gpu.main(["--list", "--part", "bench", "--cases", "gqa8", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("bench ") and "--case gqa8" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--part", "benches"])
    assert f"--part: unknown benches; there are {', '.join(gpu_parts.PARTS)}" in capsys.readouterr().err


def test_every_test_for_a_gpu_is_in_a_family():
    marked = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py") if path != Path(__file__)
              and MARKED.search(path.read_text())}  # fmt: skip
    chosen = {}
    for (file, *words), _ in gpu_parts.FAMILIES.values():
        chosen.setdefault(file, []).append(words)
    assert set(chosen) == marked
    for file, words in chosen.items():
        if words != [[]]:  # two halves
            (_, some), (_, others) = sorted(words, key=lambda x: x[1].startswith("not "))
            assert others == f"not ({some})", file


def test_every_case_is_in_one_group_of_rows_and_the_most_telling_come_first():
    found = [case.name for cases, _, _ in gpu_parts.ROWS.values() for case in select(cases, GPU_CASES)]
    assert sorted(found) == sorted(case.name for case in GPU_CASES)
    assert found[:2] == ["gpu-bf16-d128-n8192-full", "gpu-bf16-d128-n8192-causal"]
    assert found[4].startswith("gpu-bf16-d64-n8192")
    assert list(gpu_parts.ROWS)[:3] == ["d128, 8k", "d64 and 1k", "decode"]
    decode = [case.name.split("-")[1] for case in select("gpu-decode", GPU_CASES)]
    assert decode == ["decode"] * 5 + ["latent"] * 2


@pytest.mark.parametrize("pattern", ["gpu-bf16", "gpu-flex", "gpu-options"])
def test_the_cases_exist(pattern):
    found = select(pattern, GPU_CASES)
    assert found and {case.dtype for case in found} == {"bf16"}
    assert all(case.batch * case.heads * case.q_len > 0 and case.batch * case.q_len == 16384 for case in found)


def test_the_calls_are_right():
    assert gpu_calls.main(["--device", "cpu"]) == 0


def test_the_benchmarks_make_one_table(tmp_path, monkeypatch):
    """The commands as they are, on the CPU: cases of a few numbers, and peers that need no compiler."""
    monkeypatch.setattr(run, "CASES", [case.tiny() for case in GPU_CASES])
    monkeypatch.setattr(ceilings, "survey", lambda device, threads: {})
    monkeypatch.setattr(ceilings, "for_case", lambda case, device, threads: ("fma", {"fma": lambda: 1e9}))
    monkeypatch.setattr(run.machine, "git", lambda *args: "")
    monkeypatch.setattr(gc, "collect", lambda: 0)  # half a second a row in a process of tests
    for step in gpu_parts.steps(tmp_path):
        if step.part == "bench":
            assert step.command[1:3] == ["-m", "benchmarks.run"]
            arguments = ["cpu" if word == "cuda" else word.replace(",flex", "") for word in step.command[3:]]
            assert run.main([*arguments, "--threads", "1", "--seconds", "0.0001"]) == 0
    names = {f"bench{which}.{kind}" for which in ("", "-sm80") for kind in ("json", "md")}
    assert {path.name for path in tmp_path.iterdir()} == names
    document = json.loads((tmp_path / "bench.json").read_text())
    rows = [(case.name, which) for case in GPU_CASES for which in ("forward", "backward") if which in case.passes]
    assert document["finished"] and sorted((r["name"], r["pass"]) for r in document["cases"]) == sorted(rows)
    assert all("seconds" in record["results"]["ours"] for record in document["cases"])
    table = (tmp_path / "bench.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in table if line.startswith("| gpu")] == [
        [f"| {record['name']}", record["pass"]] for record in document["cases"]
    ]
    assert {"fa2", "fa3", "sdpa-cudnn"} <= set(document["missing"])


# --------------------------------------------------------------------------------- a whole run, with stand-ins


def gone(pid):
    """No process of that number, or soon none, or one that only waits to be asked how it ended."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def rows_of(out):
    lines = [line.strip("| ").split(" | ") for line in (out / "summary.md").read_text().splitlines()]
    return {(cells[0], cells[1]): cells[2:] for cells in lines if cells[0] in gpu_parts.PARTS}


HANGS = """trap "" INT; echo begun; echo half >{out}/tests-a.xml; sleep 60 & echo $! >{out}/child; wait; echo ended"""
REPORTS = """trap "echo report; exit 2" INT; sleep 60 & wait"""


def test_a_whole_run(tmp_path, monkeypatch, capfd):
    out = tmp_path / "out"
    steps = [
        shell("conformance", "nvcc", "echo compiled"),
        shell("conformance", "run", "echo a wrong answer; exit 3"),
        shell("warmup", "kernels", "echo $MODE $CUDA_CACHE_MAXSIZE", environment={"MODE": "loud"}),
        shell("tests", "hangs", HANGS.format(out=out), 0.6),
        shell("tests", "reports", REPORTS, 0.6),
        shell("tests", "passes", "echo '=== 3 passed, 1 skipped in 0.12s ==='"),
        shell("sanitizer", "memcheck", "echo Error: Device not supported; exit 1", cannot="Device not supported"),
        Step("sanitizer", "racecheck", ["no-such-tool"], 5),
        shell("sanitizer", "none", "false", skip="for Hopper alone"),
        shell("bench", "first", f"echo row >{out}/bench.md; exit 0"),
        shell("bench", "second", f"touch {out}/ran-on", 60),
    ]
    monkeypatch.setattr(gpu, "steps", lambda out, cases: steps)
    assert gpu.main(["--out", str(out), "--seconds", "9.9"]) == 1
    results = {name: cells[2] for (_, name), cells in rows_of(out).items()}
    assert results == {
        "nvcc": "ok", "run": "status 3", "kernels": "ok",
        "hangs": "no end after 0.3 s", "reports": "no end after 0.3 s",
        "passes": "ok: 3 passed, 1 skipped in 0.12s", "memcheck": "skipped: Device not supported",
        "racecheck": "skipped: no no-such-tool on PATH or in CUDA_HOME", "none": "skipped: for Hopper alone",
        "first": "ok", "second": "skipped: no time left",
    }  # fmt: skip
    text = (out / "summary.md").read_text()
    assert text.splitlines()[2].startswith("**Conformance failed")
    assert "Failed: conformance run, tests hangs, tests reports.\n" in text
    assert "`make gpu PART=bench` runs them" in text
    assert text in capfd.readouterr().out
    assert (out / "tests.log").read_text() == (
        "--- tests: hangs\nbegun\n--- tests: reports\nreport\n--- tests: passes\n=== 3 passed, 1 skipped in 0.12s ===\n"
    )
    assert (out / "warmup.log").read_text().splitlines()[-1] == f"loud {4 << 30}"
    assert (out / "tests-a.xml").read_text() == "half\n" and gone((out / "child").read_text().strip())
    times = [float(cells[1]) for cells in rows_of(out).values() if cells[1] != "-"]
    assert len(times) == 9 and sum(times) < 9.9 and not (out / "ran-on").exists()

    # what was left, in a second call: rows of the other parts stay, the part's own files are new
    steps[-2:] = [shell("bench", "second", f"test ! -e {out}/bench.md")]
    assert gpu.main(["--out", str(out), "--part", "bench"]) == 0
    again = rows_of(out)
    assert list(again) == [(step.part, step.name) for step in steps]
    assert again["bench", "second"][2] == "ok" and again["tests", "hangs"][2] == "no end after 0.3 s"
    assert "No time" not in (out / "summary.md").read_text()
    assert "Conformance failed" in (out / "summary.md").read_text()


def test_the_summary_is_there_before_a_command_ends(tmp_path, monkeypatch):
    copy = f"cp {tmp_path}/summary.md {tmp_path}/seen"
    monkeypatch.setattr(gpu, "steps", lambda out, cases: [shell("warmup", "a", "true"), shell("tests", "b", copy)])
    assert gpu.main(["--out", str(tmp_path)]) == 0
    seen = (tmp_path / "seen").read_text()
    assert re.search(r"\| warmup \| a \| [\d :-]+ \| [\d.]+ \| ok \| warmup.log \|", seen)
    assert re.search(r"\| tests \| b \| [\d :-]+ \| - \| did not end \| tests.log \|", seen)


def test_commands_end_with_the_script(tmp_path):
    program = f"""
from tools import gpu
from tools.gpu_parts import Step
command = ["sh", "-c", "sleep 60 & echo $! >{tmp_path}/child.part; mv {tmp_path}/child.part {tmp_path}/child; wait"]
gpu.steps = lambda out, cases: [Step("tests", "a", command, 60), Step("bench", "b", ["touch", "{tmp_path}/b"], 60)]
gpu.main(["--out", "{tmp_path}"])
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    child, limit = tmp_path / "child", time.monotonic() + 30
    while not child.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 143 and gone(child.read_text().strip())
    assert rows_of(tmp_path) == {("tests", "a"): [*rows_of(tmp_path)["tests", "a"][:2], "did not end", "tests.log"]}


def test_peers_of_the_commands_exist():
    for _, names, _ in gpu_parts.ROWS.values():
        assert len(peers.find(names)) == len(names.split(","))
