"""The dtype in which the operators compute and sum."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, softmax, lse and states for inputs of that dtype: float64 for float64, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# of caches in bytes, beside a float32 scale for each row
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
