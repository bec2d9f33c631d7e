"""What the state layers keep: the states, gates and weights of a call, by head of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ... import reference
from ._stages_gated import by_head, gated_by_head
from ._stages_linear import linear_stages

MAX_ROWS = 512  # of weights by the recurrence, which takes rows one by one with a state of D x S


@dataclass
class States:
    """state (N, Hs, D, Dv), normalizer (N, Hs, D), gate and beta (B, Hs, L, ...), for `heads` heads of the output, of
    which heads / Hs read one state; weights(heads, rows) gives (B, heads, rows, S) in float64."""

    heads: int
    length: int
    weights: Callable[[Tensor, Tensor], Tensor]
    state: Tensor
    normalizer: Tensor | None = None
    gate: Tensor | None = None
    beta: Tensor | None = None

    def of(self, x: Tensor, heads: Tensor) -> Tensor:
        """A copy by head of the output: what a call has been given, and gives, may be written over."""
        return by_head(x.detach(), heads, self.heads)

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.state, self.normalizer) if x is not None)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _gated(call: dict, outputs: tuple) -> States:
    query, value = call["query"], call["value"]
    length = query.shape[2]

    def weights(heads: Tensor, rows: Tensor) -> Tensor:
        """The recurrence with the identity as values: column j of its output is what row i reads of value j."""
        if length > MAX_ROWS:
            raise ValueError(f"state_weights: expected at most {MAX_ROWS} rows, got {length}: capture a shorter text")
        named = {name: _double(x) for name, x in gated_by_head(call, heads).items()} | {"initial_state": None}
        identity = torch.eye(length, dtype=torch.float64, device=query.device)
        named["value"] = identity.expand(value.shape[0], len(heads), -1, -1)
        out = cast(Tensor, reference.gated_linear_attention(**named))
        return out.index_select(2, rows.to(query.device))

    return States(
        max(query.shape[1], value.shape[1]), length, weights, outputs[1], gate=call["gate"], beta=call["beta"]
    )


def _linear(call: dict, outputs: tuple) -> States:
    query = call["query"]

    def weights(heads: Tensor, rows: Tensor) -> Tensor:
        return linear_stages({name: _double(x) for name, x in call.items()}, heads, rows)["weights"]

    return States(query.shape[1], query.shape[2], weights, outputs[2], outputs[3] if call["normalize"] else None)


STATES: dict[str, Callable[[dict, tuple], States]] = {"gated_linear_attention": _gated, "linear_attention": _linear}
