"""The dispatch mode that sees a model call this package's operators."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...ops._registry.operator import NAMESPACE, Signature
from ...ops._registry.registration import OPERATORS
from ._scores import READERS


class OperatorCalls(TorchDispatchMode):
    """Calls on_call(overload, operator's name, its arguments by name, the results of its forward) after every call of
    these operators: below autograd, autocast and torch.func, as it runs. What runs is not changed. Not within a
    backward, which runs a checkpointed forward again.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile may go on compiling: its graphs call the operators, which are seen then

    def __init__(self, on_call: Callable[..., None], operators: Collection[str] = READERS):
        super().__init__()
        self.on_call, self.operators = on_call, operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix(NAMESPACE + "::") if func.namespace == NAMESPACE else ""
        base = name.removesuffix("_forward").removesuffix("_with_lse")
        if base not in self.operators:
            return func(*args, **kwargs)
        if name in OPERATORS:  # in inference mode: what it does itself, without losing lse
            operator = OPERATORS[name]
            flat = operator.flat(args, kwargs)
            outputs = operator.forward.call(flat)
            result, call = outputs[0], dict(zip(operator.forward.names, flat))
        else:
            result = func(*args, **kwargs)
            outputs = result if isinstance(result, tuple) else (result,)
            call = Signature(func).named(args, kwargs)
        if torch._C._current_graph_task_id() == -1:
            with _disable_current_modes(), torch.no_grad():
                self.on_call(func, base, call, outputs)
        return result
