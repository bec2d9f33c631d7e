"""F.scaled_dot_product_attention, as it chooses by itself and by the name of each backend."""

from __future__ import annotations

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cases import DERIVATIVES
from ..options import OPTIONS
from .base import Skip, TorchPeer, refused


class Sdpa(TorchPeer):
    name = "sdpa"
    about = "F.scaled_dot_product_attention, its own choice of backend"
    options = True

    def attend(self, case, inputs):
        if case.option:
            return self.with_option(case, inputs.tensors[0])
        function, dropout, gqa = F.scaled_dot_product_attention, case.dropout, case.heads != case.kv_heads
        return lambda q, k, v, causal, mask=None: function(q, k, v, mask, dropout, causal, enable_gqa=gqa)

    def with_option(self, case, query):
        option = OPTIONS[case.option]
        if option.mask is None:
            raise Skip(f"no mask tensor is the same as {case.option}")
        function, mask = F.scaled_dot_product_attention, option.mask(case, query)
        return lambda q, k, v, causal: function(q, k, v, mask)

    def build(self, case, inputs, which):
        call = super().build(case, inputs, which)
        if which in DERIVATIVES:  # which the fused backends lack
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:
                raise refused(error) from error
        return call


class SdpaBackend(Sdpa):
    def __init__(self, name: str, backend: SDPBackend, devices: tuple[str, ...]):
        self.name = f"sdpa-{name}"
        self.about = f"F.scaled_dot_product_attention under sdpa_kernel({backend.name})"
        self.backend = backend
        self.devices = devices

    def missing(self, device):
        return None if device in self.devices else f"no such backend on {device}"

    def context(self):
        return sdpa_kernel(self.backend)

    def build(self, case, inputs, which):
        try:
            with self.context():
                call = super().build(case, inputs, which)
                call()
        except RuntimeError as error:
            raise refused(error) from error
        return call


PEERS = [
    Sdpa(),
    SdpaBackend("math", SDPBackend.MATH, ("cpu", "cuda")),
    SdpaBackend("flash", SDPBackend.FLASH_ATTENTION, ("cpu", "cuda")),
    SdpaBackend("efficient", SDPBackend.EFFICIENT_ATTENTION, ("cuda",)),
    SdpaBackend("cudnn", SDPBackend.CUDNN_ATTENTION, ("cuda",)),
]
