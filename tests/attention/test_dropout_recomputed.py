"""Dropout whose forward is computed again: by a compiled graph's partitioner, by checkpointing."""

from functools import partial

import pytest
import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint

import attnjourney
from tests.support.quick import operators

P = 0.5


def _mask():
    return attnjourney.BlockMask.from_dense(torch.ones(16, 16, dtype=torch.bool).tril(), 16)


def _varlen(x):
    packed, ends = x.transpose(1, 2).flatten(0, 1), torch.tensor([0, 16], dtype=torch.int32)
    return attnjourney.varlen_attention(packed, packed, packed, ends, ends, P)


def _module(make):
    torch.manual_seed(1)
    layer = make()
    return lambda x: layer(x.transpose(1, 2).flatten(2))


def _multihead(need_weights):
    layer = attnjourney.nn.MultiheadAttention(16, 2, dropout=P, batch_first=True)
    return lambda x: layer(x, x, x, need_weights=need_weights)[0]


CALLS = {
    "attention": lambda x: attnjourney.attention(x, x, x, None, P, window_size=(7, 7)),
    "lse": lambda x: attnjourney.attention(x, x, x, dropout_p=P, return_lse=True)[0],
    "blocks": lambda x: attnjourney.attention(x, x, x, MASK, P),
    "varlen": _varlen,
    "longformer": lambda x: attnjourney.longformer_attention(x, x, x, window=3, dilation=[1, 2], dropout_p=P),
    "gpt": _module(lambda: attnjourney.nn.CausalSelfAttention(16, 2, dropout=P)),
    "mha": _module(lambda: _multihead(False)),
    "mha weights": _module(lambda: _multihead(True)),
    "gqa": _module(lambda: attnjourney.nn.GroupedQueryAttention(16, 2, 1, dropout=P)),
}
MASK = _mask()


def gradient(function, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    out = function(x * 1.5)
    (g,) = torch.autograd.grad(out, x, torch.linspace(-1, 1, out.numel()).view_as(out))
    return out.detach(), g


@pytest.mark.parametrize("budget", [0.0, 1.0])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_backward_has_the_bits_of_its_forward(name, budget):
    torch._dynamo.reset()
    x, call = torch.randn(1, 2, 16, 8), CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch._functorch.config.patch(activation_memory_budget=budget):
        for ours, eager in zip(gradient(compiled, x), gradient(call, x)):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_checkpointed(preserve_rng_state):
    """The output is linear in the values, so it is their product with their gradient where both have the same bits."""
    q, v = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8, requires_grad=True)
    seed = None if preserve_rng_state else torch.tensor(5)  # else the caller hands the bits over

    def call(q, v, seed):
        return attnjourney.attention(q * 1.5, q * 1.5, v * 1.0, dropout_p=P, dropout_seed=seed)

    out = checkpoint(call, q, v, seed, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    out.sum().backward()
    torch.testing.assert_close(out.sum(), (v.grad * v).sum())


def test_random_operators_are_in_a_graph_only_where_dropout_is_on():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(1, 2, 8, 4)
    for p, draws in ((0.0, False), (P, True)):
        graph = make_fx(partial(attnjourney.attention, dropout_p=p))(x, x, x).graph
        tags = [tag for node in graph.nodes for tag in getattr(node.target, "tags", ())]
        assert (torch.Tag.nondeterministic_seeded in tags) == draws


def test_every_operator_is_marked_as_compilable():
    for name in operators():
        tags = getattr(torch.ops.attnjourney, name).default.tags
        assert torch.Tag.pt2_compliant_tag in tags and torch.Tag.nondeterministic_seeded not in tags, name


def test_bits_are_those_of_the_operator():
    x = torch.randn(1, 2, 16, 8)
    torch.manual_seed(3)
    own = attnjourney.attention(x, x, x, dropout_p=P)
    torch.manual_seed(3)
    assert torch.equal(own, torch.ops.attnjourney.attention(x, x, x, dropout_p=P))
