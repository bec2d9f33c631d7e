"""Writes attnjourney/torch_ops.pyi, what type checkers and editors know of torch.ops.attnjourney, from the schemas.

    python -m tools.torch_ops_stub [--check]

Run it after a schema has changed. --check writes nothing and exits with 1 if the file is not what it would be.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import torch

import attnjourney
from attnjourney._names import operator_names

STUB = Path(attnjourney.__file__).parent / "torch_ops.pyi"
HEAD = '''\
"""The operators of torch.ops.attnjourney, typed. Written by tools/torch_ops_stub.py from their schemas."""

# fmt: off

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

class Operator(Generic[P, R]):
    """A torch._ops.OpOverloadPacket; `default` is its one overload."""

    default: Callable[P, R]
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

def _operator(schema: Callable[P, R]) -> Operator[P, R]: ...

'''
SECTIONS = {
    "Public": lambda name: not name.startswith("_") and not name.endswith(DERIVED),
    "Private: what the public operators are made of, their forwards and derivatives": lambda name: name.endswith(
        DERIVED
    ),
    "Private: the others": lambda name: name.startswith("_") and not name.endswith(DERIVED),
}
DERIVED = ("_forward", "_backward", "_jvp")
TYPES = {"Tensor": "Tensor", "float": "float", "int": "int", "bool": "bool", "str": "str"}


def python_type(schema_type: object) -> str:
    """Optional[List[int]] -> Sequence[int] | None"""
    text = str(schema_type)
    for outer, form in (("Optional[", "{} | None"), ("List[", "Sequence[{}]")):
        if text.startswith(outer):
            return form.format(python_type(text[len(outer) : -1]))
    return TYPES[text]


def argument(a: torch._C.Argument) -> str:
    default = f" = {a.default_value!r}" if a.has_default_value() else ""
    return f"{a.name}: {python_type(a.type)}{default}"


def wrapped(parts: list[str]) -> str:
    """The parts, separated by commas, in lines of at most 120 columns that end between parts."""
    lines = [""]
    for i, part in enumerate(parts):
        part += "," if i < len(parts) - 1 else ""
        if len(lines[-1]) + len(part) > 115:
            lines.append("")
        lines[-1] += " " * bool(lines[-1]) + part
    return "\n".join("    " + line for line in lines)


def definition(name: str) -> str:
    schema = getattr(torch.ops.attnjourney, name).default._schema
    keywords = [argument(a) for a in schema.arguments if a.kwarg_only]
    arguments = [argument(a) for a in schema.arguments if not a.kwarg_only] + ["*"] * bool(keywords) + keywords
    returns = [python_type(r.type) for r in schema.returns]
    result = "None" if not returns else returns[0] if len(returns) == 1 else f"tuple[{', '.join(returns)}]"
    text = f"@_operator\ndef {name}(" + (f"\n{wrapped(arguments)}\n" if arguments else "") + f") -> {result}:"
    if len(returns) == 1 or not schema.returns:
        return text + " ...\n"
    quotes, names = '"' * 3, ", ".join(r.name for r in schema.returns)
    indent = " " * 4
    docstring = textwrap.fill(f"{quotes}{names}{quotes}", 120, initial_indent=indent, subsequent_indent=indent)
    return f"{text}\n{docstring}\n"


def stub() -> str:
    names = {n for n in operator_names() if not n.startswith("_cuda_")}  # checks in the CUDA library, for the tests
    parts = []
    for title, belongs in SECTIONS.items():
        parts.append(f"# ---- {title}\n\n" + "\n".join(definition(n) for n in sorted(names) if belongs(n)))
    return HEAD + "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        if STUB.read_text(encoding="utf-8") == stub():
            return 0
        print(f"{STUB} is not what the schemas say: run python -m tools.torch_ops_stub", file=sys.stderr)
        return 1
    STUB.write_text(stub(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
