"""Compiled FlexAttention. The cost of compiling is not measured. On CPU it has no backward."""

from __future__ import annotations

import functools

import torch

from .. import blocks
from .base import Skip, TorchPeer


def _causal(batch, head, query, key):
    return query >= key


class Flex(TorchPeer):
    name = "flex"
    about = "torch.compile(flex_attention)"

    @functools.cached_property
    def compiled(self):
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
        return torch.compile(flex_attention, dynamic=False)

    def attend(self, case, inputs):
        from torch.nn.attention.flex_attention import and_masks, create_block_mask

        if case.dropout:
            raise Skip("no dropout")
        padding = case.mask == "padding"
        rules = [_causal] if case.causal else []
        if padding:
            keep = inputs.mask[:, 0, 0]
            rules.append(lambda batch, head, query, key: keep[batch, key])
        if case.mask == "bigbird":
            pattern, size = blocks.of_case(case).to(inputs.grad.device), case.extent
            rules.append(lambda batch, head, query, key: pattern[query // size, key // size])
            padding = True  # the mask is the rule's
        block = None
        if rules:
            batch, device = case.batch if case.mask == "padding" else None, inputs.grad.device
            block = create_block_mask(and_masks(*rules), batch, None, case.q_len, case.kv_len, device=str(device))
        compiled, gqa = self.compiled, case.heads != case.kv_heads

        def attend(q, k, v, causal, mask=None):
            add = None if mask is None or padding else lambda score, b, h, i, j: score + mask[b, h, i, j]
            return compiled(q, k, v, score_mod=add, block_mask=block, enable_gqa=gqa)

        return attend

    def build(self, case, inputs, which):
        if which != "forward" and inputs.grad.device.type == "cpu":
            raise Skip("no backward on CPU")
        call = super().build(case, inputs, which)
        try:
            if which == "forward":
                with torch.no_grad():
                    call()
            else:
                call()
        except Exception as error:  # the compiler's exceptions have no common base
            raise Skip(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        return call
