"""python -m tools.test_wheel: installs the wheel of dist/ without a compiler, runs the smoke tests (make test-wheel).

The tests come out of the sdist beside it. Environments are made of the Pythons on PATH and of the torches that pip's
index has, so that each of both occurs; or of those that are named, all with all. They are removed afterwards.

With --rebuild, on the machine that has made the wheel: builds one from the sdist, with the torch of this interpreter,
and compares the two byte by byte.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tools.test_torches import releases

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
NEEDED = ("pytest", "pytest-xdist", "numpy", "expecttest")  # by the smoke tests


def works(python: str) -> bool:
    """Whether it is there; a name on PATH may lead nowhere."""
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0


def combinations(pythons: list[str], torches: list[str]) -> list[tuple[str, str]]:
    """As few as let each occur: newest with newest."""
    count = max(len(pythons), len(torches))
    return [(pythons[max(i - count, -len(pythons))], torches[max(i - count, -len(torches))]) for i in range(count)]


def unpacked_tests(sdist: Path, into: Path) -> Path:
    """The sdist without the package, which is to be the installed one."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (folder,) = into.iterdir()
    shutil.rmtree(folder / "attnjourney")
    return folder


def smoke_files(folder: Path) -> list[str]:
    paths = sorted((folder / "tests").rglob("test_*.py"))
    return [str(path.relative_to(folder)) for path in paths if "mark.smoke" in path.read_text()]


def passes(python: str, torch: str, wheel: Path, sdist: Path) -> str:
    """What came of it, in a word or two."""
    with tempfile.TemporaryDirectory() as scratch:
        environment, tests = Path(scratch, "venv"), unpacked_tests(sdist, Path(scratch, "sdist"))
        subprocess.run([shutil.which(python) or python, "-m", "venv", environment], check=True)
        inside = str(environment / "bin" / "python")
        install = [inside, "-m", "pip", "install", "-q", f"torch=={torch}", *NEEDED, str(wheel)]
        if subprocess.run(install).returncode:
            return "not to be had"
        # no compiler: nothing but the environment is on PATH
        bare = {**os.environ, "PATH": str(environment / "bin"), "PYTHONPATH": "", "CXX": "none", "CC": "none"}
        check = "import attnjourney, torch; print(attnjourney.__file__, attnjourney.__version__, torch.__version__)"
        if subprocess.run([inside, "-W", "error", "-c", check], env=bare, cwd=scratch).returncode:
            return "import FAILED"
        command = [inside, "-m", "pytest", "-q", "--durations=0", "-m", "smoke", *smoke_files(tests)]
        return "FAILED" if subprocess.run(command, env=bare, cwd=tests).returncode else "passed"


def contents(wheel: Path) -> dict[str, bytes]:
    """By name, without what the platform's name is in."""
    with zipfile.ZipFile(wheel) as archive:
        names = (name for name in archive.namelist() if not name.endswith(("/", "dist-info/RECORD", "dist-info/WHEEL")))
        return {name: archive.read(name) for name in names}


def differences(one: Path, other: Path) -> list[str]:
    """The files that are not the same in two wheels, or in one of them alone; dates do not count."""
    first, second = contents(one), contents(other)
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def rebuilt(sdist: Path, wheel: Path) -> str:
    """What came of it, in a word or two."""
    cuda = str(int(any(name.endswith("_C_cuda.so") for name in contents(wheel))))
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(Path(scratch, "sdist"), filter="data")
        (folder,) = Path(scratch, "sdist").iterdir()
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", scratch, "."]
        if subprocess.run(command, cwd=folder, env={**os.environ, "ATTNJOURNEY_CUDA": cuda}).returncode:
            return "FAILED"
        (again,) = Path(scratch).glob("*.whl")
        different = differences(wheel, again)
        return f"FAILED, not the same: {', '.join(different)}" if different else "the same"


def newest(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"test-wheel: no dist/{pattern}: run make wheel first")
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="(the newest of dist/)")
    parser.add_argument("--sdist", type=Path, help="(the newest of dist/)")
    parser.add_argument("--python", nargs="+", help=f"(those of {PYTHONS[0]} to {PYTHONS[-1]} that are there)")
    parser.add_argument("--torch", nargs="+", help="(the newest of each minor version)")
    parser.add_argument("--rebuild", action="store_true", help="a wheel out of the sdist instead, beside the wheel")
    arguments = parser.parse_args()
    wheel, sdist = arguments.wheel or newest("*.whl"), arguments.sdist or newest("*.tar.gz")
    if arguments.rebuild:
        result = rebuilt(sdist.resolve(), wheel.resolve())
        print(f"a wheel out of {sdist.name}: {result}")
        sys.exit(result != "the same")
    pythons, torches = arguments.python or list(filter(works, PYTHONS)), arguments.torch or releases()
    if arguments.python and arguments.torch:
        pairs = [(python, torch) for python in pythons for torch in torches]
    else:
        pairs = combinations(pythons, torches)
    results = {pair: passes(*pair, wheel.resolve(), sdist.resolve()) for pair in pairs}
    for (python, torch), result in results.items():
        print(f"{python}, torch {torch}: {result}")
    sys.exit(any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    main()
