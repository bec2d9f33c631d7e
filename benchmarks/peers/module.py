"""nn.MultiheadAttention, for the layers it can express."""

from __future__ import annotations

import torch

from .base import Skip, TorchPeer


class Module(TorchPeer):
    name = "mha"
    about = "nn.MultiheadAttention (layer cases; without grad its fused inference path)"

    def function(self, case, inputs):
        if not case.layer:
            raise Skip("a layer, not an attention function")
        if case.layer not in ("mha", "gpt"):
            raise Skip("has no grouped heads or latents")
        x, in_weight, in_bias, out_weight, out_bias = inputs.tensors
        module = torch.nn.MultiheadAttention(
            x.shape[-1], case.heads, batch_first=True, device=x.device, dtype=x.dtype
        ).eval()  # eval: no dropout in either, and the inference path where gradients are not wanted
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        with torch.no_grad():
            for name, value in zip(names, (in_weight, in_bias, out_weight, out_bias)):
                module.get_parameter(name).copy_(value)
        mask = None
        if case.causal:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(case.q_len, x.device, x.dtype)
        self.module = module
        return lambda x: module(x, x, x, need_weights=False, attn_mask=mask, is_causal=case.causal)[0]

    def build(self, case, inputs, which):
        function = self.function(case, inputs)  # of x; the weights are the module's own
        x, grad = inputs.tensors[0], inputs.grad
        if which == "forward":
            return lambda: function(x)
        leaves = (x.detach().requires_grad_(), *self.module.parameters())
        x = leaves[0]
        differentiate = torch.autograd.grad
        if which == "both":
            return lambda: differentiate(function(x), leaves, grad)
        out = function(x)
        return lambda: differentiate(out, leaves, grad, retain_graph=True)
