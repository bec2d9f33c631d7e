"""python -m attnjourney.show: a text, a model that reads it, and a page of where its heads look.

Exit code 0 all well, 2 wrong input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .byte_gpt import ByteGPT

TEXT = """def attention(query, key, value):
    scores = query @ key.T
    return softmax(scores) @ value
"""
STEPS = 300


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m attnjourney.show",
        description="Shows where each head of a byte-level GPT looks in a text: one HTML page that needs no network, "
        "or a PNG of all heat maps.",
        epilog="Without --checkpoint a small model is trained on the spot: half a minute.",
    )
    add = parser.add_argument
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", help="what the model reads (default: three lines of Python)")
    text.add_argument("--file", type=Path, help="a file with the text")
    add(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a model that `make demo` trained or --save kept: a file, a folder of the demo's, or just `demo` for "
        "demo-output here",
    )
    add("--variant", default="gpt", choices=("mha", "gpt", "gqa", "mla"), help="which of the demo's (%(default)s)")
    add("--steps", type=count, default=STEPS, help="of the training without --checkpoint (%(default)s); 0: untrained")
    add("--save", type=Path, metavar="FILE", help="keeps the trained model, to be given as --checkpoint")
    add("--layers", type=ranges, metavar="0,2-3", help="the layers shown (default: all)")
    add("--heads", type=ranges, metavar="0,2-3", help="the heads shown (default: all)")
    add("-o", "--out", type=Path, default=Path("attention.html"), help="*.html or *.png (%(default)s)")
    return parser.parse_args(argv)


def count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def ranges(text: str) -> list[int]:
    """0,2-4 -> [0, 2, 3, 4]"""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) < len(found):
        raise ValueError
    return found


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        run(args)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except (ImportError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:
        print("show: interrupted", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    import torch

    import attnjourney
    from attnjourney import viz

    if args.out.suffix not in (".html", ".png"):
        raise ValueError(f"--out: expected a name that ends in .html or .png, got {args.out}")
    text = args.file.read_bytes() if args.file else os.fsencode(TEXT if args.text is None else args.text)
    longest = viz.MAX_TOKENS if args.out.suffix == ".html" else 8192
    if not 1 <= len(text) <= longest:
        raise ValueError(f"--{'file' if args.file else 'text'}: expected 1 to {longest} bytes, got {len(text)}")
    model, note, warning = trained(args) if args.checkpoint is None else checkpoint(args)
    if model.positions is not None and len(text) > model.positions.num_embeddings:
        raise ValueError(f"text: expected at most the model's {model.positions.num_embeddings} bytes, got {len(text)}")

    layers = chosen("--layers", args.layers, len(model.blocks))
    attention: Any = model.blocks[0].attention
    heads = chosen("--heads", args.heads, attention.num_heads)
    with attnjourney.capture(model, layers=layers, heads=heads) as seen, torch.no_grad():
        model(torch.tensor([list(text)]))

    kind = f"{len(model.blocks)} layers of {attention.num_heads} heads ({type(attention).__name__})"
    note = f"A byte-level GPT: {kind}. {note}"
    tokens = viz.byte_tokens(text)
    if args.out.suffix == ".png":
        labels = [token.text for token in tokens]
        viz.heatmap(list(seen), args.out, layers=layers, tokens=labels, title="What attention looks at")
    else:
        page = viz.page(tokens, list(seen), layers=layers, note=note, warning=warning)
        args.out.write_text(page, encoding="utf-8")
    print(f"{args.out}: {len(layers)} layers, {len(heads)} heads, {len(text)} bytes of text")


def chosen(option: str, given: list[int] | None, size: int) -> list[int]:
    wrong = [number for number in given or () if number >= size]
    if wrong:
        raise ValueError(f"{option}: expected numbers from 0 to {size - 1}, got {wrong[0]}")
    return list(range(size)) if given is None else given


def bits(losses: list[float]) -> str:
    """The training loss at its end, in bits per byte."""
    last = losses[-20:]
    return f"{sum(last) / len(last) / math.log(2):.2f} bits per byte"


def trained(args: argparse.Namespace) -> tuple[ByteGPT, str, str]:
    """A small model, trained here and now: the model, what the page says of it, and a warning."""
    import torch

    from attnjourney.demo.byte_gpt import python_sources, save, small, train

    model, started, losses = small(), time.monotonic(), []
    if args.steps:
        text = python_sources()
        words = f"training a small model on Python's standard library, {args.steps} steps"
        terminal = sys.stderr.isatty()
        if not terminal:
            print(words, file=sys.stderr)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so small a model gains little from more, and loses much where others are at work
        try:
            on_step = (lambda step, loss: show_progress(words, step, args.steps)) if terminal else None
            losses = train(model, text, args.steps, on_step=on_step)
        finally:
            torch.set_num_threads(threads)
        seconds = time.monotonic() - started
        kept = "" if args.save else "; --save FILE keeps it for --checkpoint FILE"
        print(f"trained in {seconds:.0f} s, {bits(losses)}{kept}", file=sys.stderr)
    if args.save:
        save(args.save, model, losses)
    if not args.steps:
        return model.eval(), "", "These weights were never trained: what the heads do here is chance."
    note = f"Trained for {args.steps} steps on the sources of Python's standard library, down to {bits(losses)}."
    return model.eval(), note, ""


def show_progress(words: str, step: int, steps: int) -> None:
    end = "\n" if step == steps else ""
    print(f"\r{words}: {step}", end=end, file=sys.stderr, flush=True)


def checkpoint(args: argparse.Namespace) -> tuple[ByteGPT, str, str]:
    """The same of a model that was trained before."""
    from attnjourney.demo.byte_gpt import load

    if args.save:
        raise ValueError("--save: expected no --checkpoint beside it, whose model is already kept")
    model, losses = load(find(args.checkpoint, args.variant))
    if not losses:
        return model, "", "These weights were never trained: what the heads do here is chance."
    return model, f"Trained for {len(losses)} steps, down to {bits(losses)}.", ""


def find(path: Path, variant: str) -> Path:
    """A file, or the variant's in a folder of the demo's; `demo` is demo-output where nothing else has that name."""
    if path == Path("demo") and not path.exists():
        path = Path("demo-output")
    if path.is_dir():
        for folder in (path, path / "checkpoints"):
            if (folder / f"{variant}.pt").exists():
                return folder / f"{variant}.pt"
        raise ValueError(
            f"--checkpoint: no {variant}.pt in the folder {path} or its checkpoints: run `make demo` first"
        )
    if not path.exists():
        raise ValueError(f"--checkpoint: {path} does not exist; `make demo` trains models, --save keeps one")
    return path


def fail(reason: object) -> int:
    print(f"show: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
