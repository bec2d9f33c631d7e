"""Masks as descriptions: causality, window, padding, length and packed sequences, and no numbers until somebody asks.

transformers asks the mask function that is registered beside an attention function for one mask a kind of layer, and
hands what it returns to the layers as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask


@dataclass
class Pattern:
    """What a mask function says, but for padding: a row at position p sees the keys p - left .. p + right."""

    is_causal: bool
    window_size: tuple[int, int] = (-1, -1)
    sequence: Tensor | None = None  # (B, keys): which packed sequence a token belongs to


class MaskDescription(torch.Tensor):
    """A bool mask (B, 1, rows, keys), True where a key may be seen, that has no numbers.

    Only the first `lengths` keys are there (all, where None), and the rows are the last of these. Any operation on it
    gets the numbers, made by transformers itself: a model that computes with its mask stays right.

    Attributes:
        pattern: Pattern. padding: bool (B, keys), True where a token is, or None. lengths: (B,) int64, or None.
    """

    pattern: Pattern
    padding: Tensor | None
    lengths: Tensor | None
    numbers: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: Any, pattern: Pattern, padding: Tensor | None,
                lengths: Tensor | None, numbers: Callable[[], Tensor]) -> MaskDescription:  # fmt: skip
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.pattern, self.padding, self.lengths, self.numbers = pattern, padding, lengths, numbers
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda mask: mask.numbers(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        """Models with an indexer hand it mask[:, 0, :, :]: a description without the dimension of heads."""
        whole, plain = slice(None), isinstance(index, tuple) and all(isinstance(i, (int, slice)) for i in index)
        if plain and self.dim() == 4 and index == (whole, 0, whole, whole):
            shape = (self.shape[0], *self.shape[2:])
            numbers = self.numbers
            return MaskDescription(
                shape, self.device, self.pattern, self.padding, self.lengths, lambda: numbers()[:, 0]
            )
        return self.numbers()[index]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MaskDescription({tuple(self.shape)}, {self.pattern})"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", "").partition(".<locals>.")[0]


def _closed_over(function: Any) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))


def _joined(function: Any) -> Iterator[Any]:
    """The mask functions that and_masks has put together, however deep."""
    if _name(function) == "and_masks":
        for inner in _closed_over(function)["mask_functions"]:
            yield from _joined(inner)
    else:
        yield function


def recognised(function: Any) -> Pattern | None:
    """A causal or bidirectional mask function, alone or with one sliding window and packed sequences; else None.

    transformers' overlays are closures: their names and what they close over are all there is to know them by.
    tests/integrations/test_transformers.py compares what is recognised with transformers' own numbers.
    """
    pieces = list(_joined(function))
    sequence = None
    packed = [piece for piece in pieces if _name(piece) == "packed_sequence_mask_function"]
    if packed:
        sequence = _closed_over(packed[0])["packed_sequence_mask"]
        pieces = [piece for piece in pieces if piece is not packed[0]]
        if len(pieces) == 1 and _name(pieces[0]) == "remap_positions_for_packed_sequence":
            remapped = _closed_over(pieces[0])
            if not _counts_within(remapped["position_ids"], sequence):
                return None
            pieces = list(_joined(remapped["mask_function"]))
    window, two_sided, base = -1, False, []
    for piece in pieces:
        if _name(piece) == "sliding_window_overlay":
            window = _closed_over(piece)["sliding_window"] - 1  # it counts the row's own key
        elif _name(piece) == "sliding_window_bidirectional_overlay":
            window, two_sided = _closed_over(piece)["sliding_window"], True
        else:
            base.append(piece)
    if not isinstance(window, int) or window < -1:
        return None
    if base == [causal_mask_function] and not two_sided:
        return Pattern(True, (window, -1), sequence)
    if base == [bidirectional_mask_function]:
        return Pattern(False, (window, window if two_sided else -1), sequence)
    return None


def _counts_within(position_ids: Tensor, sequence: Tensor) -> bool:
    """Whether positions rise by one within a sequence: distances are then those of the places."""
    same = sequence.diff(dim=-1) == 0
    return bool((position_ids.diff(dim=-1) == 1)[same].all())


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable = causal_mask_function, attention_mask: Tensor | None = None,
    device: Any = "cpu", **others: Any,
) -> Tensor | None:  # fmt: skip
    """None where causality is all there is; (B, 1, 1, keys) for one row; a MaskDescription, or numbers where the
    pattern is not recognised or a graph is being made."""

    def numbers() -> Tensor:
        whole = {**others, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,  # type: ignore
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, device=device, **whole,
        )  # fmt: skip
        assert made is not None
        return made

    pattern = None if torch.compiler.is_compiling() else recognised(mask_function)
    if pattern is None:
        return numbers()
    is_causal, windowed = pattern.is_causal, pattern.window_size != (-1, -1)
    end = q_offset + q_length - kv_offset if is_causal or windowed else kv_length  # the rows are the keys before it
    complete = not isinstance(end, Tensor) and end == kv_length
    padding = _padding(attention_mask, kv_length, kv_offset)
    if pattern.sequence is not None and (padding is not None or q_length != kv_length or not complete):
        return numbers()
    if not is_causal and windowed and not complete:
        return numbers()  # keys behind the last row
    plain = padding is None and not windowed and complete and pattern.sequence is None
    may_skip = others.get("allow_is_causal_skip", True) if is_causal else others.get("allow_is_bidirectional_skip")
    if plain and may_skip and (not is_causal or q_length in (1, kv_length)):
        return None
    if q_length == 1:
        return numbers()
    lengths = None
    if padding is not None and not is_causal and not windowed:
        lengths = _lengths(padding)
        padding = padding if lengths is None else None
    if not complete:
        lengths = torch.as_tensor(end, device=device).to(torch.int64).expand(batch_size).contiguous()
    shape = (batch_size, 1, q_length, kv_length)
    return MaskDescription(shape, device, pattern, padding, lengths, numbers)


def _lengths(padding: Tensor) -> Tensor | None:
    """(B,) int64: how many tokens there are, where all padding is behind them; else None."""
    counts = padding.sum(1)
    behind = torch.arange(padding.shape[1], device=padding.device) >= counts[:, None]
    return None if (padding & behind).any() else counts


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(B, keys), True where a token is; None where all are there."""
    if attention_mask is None:
        return None
    there = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if there.shape[1] < kv_length:
        there = torch.nn.functional.pad(there, (0, kv_length - there.shape[1]))
    return None if there.all() else there
