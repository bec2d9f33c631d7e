"""attnjourney's own operators."""

from __future__ import annotations

import torch

from .. import layers
from .base import Skip, TorchPeer


class Ours(TorchPeer):
    name = "ours"
    about = "torch.ops.attnjourney.*"

    def missing(self, device):
        import attnjourney  # noqa: F401  registers the operators

    def function(self, case, inputs):
        if not case.layer:
            return super().function(case, inputs)
        layer = layers.LAYERS[case.layer]
        if not hasattr(torch.ops.attnjourney, layer.operator):
            raise Skip(f"no operator attnjourney::{layer.operator} in this build")
        return lambda *tensors: layer.ours(case, *tensors)

    def attend(self, case, inputs):
        if case.decode:
            decode, lengths = torch.ops.attnjourney.decode, torch.full((case.batch,), case.kv_len)
            return lambda q, k, v, causal, mask=None: decode(q, k, v, lengths.to(q.device))[0]
        operator, dropout, gqa = torch.ops.attnjourney.attention, case.dropout, case.heads != case.kv_heads
        return lambda q, k, v, causal, mask=None: operator(q, k, v, mask, dropout, causal, enable_gqa=gqa)

    def build(self, case, inputs, which):
        try:
            call = super().build(case, inputs, which)
            call()
        except NotImplementedError as error:  # the dispatcher found no kernel
            raise Skip(f"no kernel for {inputs.grad.device.type} in this build") from error
        return call
