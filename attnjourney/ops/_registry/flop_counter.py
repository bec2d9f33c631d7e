"""FLOP formulas for torch.utils.flop_counter, which gets them when somebody imports it: it imports triton, where there
is one, which takes longer than all of attnjourney."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COUNTER = "torch.utils.flop_counter"
_FORMULAS: list[tuple[list, Callable[..., int]]] = []


def register_flop_formula(operators: Sequence[Any], formula: Callable[..., int]) -> None:
    """`formula` counts a call of any of the `operators` (packets), from shapes in place of tensors, as
    torch.utils.flop_counter.register_flop_formula has it."""
    _FORMULAS.append((list(operators), formula))
    if COUNTER in sys.modules:
        _give(sys.modules[COUNTER], _FORMULAS[-1:])


def _give(counter: ModuleType, formulas: list) -> None:
    for operators, formula in formulas:
        counter.register_flop_formula(operators)(formula)


class _WhenImported:
    """An entry of sys.meta_path that finds the counter as Python does and goes on behind its import."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _give(module, _FORMULAS)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WhenImported())
