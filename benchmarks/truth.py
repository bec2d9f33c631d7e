"""The fp64 values a case is compared with, and the error against them."""

from __future__ import annotations

import dataclasses
import math

import torch

from . import functions, layers, options
from .inputs import Inputs

ROWS = 512  # query rows at a time


def attention(query, key, value, grad, causal, mask):
    """(out, (dq, dk, dv, dmask)) in fp64 of one group of heads.

    query (heads, L, D), key (1, S, D), value (1, S, Dv), grad (heads, L, Dv), mask (heads or 1, L or 1, S) or None.
    """
    query, key, value, grad = (t.double() for t in (query, key, value, grad))
    scale = 1 / math.sqrt(query.shape[-1])
    out, dq, dmask = [], [], []
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    column = torch.arange(key.shape[-2], device=query.device)
    for start in range(0, query.shape[-2], ROWS):
        rows = slice(start, start + ROWS)
        q, go = query[:, rows], grad[:, rows]
        score = scale * (q @ key.transpose(-1, -2))
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[:, rows]
            score = score.masked_fill(~part, -math.inf) if part.dtype == torch.bool else score + part.double()
        if causal:
            row = torch.arange(start, start + q.shape[-2], device=query.device)
            score = score.masked_fill(column > row[:, None], -math.inf)
        p = torch.softmax(score, -1)
        o = p @ value
        ds = p * (go @ value.transpose(-1, -2) - (go * o).sum(-1, keepdim=True))
        out.append(o)
        dq.append(scale * (ds @ key))
        dmask.append(ds)
        dk += scale * (ds.transpose(-1, -2) @ q).sum(0, keepdim=True)
        dv += (p.transpose(-1, -2) @ go).sum(0, keepdim=True)
    return torch.cat(out, -2), (torch.cat(dq, -2), dk, dv, torch.cat(dmask, -2))


class Truth:
    """fp64 output and gradients: of a layer all, of an attention call the first batch entry's first group of heads."""

    def __init__(self, case, inputs: Inputs):
        self.group = case.heads // case.kv_heads
        self.layer = bool(case.layer)
        if self.layer:
            leaves = [t.double().requires_grad_() for t in inputs.tensors]
            with torch.enable_grad():
                out = layers.LAYERS[case.layer].compose(case, _plain, *leaves)
            self.grads = torch.autograd.grad(out, leaves, inputs.grad.double())
            self.out = out.detach()
            return
        if case.function or case.option:
            heads = case.heads if case.function else self.group
            leaves = [t[:1, :heads].double().requires_grad_() for t in inputs.tensors]
            exact = functions.FUNCTIONS[case.function].exact if case.function else options.exact
            with torch.enable_grad():
                out = exact(dataclasses.replace(case, batch=1), *leaves)
            self.grads = [g[0] for g in torch.autograd.grad(out, leaves, inputs.grad[:1, :heads].double())]
            self.out = out.detach()[0]
            return
        mask = None if inputs.mask is None else inputs.mask[0, : self.group]
        q, k, v = (t[0, :heads] for t, heads in zip(inputs.tensors, (self.group, 1, 1)))
        self.out, grads = attention(q, k, v, inputs.grad[0, : self.group], case.causal, mask)
        self.grads = grads[: 1 if inputs.frozen else len(inputs.tensors)]

    def error(self, result) -> float:
        """Largest absolute difference: of the output, or over all gradients."""
        if isinstance(result, torch.Tensor):
            return self._difference(result, self.out)
        return max(self._difference(got, want) for got, want in zip(result, self.grads, strict=True))

    def _difference(self, got: torch.Tensor, want: torch.Tensor) -> float:
        got = got.detach()
        if not self.layer:
            got = got[0, : want.shape[0]]
        return (got.double() - want).abs().max().item()


def _plain(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        score = score.masked_fill(torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.softmax(score, -1) @ v
