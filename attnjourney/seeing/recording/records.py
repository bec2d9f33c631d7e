"""What capture gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar, overload

import torch
from torch import Tensor

from ...ops._attention_checks import ALIGNMENTS
from ...ops.gated_linear_attention import UPDATES

Rows = Sequence[int] | Tensor | slice | None


@dataclass(frozen=True, repr=False)
class Record:
    """The weights of one call of an attention operator.

    Attributes:
        name: the module that called, as model.named_modules() has it; of a call that no submodule made, the operator
            and a number, "attention.0", counted in every run of the model.
        operator: "attention", "varlen_attention", "paged_attention" (varlen_attention with a block_table), "mha",
            "gpt_attention", "gqa", "mla", "decode", "mla_decode", "sparse_attention" (mla_decode with indices, too:
            keys are latents, in a cache of blocks those of the pool; over bytes it stays mla_decode, each row a
            sequence of the tokens that it names), "infini_attention" or "longformer_attention".
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


@dataclass(frozen=True, repr=False)
class StateRecord:
    """What one call of a layer that keeps a state left, and what it forgets by.

    Attributes:
        name, step, settings: as of a Record.
        operator: "gated_linear_attention", "linear_attention" or "infini_attention", whose memory is the state.
        state: (N, heads, D, Dv), float32 (float64 for float64): after the last row, of each sequence.
        heads, rows: int64, the heads of the output, and the rows of `weights`. Where several heads read one state, it
            is here for each of them.
        gate: logarithms of the decay, (B, heads, L), or (B, heads, L, D) by channel of the key; None without gates.
        beta: (B, heads, L), the part of the error that is corrected; None without the delta rule.
        normalizer: (N, heads, D) of linear_attention with a denominator, and of a memory; else None.
        nbytes: what is kept for the next token, of all heads and sequences.
        weights: with capture(state_weights=True), (B, heads, rows, S) in float64: output i is the sum of weights[i, j]
            times value j, and what an initial state adds. Not those of a softmax: they may be negative, and sum to
            anything. Of a memory: of what rows read there, before the gate. Else None.
    """

    name: str
    operator: str
    step: int
    state: Tensor
    heads: Tensor
    rows: Tensor
    gate: Tensor | None = None
    beta: Tensor | None = None
    normalizer: Tensor | None = None
    nbytes: int = 0
    weights: Tensor | None = None
    settings: dict = field(default_factory=dict)

    @cached_property
    def half_life(self) -> Tensor | None:
        """ln 2 / -gate, in tokens, of gate's shape: after how many rows like this one half is left of what the state
        held, by the gate alone. 0 forgets everything, inf nothing."""
        if self.gate is None:
            return None
        wide = self.gate.to(torch.promote_types(self.gate.dtype, torch.float32))
        return math.log(2) / wide.clamp(max=0).abs()

    @property
    def norm(self) -> Tensor:
        """(N, heads), the Frobenius norm of each state."""
        return torch.linalg.matrix_norm(self.state)

    @cached_property
    def singular_values(self) -> Tensor:
        """(N, heads, min(D, Dv)) in float64, the largest first; NaN of a state that is not finite."""
        finite = self.state.isfinite().all(-1).all(-1)
        values = torch.linalg.svdvals(self.state.double().masked_fill(~finite[..., None, None], 0.0))
        return values.masked_fill(~finite[..., None], torch.nan)

    @property
    def effective_rank(self) -> Tensor:
        """(N, heads): e to the entropy of the singular values' shares of their sum (Roy and Vetterli 2007), how many
        directions a state tells apart: 1 for one, D for D of the same size, 0 for an empty state."""
        values = self.singular_values
        total = values.sum(-1, keepdim=True)
        rank = torch.special.entr(values / torch.where(total == 0, 1.0, total)).sum(-1).exp()
        return rank.masked_fill(total.squeeze(-1) == 0, 0.0)

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self.settings.items())
        state = tuple(self.state.shape)
        return f"StateRecord({self.name!r}, {self.operator}, step {self.step}, state {state}{settings})"


R = TypeVar("R", Record, StateRecord)


class Records(Sequence[R], Generic[R]):
    """Records in the order of the calls. records[0] is the first; records["name"] the latest of that name."""

    def __init__(self):
        self.records: list[R] = []

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, which: int | str) -> R: ...
    @overload
    def __getitem__(self, which: slice) -> list[R]: ...
    def __getitem__(self, which):
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

    def keys(self) -> list[str]:
        """names: dict(captured) holds the latest record of each."""
        return self.names

    def of(self, name: str) -> list[R]:
        """All records of a name: one a step of generation, say."""
        return [record for record in self.records if record.name == name]

    def clear(self) -> None:
        self.records.clear()

    def __repr__(self) -> str:
        lines = "".join(f"\n  {i}: {record}" for i, record in enumerate(self.records))
        return f"{type(self).__name__}({len(self)} records){':' if lines else ''}{lines}"


class Captured(Records[Record]):
    """The records of attention weights, and in `states` those of layers that keep a state, each in the order of the
    calls. captured[0] is the first; captured["name"] the latest of that name; captured.states the same way."""

    def __init__(self):
        super().__init__()
        self.states: Records[StateRecord] = Records()

    def as_dict(self) -> dict[str, Tensor]:
        """The latest weights of every name."""
        return {record.name: record.weights for record in self.records}

    def clear(self) -> None:
        super().clear()
        self.states.clear()

    def __repr__(self) -> str:
        return super().__repr__() + (f"\nstates: {self.states}" if len(self.states) else "")


_NOT_SETTINGS = {
    "query", "key", "value", "x", "latent", "dropout_seed", "cos", "sin", "global_query", "global_key", "global_value",
    "memory", "beta", "gate", "truncate",
}  # fmt: skip


def settings_of(call: dict, defaults: dict) -> dict:
    """What is not the default, tensors as text."""
    settings = {}
    for name, value in call.items():
        if name in _NOT_SETTINGS or name.endswith(("weight", "bias")) or value is None:
            continue
        if isinstance(value, Tensor):
            value = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        elif name == "causal_alignment":
            value = ALIGNMENTS[value] if value else None
        elif name == "update" and isinstance(value, int):
            value = UPDATES[value]
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
            default = defaults.get(name)
            value = None if isinstance(default, (list, tuple)) and value == tuple(default) else value
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
