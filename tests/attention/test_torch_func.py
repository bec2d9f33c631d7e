"""`attention` under torch.func: vmap, per-sample gradients, vjp, batched gradients, autocast, dropout."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from attnjourney import attention, reference

SAMPLES = 3


def qkv(*shape, requires_grad=False):
    generator = torch.Generator().manual_seed(sum(shape))
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(requires_grad) for _ in range(3)
    ]


def gradients(function, inputs):
    """(result, *gradients of a sum of squares)."""
    inputs = [x if x.requires_grad else x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))


class Names(TorchDispatchMode):
    """The names of our operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "attnjourney":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


# name: (shapes of a sample's query, key, value, mask), in_dims, options
BATCHED = {
    "all": (((2, 3, 4), (2, 5, 4), (2, 5, 4), None), (0, 0, 0, None), {}),
    "inner_dims": (((2, 3, 4), (2, 5, 4), (2, 5, 4), (3, 5)), (1, 3, 2, 1), {}),
    "query_only": (((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6), None), (0, None, None, None), dict(is_causal=True)),
    "key_only": (((2, 2, 3, 4), (2, 1, 5, 4), (1, 2, 5, 4), (2, 1, 5)), (None, 0, None, None), {}),
    "mask_only": (((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), (3, 5)), (None, None, None, 0), {}),
    "rank2": (((3, 4), (5, 4), (5, 4), (3, 5)), (0, None, 0, 0), {}),
    "rank2_gqa": (((3, 4), (5, 4), (5, 4), (5,)), (None, 0, 0, 0), dict(enable_gqa=True)),
    "gqa": (((4, 3, 4), (2, 5, 4), (2, 5, 4), (1, 3, 5)), (0, 0, 0, None), dict(enable_gqa=True)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_and_per_sample_gradients_equal_a_loop(name):
    shapes, in_dims, options = BATCHED[name]
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for shape, dim in zip(shapes, in_dims):
        if shape is not None:
            batched = shape if dim is None else (*shape[:dim], SAMPLES, *shape[dim:])
            inputs.append(torch.randn(batched, dtype=torch.float64, generator=generator))
    in_dims = in_dims[: len(inputs)]
    samples = [[x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims)] for i in range(SAMPLES)]

    def function(*x):
        return attention(*x, **options)

    def loss(*x):
        return function(*x).square().sum()

    expected = [gradients(lambda *x: reference.attention(*x, **options), sample) for sample in samples]
    out, *per_sample = (torch.stack(x) for x in zip(*expected))

    with Names() as mode:
        torch.testing.assert_close(vmap(function, in_dims)(*inputs), out)
    assert mode.names == ["attention_forward"]  # one call, no loop
    with Names() as mode:
        result = vmap(grad(loss, tuple(range(len(inputs)))), in_dims)(*inputs)
    assert mode.names == ["attention_forward", "attention_backward"]
    torch.testing.assert_close(list(result), per_sample)


def test_per_sample_gradients_of_a_module():
    """The textbook use: one gradient of the weights for each sample, as in differential privacy."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(4, 12, dtype=torch.float64)

        def forward(self, x):  # (batch, length, 4)
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            return attention(q, k, v, is_causal=True)

    layer, x = Layer(), torch.randn(SAMPLES, 5, 4, dtype=torch.float64)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights, sample):
        return functional_call(layer, weights, (sample[None],)).square().sum()

    per_sample = vmap(grad(loss), (None, 0))(weights, x)
    for i in range(SAMPLES):
        layer.zero_grad()
        layer(x[i : i + 1]).square().sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(per_sample[name][i], p.grad)


def test_nested_vmap_and_gradients_outside():
    inputs = qkv(2, 3, 2, 4, 4, requires_grad=True)  # .backward outside of vmap
    torch.testing.assert_close(gradients(vmap(vmap(attention)), inputs), gradients(reference.attention, inputs))


def test_grad_inside_differentiable_code():
    """torch.func.grad of some inputs while the others require grad: right to the second order."""
    query, key, value = qkv(1, 2, 3, 4)
    key.requires_grad_()
    first = grad(lambda q: attention(q, key, value).square().sum())(query)
    expected = grad(lambda q: reference.attention(q, key, value).square().sum())(query)
    torch.testing.assert_close(first, expected)
    wanted = torch.autograd.grad(expected.sum(), key)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), key), wanted)


def test_vjp_and_jacrev():
    query, key, value = qkv(1, 2, 3, 4)
    cotangent = torch.randn_like(query)
    ours, theirs = (vjp(f, query, key, value)[1](cotangent) for f in (attention, reference.attention))
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (jacrev(lambda q, f=f: f(q, key, value))(query) for f in (attention, reference.attention))
    torch.testing.assert_close(ours, theirs)


def test_lse_under_grad():
    """The raw operator differentiates through both of its outputs."""
    inputs = qkv(1, 2, 3, 4)

    def ours(*x):
        out, lse, _ = torch.ops.attnjourney.attention_forward(*x)
        return out.sum() + lse.square().sum()

    def theirs(*x):
        out, lse = reference.attention(*x, return_lse=True)
        return out.sum() + lse.square().sum()

    torch.testing.assert_close(grad(ours, (0, 1, 2))(*inputs), grad(theirs, (0, 1, 2))(*inputs))


def test_batched_gradients():
    inputs = qkv(2, 2, 3, 4, requires_grad=True)
    cotangents = torch.randn(5, 2, 2, 3, 4, dtype=torch.float64)
    batched = torch.autograd.grad(attention(*inputs), inputs, cotangents, is_grads_batched=True)
    out = attention(*inputs)
    looped = [torch.autograd.grad(out, inputs, c, retain_graph=True) for c in cotangents]
    torch.testing.assert_close(batched, tuple(torch.stack(x) for x in zip(*looped)))


def test_dropout_randomness():
    inputs = [x.expand(4, 1, 16, 8) for x in qkv(1, 16, 8)]

    def function(*x):
        return attention(*x, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(*inputs)
    same = vmap(function, randomness="same")(*inputs)
    assert all(torch.equal(same[0], x) for x in same)
    different = vmap(function, randomness="different")(*inputs)
    assert not any(torch.equal(different[0], x) for x in different[1:])

    for randomness in ("same", "different"):  # the backward drops what the forward dropped: out is linear in value
        torch.manual_seed(6)
        out = vmap(function, randomness=randomness)(*inputs)
        torch.manual_seed(6)
        slope = vmap(grad(lambda *x: function(*x).sum(), 2), randomness=randomness)(*inputs)
        torch.testing.assert_close((slope * inputs[2]).sum((1, 2, 3)), out.sum((1, 2, 3)))


def test_autocast():
    inputs = [x.float() for x in qkv(3, 2, 4, 4)]

    def loss(*x):
        return attention(*x).float().square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vmap(attention)(*inputs), attention(*inputs))
        per_sample = vmap(grad(loss, (0, 1, 2)))(*inputs)
        looped = [grad(loss, (0, 1, 2))(*x) for x in zip(*inputs)]
    assert [g.dtype for g in per_sample] == [torch.float32] * 3
    torch.testing.assert_close(per_sample, tuple(torch.stack(x) for x in zip(*looped)))


def test_raw_backward_under_vmap():
    query, key, value = qkv(SAMPLES, 2, 3, 4)
    mask = torch.randn(SAMPLES, 3, 3, dtype=torch.float64)
    out, lse, stats = vmap(torch.ops.attnjourney.attention_forward)(query, key, value, mask)
    inputs = (torch.ones_like(out), lse, query, key, value, mask, out, lse, stats)
    batched = vmap(torch.ops.attnjourney.attention_backward)(*inputs)
    looped = [torch.ops.attnjourney.attention_backward(*(x[i] for x in inputs)) for i in range(SAMPLES)]
    torch.testing.assert_close(batched, tuple(torch.stack(x) for x in zip(*looped)))
