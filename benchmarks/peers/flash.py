"""flash-attn 2 and 3, where they are installed, on views of the inputs in their (batch, length, heads, dim) layout."""

from __future__ import annotations

import importlib

import torch

from ..options import OPTIONS
from .base import Skip, TorchPeer, refused


class FlashAttn(TorchPeer):
    options = True

    def __init__(self, name: str, package: str, version: int):
        self.name = name
        self.about = f"flash-attn {version} ({package})"
        self.package = package
        self.version = version
        # by the same keyword as ours
        self.known = {"softcap", "window"} | ({"alibi"} if version == 2 else set())

    def missing(self, device):
        if device != "cuda":
            return f"not on {device}"
        try:
            importlib.import_module(self.package)
        except Exception as error:  # one that was built for another torch fails in many ways
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return None

    def _check(self, case):
        """Raises Skip."""
        if case.dtype not in ("bf16", "fp16"):
            raise Skip("16-bit numbers alone")
        if case.mask or case.option not in ("", *self.known):
            raise Skip(f"no {case.mask or case.option}")
        if case.dropout and self.version != 2:
            raise Skip("no dropout")
        if case.decode not in ("", "dense"):
            raise Skip("no such cache")
        if case.head_dim != case.v_head_dim and self.version == 2:
            raise Skip("head sizes must be equal")
        if (case.causal or case.option) and case.q_len != case.kv_len:
            raise Skip("aligned to the last key")

    def attend(self, case, inputs):
        self._check(case)
        module = importlib.import_module(self.package)
        if case.decode:
            lengths = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=inputs.grad.device)
            function, options = module.flash_attn_with_kvcache, {"cache_seqlens": lengths}
        else:
            function, options = module.flash_attn_func, {"deterministic": case.deterministic}
        if case.option:
            options |= OPTIONS[case.option].ours(case, inputs.tensors[0])
        if case.dropout:
            options["dropout_p"] = case.dropout

        def attend(q, k, v, causal, mask=None):
            out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return attend

    def build(self, case, inputs, which):
        try:
            call = super().build(case, inputs, which)
            call()
        except RuntimeError as error:
            raise refused(error) from error
        return call


PEERS = [FlashAttn("fa2", "flash_attn", 2), FlashAttn("fa3", "flash_attn_interface", 3)]
