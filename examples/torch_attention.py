"""The two layers to compare with, on PyTorch's own attention; parameters in the order of attention.MHA."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.attention import MHA
from examples.config import Config


class TorchMHA(nn.Module):
    """nn.MultiheadAttention, causal."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = nn.MultiheadAttention(config.embed, config.heads, batch_first=True)
        mask = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)  # True = blocked
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[: x.shape[1], : x.shape[1]]  # (T, T)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class TorchSDPA(MHA):
    """F.scaled_dot_product_attention between two nn.functional.linear, as nanoGPT does it."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)  # (B, T, 3 E)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)  # 3 times (B, H, T, D)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
