"""capture: the attention weights of a model, recorded while it runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ._scores import READERS
from ._watch import Watch

Rows = Sequence[int] | Tensor | slice | None


@dataclass(frozen=True, repr=False)
class Record:
    """The weights of one call of an attention operator.

    Attributes:
        name: the module that called, as model.named_modules() has it; of a call that no submodule made, the operator
            and a number, "attention.0", counted in every run of the model.
        operator: "attention", "varlen_attention", "mha", "gpt_attention", "gqa", "mla", "decode" or "mla_decode".
        step: which run of the model, from 0.
        weights: (..., heads, rows, S) in query's dtype, before dropout: rows sum to 1 (less with a sink, 0 where a row
            sees no key). Packed sequences have a batch dimension here, filled with 0. Detached.
        lse: (..., heads, rows), the logarithm of each row's denominator.
        heads, rows: int64, the heads and query rows recorded. In packed sequences a negative row is kept: it counts
            from each sequence's own end.
        first_key: (batch,) int64 for a ring, whose oldest keys are gone: the number of the key in column 0; else None.
        settings: options of the call that were not the default, tensors as text.
    """

    name: str
    operator: str
    step: int
    weights: Tensor
    lse: Tensor
    heads: Tensor
    rows: Tensor
    first_key: Tensor | None = None
    settings: dict = field(default_factory=dict)

    def __repr__(self) -> str:
        weights = f"{tuple(self.weights.shape)} {str(self.weights.dtype).removeprefix('torch.')}"
        settings = "".join(f", {name}={value}" for name, value in self.settings.items())
        return f"Record({self.name!r}, {self.operator}, step {self.step}, weights {weights}{settings})"


class Captured(Sequence):
    """The records in the order of the calls. captured[0] is the first; captured["name"] the latest of that name."""

    def __init__(self):
        self.records: list[Record] = []

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, which: int | slice | str) -> Record | list[Record]:
        if not isinstance(which, str):
            return self.records[which]
        found = self.of(which)
        if not found:
            raise KeyError(f"{which!r}: nothing of this name was recorded; there are {self.names}")
        return found[-1]

    @property
    def names(self) -> list[str]:
        """Of all records, each once, in the order of the calls."""
        return list(dict.fromkeys(record.name for record in self.records))

    def of(self, name: str) -> list[Record]:
        """All records of a name: one a step of generation, say."""
        return [record for record in self.records if record.name == name]

    def as_dict(self) -> dict[str, Tensor]:
        """The latest weights of every name."""
        return {record.name: record.weights for record in self.records}

    def clear(self) -> None:
        self.records.clear()

    def __repr__(self) -> str:
        lines = "".join(f"\n  {i}: {record}" for i, record in enumerate(self.records))
        return f"Captured({len(self)} records){':' if lines else ''}{lines}"


class capture:
    """Records the attention weights of a model that runs in a `with` block.

        with attnjourney.capture(model, layers=["blocks.0*"], rows=[-1]) as seen:
            model(tokens)
        seen["blocks.0.attention"].weights  # (batch, heads, 1, S)

    Every call of this package's operators is seen, whether a module of attnjourney.nn makes it, a model's own code, a
    cache or a compiled graph. The model computes what it computes without: the same fused kernels, the same random
    numbers, gradients too. The weights are exp(score - lse) from the queries, keys and lse of that very call, in
    O(rows * S) memory for the rows and heads asked for. A run during backward (activation checkpointing) is not
    recorded again. Linear attention has no weights; InfiniAttention's are those inside its segments; Longformer's come
    in parts, each summing to 1 and joined in the output by its lse: the window, then the global keys, the global rows.

    Blocks may be nested; one object may be entered again and goes on recording. Only the thread that entered records.

    Args:
        model: a module, compiled or not. None: every call in the block, for a model written as functions.
        layers: what is recorded, everything by default: names of modules as in model.named_modules() (what lies inside
            counts), patterns ("blocks.*.attention"), modules, or ints: the n-th call of a run.
        heads: of the query heads, all by default. Negative numbers count from the end.
        rows: query rows, all by default: ints, negative ones from the end (in generation [-1] is the new token), an int
            tensor or a slice.
        hook: called with each Record, which then is not kept: for long runs.

    Yields:
        Captured.

    Raises:
        TypeError: model is no module. ValueError: a layer that the model does not have, a row or head that a call does
        not have. RuntimeError: run under fake tensors (tracing, torch.export), which have no numbers.
    Warns (UserWarning) where a block ends and nothing was recorded.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        layers: Iterable[str | int | nn.Module] | str | int | nn.Module | None = None,
        heads: Sequence[int] | Tensor | None = None,
        rows: Rows = None,
        hook: Callable[[Record], None] | None = None,
    ):
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
        self.model, self.heads, self.rows, self.hook = model, heads, rows, hook
        self.captured = Captured()
        self._names = {} if model is None else {id(m): _plain(name) for name, m in model.named_modules()}
        self._layers = None if layers is None else self._resolve(layers)
        self._mode, self._depth, self._handle = Watch(self.record), 0, None
        self._step, self._calls, self._bare = -1, 0, 0
        self._count = 0

    def __enter__(self) -> Captured:
        if self._depth == 0:
            self._count = 0
            if self.model is not None:
                self._handle = self.model.register_forward_pre_hook(self._next_step, prepend=True)
            self._mode.__enter__()
        self._depth += 1
        return self.captured

    def __exit__(self, *error) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._mode.__exit__(*error)
        if self._handle is not None:
            self._handle.remove()
        if error[0] is None and self._count == 0:
            of = "" if self._layers is None else " of the layers asked for"
            warnings.warn(
                f"capture: nothing was recorded: no call{of} reached an attention operator of attnjourney in this "
                "block (a model on torch.nn.MultiheadAttention needs attnjourney.replace_attention; linear attention "
                "has no weights)",
                stacklevel=2,
            )

    def _next_step(self, module, args) -> None:
        self._step += 1
        self._calls = self._bare = 0

    def _resolve(self, layers) -> list[str | int]:
        """Names and call numbers."""
        layers = [layers] if isinstance(layers, (str, int, nn.Module)) else list(layers)
        chosen = []
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
                known = [name for name in self._names.values() if name]
                raise ValueError(f"layers: expected names of modules of the model, {known}, or ints, got {what}")
            chosen += found
        return chosen

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [] if self.model is None else [(_plain(name), m) for name, m in self.model.named_modules()]

    def _caller(self) -> str | None:
        """The name of the innermost module that is running: "" is the model itself, None no module of it."""
        frame = sys._getframe(1)
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

    def record(self, func, operator: str, call: dict, outputs: tuple) -> None:
        if any(isinstance(x, FakeTensor) for x in outputs):
            raise RuntimeError("capture: expected tensors with numbers, got fake ones: run the model, don't trace it")
        caller = self._caller()
        if caller is None and self.model is not None:
            return  # not this model's
        number, self._calls = self._calls, self._calls + 1
        if caller:
            name = caller
        else:
            name, self._bare = f"{operator}.{self._bare}", self._bare + 1
        if not self._wants(name, number):
            return
        scores = READERS[operator](call, outputs)
        heads = indices("heads", self.heads, scores.heads)
        rows = indices("rows", self.rows, scores.length, negative=operator == "varlen_attention")
        weights, lse = scores.weights(heads, rows)
        step, settings = max(self._step, 0), _settings(func, call)
        record = Record(name, operator, step, weights, lse, heads, rows, scores.first_key, settings)
        self._count += 1
        if self.hook is not None:
            self.hook(record)
        else:
            self.captured.records.append(record)


