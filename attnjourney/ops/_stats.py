"""What a backward makes weights from, where the forward was another's and left lse alone."""

import math

import torch
from torch import Tensor


def stats_of(lse: Tensor) -> Tensor:
    """(..., 2), in lse's dtype: a row's reference in log2 units and 1 / the sum of its weights against it, which is 1,
    or 0 without keys. A NaN stays one."""
    empty = lse == -math.inf
    return torch.stack([torch.where(empty, 0, lse * math.log2(math.e)), (~empty).to(lse.dtype)], -1)
