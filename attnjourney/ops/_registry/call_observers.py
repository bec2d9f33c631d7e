"""Functions made of several operators, whose calls can be observed as one: attnjourney.capture records them so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# entered around every such call with its name, arguments and defaults
observers: list[Callable[[str, dict[str, Any], dict[str, Any]], AbstractContextManager[None]]] = []


def observed(function: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(function)
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not observers or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer(function.__name__, bound.arguments, defaults))
            return function(*args, **kwargs)

    return call
