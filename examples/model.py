"""A byte-level GPT around any of the attention layers, and the list of the six variants."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.attention import GQA, MHA, MLA, GPT2Attention, rotary_tables
from examples.config import Config
from examples.torch_attention import TorchMHA, TorchSDPA

VOCABULARY = 256  # one token per byte
EMBEDDING_STD = 0.2


@dataclass(frozen=True)
class Variant:
    label: str
    call: str  # what computes the attention in training
    attention: type[nn.Module]
    learned_positions: bool  # False: the attention layer rotates queries and keys
    twin: str | None = None  # the variant on PyTorch's own attention with the same weights


VARIANTS = {
    "mha": Variant("MHA", "torch.ops.attnjourney.mha", MHA, True, twin="torch-mha"),
    "torch-mha": Variant("torch MHA", "nn.MultiheadAttention", TorchMHA, True),
    "gpt": Variant("GPT", "torch.ops.attnjourney.gpt_attention", GPT2Attention, True, twin="torch-sdpa"),
    "torch-sdpa": Variant("torch SDPA", "F.scaled_dot_product_attention", TorchSDPA, True),
    "gqa": Variant("GQA", "torch.ops.attnjourney.gqa", GQA, False),
    "mla": Variant("MLA", "torch.ops.attnjourney.mla", MLA, False),
}
OURS = ("mha", "gpt", "gqa", "mla")


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


class GPT(nn.Module):
    def __init__(self, variant: Variant, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.embed)
        self.positions = nn.Embedding(config.context, config.embed) if variant.learned_positions else None
        self.blocks = nn.ModuleList(Block(variant.attention(config), config.embed) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.embed)
        self.head = nn.Linear(config.embed, VOCABULARY, bias=False)
        self.initialise(config.seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Matrices from a normal distribution, biases 0. Variants with the same shapes get the same numbers."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.startswith("positions"):
                # sinusoids (arXiv 1706.03762) to learn from: neighbours are alike from the first step on
                weight.copy_(EMBEDDING_STD * 2**0.5 * torch.cat(rotary_tables(*weight.shape), dim=1))
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
        """(B, T) int64 -> logits (B, T, 256)"""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
