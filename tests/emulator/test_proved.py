"""What a test of the emulator is made of: all of it counts when `make test` leaves out what has passed before."""

import shutil

from tests.emulator.host import proved

KERNELS = proved.ROOT / "csrc/cuda/kernels"


def names(test: str) -> set[str]:
    return {path.relative_to(proved.ROOT).as_posix() for path in proved.made_of(proved.EMULATOR / test)}


def test_every_kernel_belongs_to_a_test():
    used = set().union(*(proved.made_of(test) for test in proved.tests()))
    assert not {path for path in KERNELS.rglob("*.cuh")} - used


def test_what_a_test_is_made_of():
    found = names("test_jvp.py")
    for part in ("emulator/test_jvp.py", "emulator/test_options.py", "emulator/faults/jvp.py", "emulator/host/run.py"):
        assert f"tests/{part}" in found
    for part in ("machine/wgmma.cpp", "programs/jvp.cpp", "programs/kernels/jvp.h"):
        assert f"tests/emulator/{part}" in found
    assert {"csrc/cuda/kernels/sm80/jvp.cuh", "csrc/cuda/ptx/sm80.cuh", "csrc/core/mask.h"} <= found
    assert {"tests/support/plain.py", "attnjourney/reference/dropout.py"} <= found
    assert "csrc/cuda/kernels/sparse/forward.cuh" not in found


def test_a_change_is_noticed(monkeypatch, tmp_path):
    """In a copy of the tree: of a kernel, of a header that it includes, of what the test imports."""
    for folder in ("tests/emulator", "tests/support", "csrc/cuda", "csrc/core", "attnjourney/reference"):
        shutil.copytree(proved.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in proved.made_of(proved.EMULATOR / "test_rows.py"):
        copy = tmp_path / path.relative_to(proved.ROOT)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    emulator = tmp_path / "tests/emulator"
    monkeypatch.setattr(proved, "ROOT", tmp_path)
    monkeypatch.setattr(proved, "EMULATOR", emulator)
    monkeypatch.setattr(proved, "RECORD", emulator / "proved.txt")
    programs = {path.stem: path for path in (emulator / "programs").glob("*.cpp")}
    monkeypatch.setattr(proved, "PROGRAMS", programs)

    def digest() -> str:
        for function in (proved._imported, proved._included, proved.proved):
            function.cache_clear()
        return proved.digest(emulator / "test_rows.py")

    seen = [digest()]
    assert digest() == seen[0] == proved.digest(emulator / "test_rows.py")
    (emulator / "proved.txt").write_text(f"{seen[0]}  test_rows.py\n")
    assert proved.proved() == {emulator / "test_rows.py"}
    parts = [path for path in proved.made_of(emulator / "test_rows.py") if path.suffix in (".cuh", ".py", ".h")]
    assert len(parts) > 20
    for path in (*parts[:8], emulator / "machine/warp.cpp", emulator / "test_rows.py"):
        with path.open("a") as file:
            file.write("\n")
        seen.append(digest())
        assert proved.proved() == frozenset()
    assert len(set(seen)) == len(seen)
    with (tmp_path / "csrc/cuda/kernels/sparse/forward.cuh").open("a") as file:
        file.write("\n")
    assert digest() == seen[-1]
    for function in (proved._imported, proved._included, proved.proved):
        function.cache_clear()