_NOT_SETTINGS = {"query", "key", "value", "x", "latent", "dropout_seed", "cos", "sin"}


def _settings(func, call: dict) -> dict:
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    settings = {}
    for name, value in call.items():
        if name in _NOT_SETTINGS or name.endswith(("weight", "bias")) or value is None:
            continue
        if isinstance(value, Tensor):
            value = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        elif name == "causal_alignment":
            value = ("top_left", "bottom_right")[value] if value else None
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
            default = defaults.get(name)
            value = None if default is not None and value == tuple(default) else value
        elif value == defaults.get(name):
            continue
        if value is not None:
            settings[name] = value
    return settings


def indices(name: str, given: Rows, size: int, negative: bool = False) -> Tensor:
    """int64, from 0 unless `negative`."""
    if given is None or isinstance(given, slice):
        return torch.arange(size)[given if given is not None else slice(None)]
    indices = torch.as_tensor(given, dtype=torch.int64, device="cpu").flatten()
    if negative:
        return indices
    wrong = (indices < -size) | (indices >= size)
    if wrong.any():
        raise ValueError(f"{name}: expected numbers from {-size} to {size - 1}, got {indices[wrong][0].item()}")
    return indices % size if size else indices


def _plain(name: str) -> str:
    """Without what torch.compile puts into names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
