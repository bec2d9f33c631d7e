"""attnjourney's own operators."""

from __future__ import annotations

import torch

from .. import functions, layers
from ..cases import BYTE_CACHES
from ..options import ours as with_option
from .base import Skip, TorchPeer


class Ours(TorchPeer):
    name = "ours"
    about = "torch.ops.attnjourney.*"
    options = True

    def missing(self, device):
        import attnjourney  # noqa: F401  registers the operators

    def function(self, case, inputs):
        if case.function:
            ours, prepare = functions.FUNCTIONS[case.function].ours, functions.FUNCTIONS[case.function].prepare
            if prepare:
                given = prepare(case, *inputs.tensors)
                return lambda *tensors: ours(case, *given)
            return lambda *tensors: ours(case, *tensors)
        if not case.layer:
            return super().function(case, inputs)
        layer = layers.LAYERS[case.layer]
        if not hasattr(torch.ops.attnjourney, layer.operator):
            raise Skip(f"no operator attnjourney::{layer.operator} in this build")
        return lambda *tensors: layer.ours(case, *tensors)

    def attend(self, case, inputs):
        if case.decode:
            decode, (key, value, lengths, options) = torch.ops.attnjourney.decode, _cache(case, inputs)
            return lambda q, k, v, causal, mask=None: decode(q, key, value, lengths, **options)[0]
        if case.option:
            return with_option(case, inputs.tensors[0])
        if case.mask == "bigbird":
            import attnjourney

            blocks = attnjourney.BlockMask.from_dense(inputs.mask, case.extent)
            return lambda q, k, v, causal, mask=None: attnjourney.attention(q, k, v, blocks, is_causal=causal)
        operator, dropout, gqa = torch.ops.attnjourney.attention, case.dropout, case.heads != case.kv_heads
        return lambda q, k, v, causal, mask=None: operator(q, k, v, mask, dropout, causal, enable_gqa=gqa)

    def build(self, case, inputs, which):
        try:
            call = super().build(case, inputs, which)
            call()
        except NotImplementedError as error:  # the dispatcher found no kernel
            raise Skip(f"no kernel for {inputs.grad.device.type} in this build") from error
        return call


BLOCK = 16  # tokens of a block of a paged cache


def _cache(case, inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """key, value, lengths and options of `decode`: the keys of inputs in a dense cache, as bytes, in shuffled blocks,
    or in a ring that has gone round one and a half times."""
    _, key, value = inputs.tensors
    lengths = torch.full((case.batch,), case.kv_len, device=key.device)
    if case.decode in BYTE_CACHES:
        from attnjourney.reference import quantize

        (key, key_scale), (value, value_scale) = (quantize(x, BYTE_CACHES[case.decode]) for x in (key, value))
        return key, value, lengths, {"key_scale": key_scale, "value_scale": value_scale}
    if case.decode == "ring":
        return key, value, lengths * 3 // 2, {"ring": True, "window_size": (case.kv_len - 1, -1)}
    if case.decode != "paged":
        return key, value, lengths, {}
    padding = -case.kv_len % BLOCK
    pools = []
    for x in (key, value):
        blocks = torch.nn.functional.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
        pools.append(blocks.flatten(0, 1))  # (batch * blocks, heads, BLOCK, dim)
    order = torch.randperm(len(pools[0]), generator=torch.Generator().manual_seed(0)).to(key.device)
    table = order.argsort().to(torch.int32).view(case.batch, -1)
    return *(x[order].contiguous() for x in pools), lengths, {"block_table": table}
