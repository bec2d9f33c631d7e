"""What capture gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from ...ops._attention_checks import ALIGNMENTS

Rows = Sequence[int] | Tensor | slice | None


@dataclass(frozen=True, repr=False)
class Record:
    """The weights of one call of an attention operator.

    Attributes:
        name: the module that called, as model.named_modules() has it; of a call that no submodule made, the operator
            and a number, "attention.0", counted in every run of the model.
        operator: "attention", "varlen_attention", "paged_attention" (varlen_attention with a block_table), "mha",
            "gpt_attention", "gqa", "mla", "decode", "mla_decode", "sparse_attention" (mla_decode with indices, too:
            keys are latents, in a cache of blocks those of the pool), "infini_attention" or "longformer_attention".
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


class Captured(Sequence[Record]):
    """The records in the order of the calls. captured[0] is the first; captured["name"] the latest of that name."""

    def __init__(self):
        self.records: list[Record] = []

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, which: int | str) -> Record: ...
    @overload
    def __getitem__(self, which: slice) -> list[Record]: ...
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


_NOT_SETTINGS = {
    "query", "key", "value", "x", "latent", "dropout_seed", "cos", "sin", "global_query", "global_key", "global_value",
    "memory", "beta", "truncate",
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
