"""The types of what the operators raise, whatever the installed torch makes of exceptions out of C++.

csrc/core/errors.h keeps the last exception of each thread with the type that Python is to raise. torch up to 2.14 hands
ValueError and MemoryError on; torch 2.15 makes RuntimeErrors of them, and no torch knows how to raise TypeError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

_TYPES = {"ValueError": ValueError, "TypeError": TypeError, "MemoryError": MemoryError}
_last_errors: list[Callable[[], bytes]] = []  # of each library


def watch(library: Path) -> None:
    """From now on `raise_typed` knows the exceptions of that library, which is loaded."""
    last = ctypes.CDLL(str(library)).attnjourney_last_error
    last.restype = ctypes.c_char_p
    _last_errors.append(last)


def raise_typed(error: Exception) -> NoReturn:
    """Raises the exception that is being handled: with the type that C++ meant, if it comes from there."""
    text = str(error)
    for last in _last_errors:
        name, _, own = last().decode(errors="replace").partition("\n")
        if name and own == text and type(error) is not _TYPES[name]:
            raise _TYPES[name](text) from None
    raise error


def _guarded(call: Callable) -> Callable:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise_typed(error)

    return guarded


def _types_are_lost() -> bool:
    empty = torch.empty(0)
    try:
        torch.ops.attnjourney.rope.default(empty, empty, empty)  # no rank that is right
    except ValueError:
        return False
    except Exception:
        pass
    return True


def keep_types(names: list[str]) -> None:
    """Where torch loses the types, every call of an operator from Python goes through `raise_typed` if it fails. To be
    called as soon as the operators are there: what torch keeps by operator must find them as they stay."""
    if not _types_are_lost():
        return
    for name in names:
        packet = getattr(torch.ops.attnjourney, name)
        for callable_ in (packet, packet.default):
            callable_._op = _guarded(callable_._op)
