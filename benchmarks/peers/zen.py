"""zentorch, through its documented entry torch.compile(backend="zentorch"), forward only."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from .base import Skip, TorchPeer


class ZenTorch(TorchPeer):
    name = "zentorch"
    about = 'torch.compile(backend="zentorch") of F.scaled_dot_product_attention'
    backward = False

    def missing(self, device):
        if importlib.util.find_spec("zentorch") is None:
            return "not installed"
        return None if device == "cpu" else "CPU only"

    def attend(self, case, inputs):
        import zentorch  # noqa: F401  registers the backend

        dropout, gqa = case.dropout, case.heads != case.kv_heads
        if dropout:
            raise Skip("inference only")

        @torch.compile(backend="zentorch", dynamic=False)
        def attend(q, k, v, causal, mask=None):
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=gqa)

        return attend
