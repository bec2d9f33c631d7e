"""The state of a rank's rows while keys come by, joined in the accumulation dtype, and the calls of the operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..block_mask import BlockMask
from ..ops.block_attention import block_tensors
from ._parts import Part

_LOG2_E = math.log2(math.e)
_ops = torch.ops.attnjourney
INPUTS = QUERY, KEY, VALUE, MASK, SINKS, SLOPES = tuple(1 << bit for bit in range(6))  # bits of `need`


@dataclass(frozen=True)
class Scores:
    """The options of attention that do not depend on where a shard lies. dropout: (probability, seed), drawn for
    `heads` heads a sequence, of which this rank has those from first_head on."""

    scale: float | None
    enable_gqa: bool
    softcap: float = 0.0
    key_lengths: Tensor | None = None
    dropout: tuple[float, Tensor | None] = (0.0, None)
    first_head: int = 0
    heads: int = 0
    documents: int = 1  # a batch entry's, each with heads of its own

    def of(self, part: Part) -> dict[str, Any]:
        p, seed = self.dropout
        origin = [*part.origin, self.first_head + part.document * self.heads, self.documents * self.heads]
        options = dict(
            dropout_p=p, dropout_seed=seed, scale=self.scale, enable_gqa=self.enable_gqa, softcap=self.softcap,
            window_size=part.window, prefix_length=part.prefix, origin=origin,
        )  # fmt: skip
        if self.key_lengths is not None:
            options["key_lengths"] = (self.key_lengths - part.first_key).clamp(0, part.key_end - part.key)
        return options


class Rows:
    """out (..., L, Ev), and each row's weights: 2^(score - reference) / sum, in float64 as both are few."""

    def __init__(self, lead: tuple[int, ...], query: Tensor, v_dim: int, sinks: Tensor | None):
        wide = accumulation_dtype(query.dtype)
        self.shape = (*lead, query.shape[-2])
        self.dtype = query.dtype
        self.out = query.new_zeros((*self.shape, v_dim), dtype=wide)
        self.reference = query.new_full(self.shape, -math.inf, dtype=torch.float64)
        self.sum = query.new_zeros(self.shape, dtype=torch.float64)
        if sinks is not None:  # a key of its own, without a value
            sink = per_head(sinks, self.shape).double() * _LOG2_E
            self.reference = sink.to(wide).double().expand(self.shape).clone()
            there = self.reference > -math.inf
            self.sum = torch.where(there, (sink - self.reference).exp2(), 0.0)

    def join(self, part: Part, out: Tensor, stats: Tensor, biased: bool) -> None:
        rows = slice(part.row, part.row_end)
        reference, inverse = stats.double().unbind(-1)
        reference = reference * _LOG2_E if biased else reference  # scores with a bias are natural ones
        total = torch.where(inverse == 0, 0.0, 1 / inverse)
        reference = torch.where(total == 0, -math.inf, reference)
        before = self.reference[..., rows]
        top = torch.maximum(before, reference)
        safe = torch.where(top == -math.inf, 0.0, top)
        a = self.sum[..., rows] * (before - safe).exp2()
        b = total * (reference - safe).exp2()
        whole = a + b
        divisor = torch.where(whole == 0, 1.0, whole)
        weigh = [(x / divisor).to(self.out.dtype).unsqueeze(-1) for x in (a, b)]
        self.out[..., rows, :] = self.out[..., rows, :] * weigh[0] + out.to(self.out.dtype) * weigh[1]
        self.reference[..., rows], self.sum[..., rows] = top, whole

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, stats) as the operator gives them, stats in log2 units."""
        empty = self.sum == 0
        exact = torch.where(empty, 0.0, self.reference)
        lse = torch.where(empty, -math.inf, exact / _LOG2_E + self.sum.log())
        reference = exact.to(self.out.dtype)
        inverse = torch.where(empty, 0.0, (reference - exact).exp2() / self.sum)
        stats = torch.stack([reference, inverse.to(self.out.dtype)], -1)
        return self.out.to(self.dtype), lse.to(self.out.dtype), stats


def per_head(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(Hq,) or (B, Hq) beside rows of `shape` (batch dims..., Hq, L): (batch dims..., Hq, 1)."""
    return numbers.unsqueeze(-1) if numbers.dim() == 1 else numbers.reshape(*shape[:-1], 1)


