"""python -m tools.test_torches: the smoke tests under every torch that pip's index has (make test-torches).

Of each minor version from the oldest supported one on, the newest release; each in an environment of its own, made by
`make test-torch` and removed afterwards unless --keep is given. Nothing is built again.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (2, 11)


def releases() -> list[str]:
    """The newest of each minor version, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    listed = re.search(r"Available versions: (.*)", text)
    if listed is None:
        raise SystemExit(f"test-torches: pip's index lists no torch: {text}")
    newest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for version in re.findall(r"\d+\.\d+\.\d+", listed[1]):
        numbers = tuple(map(int, version.split(".")))
        if numbers >= OLDEST:
            newest[numbers[:2]] = max(numbers, newest.get(numbers[:2], numbers))
    return [".".join(map(str, numbers)) for _, numbers in sorted(newest.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are (5 GB each)")
    parser.add_argument("versions", nargs="*", help="these alone")
    arguments = parser.parse_args()
    results = {}
    for version in arguments.versions or releases():
        results[version] = subprocess.run(["make", "test-torch", f"TORCH={version}"], cwd=ROOT).returncode
        if not arguments.keep:
            shutil.rmtree(ROOT / f".venv-{version}", ignore_errors=True)
    for version, status in results.items():
        print(f"torch {version}: {'passed' if status == 0 else 'FAILED'}")
    sys.exit(any(results.values()))


if __name__ == "__main__":
    main()
