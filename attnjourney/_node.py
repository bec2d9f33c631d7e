"""The library of autograd nodes in C++, which serves the one torch that it was built with; importing this module loads
nothing. Without it, or with ATTNJOURNEY_NODE=0, the nodes are Python's (ops/_registry/nodes.py), with the same results.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re

import torch

from . import _library

_MARK = re.compile(rb"attnjourney autograd nodes for torch ([^\x00]*)\x00")


def this_torch() -> str:
    """What the library must be for: version and source of the torch that runs, as setup.py has them of the one it
    builds for. C++ interfaces differ by less than a release."""
    return f"{torch.__version__} {torch.version.git_version} cxx11 {int(torch.compiled_with_cxx11_abi())}"


def built_for() -> str | None:
    """What the library is for, from its file: one for another torch must not be loaded. None where there is none."""
    try:
        found = _MARK.search((_library.directory() / "_C_node.so").read_bytes())
    except FileNotFoundError:
        return None
    return found[1].decode() if found else ""


@functools.cache
def why_not() -> str | None:
    """Why nodes are Python's; None where they are C++'s."""
    wanted = os.environ.get("ATTNJOURNEY_NODE") or "1"
    if wanted not in ("0", "1"):
        raise ValueError(f"ATTNJOURNEY_NODE: expected 0 or 1, got {wanted!r}")
    if wanted == "0":
        return "ATTNJOURNEY_NODE=0"
    found = built_for()
    if found is None:
        return "its library is not built"
    if found == this_torch():
        return None
    if found.partition(" ")[0] == torch.__version__:
        return f"its library is for another build of torch {torch.__version__}"
    whose = f"torch {found.partition(' ')[0]}" if found else "an unknown torch"
    return f"its library is for {whose}, and this is {torch.__version__}"


@functools.cache
def _library_of_nodes() -> ctypes.CDLL:
    path = _library.directory() / "_C_node.so"
    try:
        library = ctypes.PyDLL(str(path))  # torch.library holds the interpreter's lock where it registers
    except OSError as error:
        raise ImportError(
            f"torch {torch.__version__} cannot load {path}: {error}; ATTNJOURNEY_NODE=0 does without it"
        ) from error
    library.attnjourney_node_add.restype = ctypes.c_char_p
    library.attnjourney_node_add.argtypes = [ctypes.c_char_p]
    library.attnjourney_node_counts.restype = None
    return library


_names: list[str] = []  # of the operators that have been added


def add(name: str, description: str) -> bool:
    """Gives an operator nodes in C++ (csrc/node/node.cpp says how it is described); False where they are Python's."""
    if why_not() is not None:
        return False
    error = _library_of_nodes().attnjourney_node_add(description.encode())
    if error is not None:
        raise RuntimeError(f"attnjourney's autograd node in C++: {error.decode()}; ATTNJOURNEY_NODE=0 does without it")
    _names.append(name)
    return True


def counts() -> dict[str, dict[str, int]]:
    """For each operator with nodes in C++, its calls in this process by what they came to: `recorded` a node,
    `without_node` since nothing was to be differentiated, `handed_over` to Python; and `backwards`."""
    found = {}
    for index, name in enumerate(_names):
        numbers = (ctypes.c_int64 * 4)()
        _library_of_nodes().attnjourney_node_counts(ctypes.c_int64(index), numbers)
        found[name] = dict(zip(("recorded", "without_node", "handed_over", "backwards"), numbers))
    return found
