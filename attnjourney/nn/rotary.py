from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(seq_len: int, rotary_dim: int, theta: float = 10000.0, *, device=None) -> tuple[Tensor, Tensor]:
    """cos, sin (seq_len, rotary_dim / 2) of rotary position embedding (Su et al. 2021, arXiv 2104.09864), float32.

    Pair j of position n turns by n * theta^(-2 j / rotary_dim). The angles are float64 whatever the model's dtype is:
    in a lower one, far positions fall together.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number, got {rotary_dim}")
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(seq_len, device=device, dtype=torch.float64).unsqueeze(1) * frequency
    return angle.cos().float(), angle.sin().float()
