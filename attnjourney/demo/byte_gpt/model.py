"""Embedding, blocks, head. The attention layers are given: the demo's own, or modules of attnjourney.nn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...positions import sinusoidal_positions

VOCABULARY = 256  # one token per byte
EMBEDDING_STD = 0.2


class Block(nn.Module):
    def __init__(self, attention: nn.Module, embed: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(embed)
        self.mlp = nn.Sequential(nn.Linear(embed, 4 * embed), nn.GELU(), nn.Linear(4 * embed, embed))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(nn.Module):
    """Embedding, blocks, head: (B, T) int64 bytes -> logits (B, T, 256).

    attention: one causal layer per block, (B, T, E) -> (B, T, E). context: of learned positions, the longest T; None:
    the attention layers rotate queries and keys themselves.
    """

    def __init__(self, attention: Sequence[nn.Module], embed: int, context: int | None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, embed)
        self.positions = None if context is None else nn.Embedding(context, embed)
        self.blocks = nn.ModuleList(Block(layer, embed) for layer in attention)
        self.norm = nn.LayerNorm(embed)
        self.head = nn.Linear(embed, VOCABULARY, bias=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Matrices from a normal distribution, biases 0. Models with the same shapes get the same numbers."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.startswith("positions"):
                # sinusoids (arXiv 1706.03762) to learn from: neighbours are similar from the first step on
                table = sinusoidal_positions(*weight.shape)
                weight.copy_(EMBEDDING_STD * 2**0.5 * torch.cat([table[:, 1::2], table[:, ::2]], dim=1))
            elif name.startswith("embedding"):
                weight.normal_(0, EMBEDDING_STD, generator=generator)
            elif name.startswith("head"):
                weight.normal_(0, 0.02, generator=generator)  # first guess: all bytes equally likely
            elif weight.dim() == 2:
                weight.normal_(0, 0.5 * weight.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """(B, T) int64 at positions start, start + 1, ... -> (B, T, E)"""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[start : start + tokens.shape[1]]  # (T, E) for every sequence
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
