"""Functions made of several operators, which attnjourney.capture sees as one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

watchers: list[
    Callable[[str, dict[str, Any], dict[str, Any]], AbstractContextManager]
] = []  # entered around every such call with its name, arguments and defaults


def watched(function: Callable) -> Callable:
    signature = inspect.signature(function)
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not watchers or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher(function.__name__, bound.arguments, defaults))
            return function(*args, **kwargs)

    return call
