"""Peers of the functions in functions.py: plain PyTorch, and softmax attention of the same shape."""

from __future__ import annotations

from ..functions import FUNCTIONS
from .base import Skip, TorchPeer


class Plain(TorchPeer):
    name = "plain"
    about = "linear, Infini- and token-sparse attention in plain PyTorch, in chunks"

    def function(self, case, inputs):
        plain = FUNCTIONS[case.function].plain if case.function else None
        if plain is None:
            raise Skip("only for linear and Infini-attention")
        return lambda *tensors: plain(case, *tensors)


class Softmax(TorchPeer):
    name = "softmax"
    about = "attnjourney.attention of the same shape, beside linear and token-sparse attention and numbers in e4m3"
    same_function = False

    def function(self, case, inputs):
        if case.function not in ("linear", "sparse", "sparse_latents", "fp8"):
            raise Skip("only beside linear and token-sparse attention and numbers in e4m3")
        import attnjourney

        causal = case.function == "linear" or (case.function == "fp8" and case.causal)
        return lambda q, k, v: attnjourney.attention(q, k, v, is_causal=causal, enable_gqa=True)
