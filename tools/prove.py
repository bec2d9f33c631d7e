"""Runs the emulator's tests that have not passed with what they are made of now, and records those that pass:

    python -m tools.prove [file ...]       the named ones of tests/emulator, such as test_jvp.py, even if they have

As many files at once as there are cores. Exits with 1 if a test fails.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.conftest import SLOW
from tests.emulator.host import proved


def run(test: Path) -> tuple[str, str | None, float]:
    """Its name, its digest if all its tests pass, and seconds."""
    before, begin = proved.digest(test), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", str(test.relative_to(proved.ROOT))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("ATTNJOURNEY_EMULATOR", None)
    done = subprocess.run(command, cwd=proved.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return test.name, before if done.returncode == 0 else None, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files of tests/emulator; default: those that are not proved")
    names = {Path(name).name for name in parser.parse_args().files}
    wanted = [path for path in proved.tests() if (path.name in names if names else path not in proved.proved())]
    order = [Path(name).name for name in SLOW]
    wanted.sort(key=lambda path: order.index(path.name) if path.name in order else len(order))
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in as_completed([pool.submit(run, path) for path in wanted]):
            name, value, seconds = future.result()
            print(f"{'passed' if value else 'FAILED'}  {seconds:6.0f} s  {name}", flush=True)
            failed += value is None
            record = proved.recorded()
            record.pop(name, None)
            present = {path.name for path in proved.tests()}
            record = {key: text for key, text in record.items() if key in present} | ({name: value} if value else {})
            proved.RECORD.write_text("".join(f"{text}  {key}\n" for key, text in sorted(record.items())))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
