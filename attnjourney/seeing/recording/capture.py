"""capture: the attention weights of a model, and the states of layers that keep one, recorded while it runs."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ...ops._registry.call_observers import observers
from ._dispatch_mode import OperatorCalls
from ._scores import FUNCTIONS, PACKED, READERS, Scores
from ._states import STATES
from .records import Captured, Record, Rows, StateRecord, indices, settings_of


class capture:
    """Records the attention weights of a model that runs in a `with` block.

        with attnjourney.capture(model, layers=["blocks.0*"], rows=[-1]) as seen:
            model(tokens)
        seen["blocks.0.attention"].weights  # (batch, heads, 1, S)

    Every call of this package's operators is seen, whether a module of attnjourney.nn makes it, a model's own code, a
    cache or a compiled graph. The model computes what it computes without: the same fused kernels, the same random
    numbers, gradients too. The weights are made again from the queries, keys and sums of that very call, in
    O(rows * S) memory for the rows and heads asked for. A run during backward (activation checkpointing) is not
    recorded again. InfiniAttention's weights are those of its local part, each row's keys those of its own segment, and
    its memory is a state.
    A compiled graph has no modules: its calls are named by their order.

    Calls of gated_linear_attention, linear_attention and infini_attention are recorded in seen.states: what the state
    holds after the last row, and the gates by which it forgets.

        seen.states["model.layers.0.linear_attn"].effective_rank  # (batch, heads)

    Blocks may be nested; one object may be entered again and goes on recording. Only the thread that entered records.

    Args:
        model: a module, compiled or not. None: every call in the block, for a model written as functions.
        layers: what is recorded, everything by default: names of modules as in model.named_modules() (what lies inside
            counts), patterns ("blocks.*.attention"), modules, or ints: the n-th call of a run, calls with weights and
            with a state counted each by themselves.
        heads: of the query heads (with a state, of the output's), all by default. Negative numbers count from the end.
        rows: query rows, all by default: ints, negative ones from the end (in generation [-1] is the new token), an int
            tensor or a slice.
        hook: called with each Record and StateRecord, which then is not kept: for long runs.
        state_weights: also give each StateRecord the weights that its state stands for, of `rows`: computed from the
            call's arguments in float64, row after row, in O(heads * S * S) memory: for sequences of up to 512 rows.

    Yields:
        Captured.

    Raises:
        TypeError: model is no module. ValueError: a layer that the model does not have, a row or head that a call does
        not have, more than 512 rows with state_weights. RuntimeError: run by torch.export or another tracer, whose
        tensors have no numbers.
    Warns (UserWarning) where a block ends and nothing was recorded.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        layers: Iterable[str | int | nn.Module] | str | int | nn.Module | None = None,
        heads: Sequence[int] | Tensor | None = None,
        rows: Rows = None,
        hook: Callable[[Record | StateRecord], None] | None = None,
        state_weights: bool = False,
    ):
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
        self.model, self.heads, self.rows, self.hook = model, heads, rows, hook
        self.state_weights, self.captured = state_weights, Captured()
        self._names = {} if model is None else {id(m): _plain(name) for name, m in model.named_modules()}
        self._layers = None if layers is None else self._resolve(layers)
        self._mode, self._depth = OperatorCalls(self._operator, {*READERS, *STATES}), 0
        self._handle: RemovableHandle | None = None
        self._step, self._calls, self._bare = -1, Counter[bool](), Counter[bool]()
        self._count = self._inside = 0

    def __enter__(self) -> Captured:
        if self._depth == 0:
            self._count = 0
            if self.model is not None:
                self._handle = self.model.register_forward_pre_hook(self._next_step, prepend=True)
            self._thread = threading.get_ident()
            observers.append(self._function)
            self._mode.__enter__()
        self._depth += 1
        return self.captured

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._mode.__exit__(*error)
        observers.remove(self._function)
        if self._handle is not None:
            self._handle.remove()
        if error[0] is None and self._count == 0:
            of = "" if self._layers is None else " of the layers asked for"
            warnings.warn(
                f"capture: nothing was recorded: no call{of} reached an attention operator of attnjourney in this "
                "block (a model on torch.nn.MultiheadAttention needs attnjourney.replace_attention)",
                stacklevel=2,
            )

    def _next_step(self, module: nn.Module, args: Any) -> None:
        self._step += 1
        self._calls.clear()
        self._bare.clear()

    def _resolve(self, layers: Any) -> list[str | int]:
        """Names and call numbers."""
        layers = [layers] if isinstance(layers, (str, int, nn.Module)) else list(layers)
        chosen: list[str | int] = []
        for layer in layers:
            if isinstance(layer, int):
                chosen.append(layer)
                continue
            if isinstance(layer, nn.Module):
                found = [name for name, m in self._modules() if m is layer]
            else:
                found = [name for name in self._names.values() if name == layer or (name and fnmatchcase(name, layer))]
            if not found:
                what = type(layer).__name__ if isinstance(layer, nn.Module) else repr(layer)
                names = [name for name in self._names.values() if name]
                known = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
                raise ValueError(f"layers: expected names of modules of the model, {known}; or ints, got {what}")
            chosen += found
        return chosen

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [] if self.model is None else [(_plain(name), m) for name, m in self.model.named_modules()]

    def _caller(self) -> str | None:
        """The name of the innermost module that is running: "" is the model itself, None no module of it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                module = frame.f_locals.get(code.co_varnames[0])  # self, or the module that a function works for
                if isinstance(module, nn.Module) and id(module) in self._names:
                    return self._names[id(module)]
            frame = frame.f_back
        return None

    def _wants(self, name: str, call: int) -> bool:
        if self._layers is None:
            return True
        return any(
            layer == call if isinstance(layer, int) else name == layer or not layer or name.startswith(layer + ".")
            for layer in self._layers
        )

    def _operator(self, func: Any, operator: str, call: dict, outputs: tuple) -> None:
        if self._inside:
            return
        defaults = {a.name: a.default_value for a in func._schema.arguments}
        if operator in STATES:
            self._record_state(operator, call, defaults, outputs)
        else:
            self._record(operator, lambda: READERS[operator](call, outputs), call, defaults, outputs[0])

    @contextmanager
    def _function(self, name: str, call: dict, defaults: dict) -> Iterator[None]:
        """Around a function made of several operators: its parts are not recorded, nor what computes its record."""
        if threading.get_ident() != self._thread or torch._C._are_functorch_transforms_active():
            yield
            return
        self._inside += 1
        try:
            yield
            if self._inside == 1 and torch._C._current_graph_task_id() == -1:
                with _disable_current_modes(), torch.no_grad():
                    self._record(name, lambda: FUNCTIONS[name](call), call, defaults, call["query"])
                    if name in STATES:
                        self._record_state(name, call, defaults, (call["query"],))
        finally:
            self._inside -= 1

    def _name(self, operator: str, kind: bool, some: Tensor) -> str | None:
        """Of a call that is wanted; calls with a state (kind) are counted by themselves."""
        if isinstance(some, FakeTensor):
            raise RuntimeError("capture: expected tensors with numbers, got those of a tracer: run the model itself")
        name = self._caller()
        if name is None and self.model is not None:
            return None  # not this model's
        number = self._calls[kind]
        self._calls[kind] += 1
        if not name:
            name = f"{operator}.{self._bare[kind]}"
            self._bare[kind] += 1
        return name if self._wants(name, number) else None

    def _record(self, operator: str, read: Callable[[], Scores], call: dict, defaults: dict, some: Tensor) -> None:
        name = self._name(operator, False, some)
        if name is None:
            return
        scores = read()
        heads = indices("heads", self.heads, scores.heads)
        rows = indices("rows", self.rows, scores.length, negative=operator in PACKED)
        weights, lse = scores.weights(heads, rows)
        step, settings = max(self._step, 0), settings_of(call, defaults)
        self._keep(Record(name, operator, step, weights, lse, heads, rows, scores.first_key, settings))

    def _record_state(self, operator: str, call: dict, defaults: dict, outputs: tuple) -> None:
        name = self._name(operator, True, outputs[0])
        if name is None:
            return
        states = STATES[operator](call, outputs)
        heads, rows = indices("heads", self.heads, states.heads), indices("rows", self.rows, states.length)
        given = {"gate": states.gate, "beta": states.beta, "normalizer": states.normalizer}
        record = StateRecord(
            name,
            operator,
            max(self._step, 0),
            states.of(states.state, heads),
            heads,
            rows,
            **{part: None if x is None else states.of(x, heads) for part, x in given.items()},
            nbytes=states.nbytes,
            weights=states.weights(heads, rows) if self.state_weights else None,
            settings=settings_of(call, defaults),
        )
        self._keep(record)

    def _keep(self, record: Record | StateRecord) -> None:
        self._count += 1
        if self.hook is not None:
            self.hook(record)
        elif isinstance(record, StateRecord):
            self.captured.states.records.append(record)
        else:
            self.captured.records.append(record)


def _plain(name: str) -> str:
    """Without what torch.compile puts into names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
