"""Tensors of a case, the same for everyone who takes part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import blocks, layers


@dataclass
class Inputs:
    """tensors is what is differentiated: query, key, value (and a float mask with gradient), or x and the weights."""

    tensors: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    grad: torch.Tensor  # the gradient of the output

    frozen: bool = False  # the first tensor alone is differentiated

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The tensors, strides kept, as leaves that require gradients."""
        return tuple(t.detach().requires_grad_(not self.frozen or i == 0) for i, t in enumerate(self.tensors))

    def tangents(self) -> tuple[torch.Tensor, ...]:
        """A direction for each tensor: its own numbers, turned by one row."""
        return tuple(t.detach().roll(1, -2) for t in self.tensors)


def make(case, device: str = "cpu", seed: int = 0) -> Inputs:
    """Standard normal numbers (weights times in^-1/2), filled in place: a temporary would hide the memory peak."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=case.torch_dtype).normal_(generator=generator)

    if case.layer:
        width = case.heads * case.v_head_dim
        x, grad = normal(case.batch, case.q_len, width), normal(case.batch, case.q_len, width)
        weights = [
            normal(*s).mul_(s[1] ** -0.5 if len(s) == 2 else 0.1) for s in layers.LAYERS[case.layer].shapes(case)
        ]
        return Inputs((x, *weights), None, grad)

    def heads_first(heads: int, length: int, dim: int) -> torch.Tensor:
        if case.layout == "bhnd":
            return normal(case.batch, heads, length, dim)
        return normal(case.batch, length, heads, dim).transpose(1, 2)

    if case.layout == "packed":  # (batch, length, 3, heads, dim)
        qkv = normal(case.batch, case.q_len, 3, case.heads, case.head_dim)
        query, key, value = (t.transpose(1, 2) for t in qkv.unbind(2))
    else:
        query = heads_first(case.heads, case.q_len, case.head_dim)
        key = heads_first(case.kv_heads, case.kv_len, case.head_dim)
        if case.latents:
            value = key[..., : case.v_head_dim]
        else:
            value = heads_first(case.kv_heads, case.kv_len, case.v_head_dim)
    grad = heads_first(case.heads, case.q_len, case.v_head_dim)

    mask = None
    if case.mask == "padding":  # True = may attend
        mask = (torch.arange(case.kv_len, device=device) < case.visible_keys).expand(case.batch, 1, 1, -1).contiguous()
    elif case.mask == "bigbird":
        mask = blocks.dense(case).to(device)
    elif case.mask:
        mask = normal(case.batch, case.heads, case.q_len, case.kv_len)
    tensors = (query, key, value) + ((mask,) if case.mask == "float-grad" else ())
    return Inputs(tensors, mask, grad, case.frozen)
