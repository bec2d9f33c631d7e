"""python -m examples.demo: the command line. Exit code 0 all well, 1 a check failed, 2 wrong input, 130 interrupted."""

import argparse
import os
import sys
from pathlib import Path


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Trains byte-level GPTs on real text: MHA, GPT, GQA and MLA on torch.ops.attnjourney, and the same "
        "model on PyTorch's own attention; ends with a report.",
        epilog="Ctrl-C keeps what was learnt: the same command goes on from there.",
    )
    add = parser.add_argument
    add("--text", type=Path, help="a text file or a folder of them (default: Python's standard library)")
    add("--out", type=Path, default=Path("demo-output"), help="folder for report and checkpoints (%(default)s)")
    add("--fresh", action="store_true", help="forget earlier checkpoints in that folder")
    add("--full", action="store_true", help="train longer: minutes on two cores in place of two")
    sizes = parser.add_argument_group("sizes", "the defaults take two minutes on two cores")
    for name in ("steps", "batch", "context", "layers", "embed", "heads", "seed"):
        sizes.add_argument(f"--{name}", type=positive, metavar="N", default=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = vars(arguments(argv))
    path, out, fresh, full = (args.pop(name) for name in ("text", "out", "fresh", "full"))
    try:
        from rich.console import Console  # what takes seconds to import comes after the arguments were read

        from examples.config import FULL_STEPS, Config
        from examples.data import TextError, load_text
        from examples.pipeline import run
    except ImportError as error:
        return fail(f"{error} (`make demo` installs and builds all that is needed)")
    except KeyboardInterrupt:
        return interrupted()

    config = Config(**{**({"steps": FULL_STEPS} if full else {}), **args})
    if config.problem():
        return fail(config.problem())
    try:
        text = load_text(path, config.context)
        checkpoints = out / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        if fresh:
            for file in checkpoints.glob("*.pt"):
                file.unlink()
    except TextError as error:
        return fail(error)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        return interrupted()

    try:
        results = run(config, text, out, Console())
    except KeyboardInterrupt:
        return interrupted()
    failed = [check.text for check in results.checks if not check.passed]
    if failed:
        print(f"demo: {len(failed)} of {len(results.checks)} checks failed: {failed[0]}", file=sys.stderr)
        return 1
    return 0


def fail(reason: object) -> int:
    print(f"demo: {reason}", file=sys.stderr)
    return 2


def interrupted() -> int:
    print("demo: interrupted; the same command goes on from the last checkpoint (--fresh starts over)", file=sys.stderr)
    return 130


if __name__ == "__main__":
    # Before torch is loaded: waiting threads sleep. Spinning, they would take the cores from the working ones on a busy
    # machine, and training would be several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
