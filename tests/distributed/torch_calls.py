"""What ranks do with torch's own context parallelism on the CPU."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

import attnjourney.distributed  # noqa: F401
from tests.distributed.dtensor_calls import idle, mesh_of, numbers


def under_torchs_entry(rank, size, kv_heads, is_causal):
    """What is wrong with F.scaled_dot_product_attention under context_parallel, beside the whole in float64."""
    if idle(rank, size):
        return []
    mesh = mesh_of(size)
    shapes = [(2, 4, 16, 8), (2, kv_heads, 16, 8), (2, kv_heads, 16, 8)]
    wholes = [numbers(i, *shape) for i, shape in enumerate(shapes)]
    weights = numbers(9, 2, 4, 16, 8)
    options = dict(is_causal=is_causal, enable_gqa=kv_heads != 4)
    leaves = [x.clone().requires_grad_() for x in wholes]
    expected = F.scaled_dot_product_attention(*leaves, **options)
    grads = torch.autograd.grad((expected * weights).sum(), leaves)
    buffers = [*wholes, weights]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        own = [x.detach().clone().requires_grad_() for x in buffers[:3]]
        out = F.scaled_dot_product_attention(*own, **options)
        found = torch.autograd.grad((out * buffers[3]).sum(), own)
        wholes = context_parallel_unshard(mesh, [out.detach(), *found], [2] * 4)
    names = ("out", "query", "key", "value")
    return [
        f"{name} off by {(x - e).abs().max()}"
        for name, x, e in zip(names, wholes, (expected, *grads))
        if not torch.allclose(x, e, rtol=1e-9, atol=1e-11)
    ]
