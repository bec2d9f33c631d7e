"""Whatever holds weights, as layers: tensors, records of attnjourney.capture, or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..recording import Record

Weights = Tensor | Record | Sequence[Tensor | Record]


@dataclass(frozen=True)
class Layer:
    weights: Tensor  # (*batch, heads, q_len, kv_len)
    heads: list[int]  # their numbers

    def of_one_sequence(self) -> Tensor:
        """(heads, q_len, kv_len)"""
        weights = self.weights
        if weights.dim() > 3 and weights.shape[:-3].numel() == 1:
            weights = weights.flatten(0, -4)[0]
        if weights.dim() != 3:
            raise ValueError(
                "weights: expected (heads, q_len, kv_len) of one sequence for each layer, got shape "
                f"{tuple(self.weights.shape)}"
            )
        return weights


def as_layers(weights: Weights) -> list[Layer]:
    """A tensor is one layer (heads, q_len, kv_len) or several (layers, heads, q_len, kv_len); a record is one layer."""
    if isinstance(weights, Tensor):
        if weights.dim() not in (3, 4):
            raise ValueError(
                "weights: expected (heads, q_len, kv_len) or (layers, heads, q_len, kv_len), got shape "
                f"{tuple(weights.shape)}"
            )
        return [as_layer(layer) for layer in (weights if weights.dim() == 4 else [weights])]
    return [as_layer(layer) for layer in ([weights] if isinstance(weights, Record) else weights)]


def as_layer(layer: Tensor | Record) -> Layer:
    if isinstance(layer, Record):
        rows = layer.rows.tolist()
        if rows != list(range(len(rows))):
            raise ValueError(f"weights: expected the record of {layer.name!r} to have all rows from 0, got rows {rows}")
        return Layer(layer.weights.detach(), layer.heads.tolist())
    if not isinstance(layer, Tensor):
        raise TypeError(f"weights: expected tensors or records of attnjourney.capture, got {type(layer).__name__}")
    if layer.dim() < 3:
        raise ValueError(
            f"weights: expected (..., heads, q_len, kv_len) for each layer, got shape {tuple(layer.shape)}"
        )
    return Layer(layer.detach(), list(range(layer.shape[-3])))


def numbers(name: str, given: Sequence | None, count: int, default: Sequence) -> list:
    """The labels given, or the default."""
    try:
        given = list(default if given is None else given)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence, got {type(given).__name__}") from None
    if len(given) != count:
        raise ValueError(f"{name}: expected {count} of them, got {len(given)}")
    return given


def whole_numbers(name: str, given: Sequence | None, count: int, default: Sequence) -> list:
    """`numbers` that are int, or can stand for one."""
    given = numbers(name, given, count, default)
    for x in given:
        if not hasattr(type(x), "__index__"):
            raise TypeError(f"{name}: expected whole numbers, got {x!r}")
    return given