def natural(stats: Tensor) -> Tensor:
    """stats in log2 units in those of scores with a bias; what rounding takes from the reference, the sum gives."""
    exact = stats[..., 0].double() / _LOG2_E
    reference = exact.to(stats.dtype)
    return torch.stack([reference, ((reference - exact).exp() * stats[..., 1]).to(stats.dtype)], -1)


class Calls:
    """The operator on parts of this rank's rows and another's keys. mask: a tensor of this rank's rows and all keys, or
    a BlockMask of the whole."""

    def __init__(self, scores: Scores, slopes: Tensor | None, mask: Tensor | BlockMask | None = None):
        self.scores, self.slopes, self.mask = scores, slopes, mask

    def of_mask(self, part: Part, mask: Tensor) -> Tensor:
        """The part of a mask tensor, or of its gradient; a view."""
        if mask.shape[-2] != 1:
            mask = mask[..., part.row : part.row_end, :]
        if mask.shape[-1] != 1:
            mask = mask[..., part.first_key : part.first_key + part.key_end - part.key]
        return mask

    def _arguments(self, part: Part, query: Tensor, key: Tensor) -> tuple[str, tuple, dict]:
        """(what the operator's name begins with, its mask arguments, its options)."""
        options = self.scores.of(part)
        if self.slopes is not None:
            options["alibi_slopes"] = self.slopes
        if isinstance(self.mask, BlockMask):
            rows, keys = part.row_end - part.row, part.key_end - part.key
            blocks = self.mask.part(part.first_row, part.first_row + rows, part.first_key, part.first_key + keys)
            return "block_attention", block_tensors(blocks, query, key), options
        return "attention", (None if self.mask is None else self.of_mask(part, self.mask),), options

    def forward(self, rows: Rows, part: Part, query: Tensor, key: Tensor, value: Tensor) -> None:
        at, keys = slice(part.row, part.row_end), slice(part.key, part.key_end)
        query, key, value = query[..., at, :], key[..., keys, :], value[..., keys, :]
        name, masks, options = self._arguments(part, query, key)
        out, _, stats = getattr(_ops, f"{name}_forward").default(query, key, value, *masks, **options)
        rows.join(part, out, stats, biased=_is_bias(masks[0]))

    def backward(
        self, part: Part, need: int, grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor,
        value: Tensor, out: Tensor, lse: Tensor, stats: Tensor,
    ) -> dict[int, Tensor]:  # fmt: skip
        """The gradients of the inputs that `need` asks for, by its bits."""
        rows, keys = slice(part.row, part.row_end), slice(part.key, part.key_end)
        query, key, value = query[..., rows, :], key[..., keys, :], value[..., keys, :]
        name, masks, options = self._arguments(part, query, key)
        stats = stats[..., rows, :]
        inputs = [bit for bit in INPUTS if name == "attention" or bit != MASK]
        grads = getattr(_ops, f"{name}_backward").default(
            grad_out[..., rows, :],
            None if grad_lse is None else grad_lse[..., rows],
            query,
            key,
            value,
            *masks,
            out[..., rows, :],
            lse[..., rows],
            natural(stats) if _is_bias(masks[0]) else stats,
            **options,
            need=sum(1 << i for i, bit in enumerate(inputs) if need & bit),
        )
        return {bit: gradient for bit, gradient in zip(inputs, grads) if need & bit}


def _is_bias(mask: Tensor | None) -> bool:
    return mask is not None and mask.is_floating_point()


def sinks_gradient(sinks: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor) -> Tensor:
    """That of the logit which joins each row's sum, over this rank's rows."""
    wide = stats.dtype
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    logit = per_head(sinks, delta.shape).double() * _LOG2_E
    reference, inverse = stats.double().unbind(-1)
    weight = torch.where(logit == -math.inf, 0.0, (logit - reference).exp2() * inverse)
    gradient = -(weight * delta).sum(-1).reshape(-1, sinks.shape[-1])
    return (gradient.sum(0) if sinks.dim() == 1 else gradient).to(sinks.dtype)
