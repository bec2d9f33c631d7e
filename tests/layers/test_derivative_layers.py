"""Second derivatives and forward mode of the layer operators, rope and merge_states, against the reference layers."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp

import attnjourney
from attnjourney import ops, reference

F64 = torch.float64


def normal(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, dtype=F64, generator=generator) / s[-1] ** 0.5 if s else None for s in shapes]


def _mha():
    x, w, b, o, c, mask = normal((2, 4, 8), (24, 8), (24,), (8, 8), (8,), (4, 4))
    options = dict(num_heads=2, dropout_p=0.25)
    names = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "attn_mask")
    return (x, w, b, o, c, mask), lambda f: lambda x, *rest: f(x, x, x, **dict(zip(names, rest)), **options)


def _gpt():
    return normal(
        (2, 4, 8), (24, 8), (24,), (8, 8), (8,)
    ), lambda f: lambda x, w, b, o, c: f(x, 2, w, b, o, c, dropout_p=0.25)


def _tables(columns):
    angle = torch.arange(4.0, dtype=F64)[:, None] * torch.tensor([1.0, 0.3, 0.1][:columns], dtype=F64)
    return dict(cos=angle.cos(), sin=angle.sin())


def _gqa():
    inputs = normal((2, 4, 8), (8, 8), (4, 8), (4, 8), (8, 8), (8,), (4,), (4,), (8,))
    return inputs, lambda f: lambda x, *weights: f(x, 4, 2, *weights, **_tables(1))


def _mla():
    inputs = normal((2, 4, 8), (6, 8), (6,), (2 * 6, 6), (5 + 2, 8), (5,), (2 * (4 + 3), 5), (8, 6))
    return inputs, lambda f: lambda x, *weights: f(x, 2, 4, 2, 3, *weights, **_tables(1))


LAYERS = {"mha": _mha, "gpt_attention": _gpt, "gqa": _gqa, "mla": _mla}


def layer(name):
    inputs, call = LAYERS[name]()
    functions = [call(getattr(module, name)) for module in (ops, reference)]

    def seeded(f):
        def run(*x):
            torch.manual_seed(1)
            return f(*x)

        return run

    return inputs, *map(seeded, functions)


def second(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum((g * g.detach().cos()).sum() for g in first), leaves)]


@pytest.mark.parametrize("name", LAYERS)
def test_double_backward(name):
    inputs, ours, theirs = layer(name)
    torch.testing.assert_close(second(ours, inputs), second(theirs, inputs), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_one_input_differentiated_twice_and_the_first_order_left_as_it_was(name):
    inputs, ours, theirs = layer(name)
    results = []
    for function in (ours, theirs):
        x = inputs[1].clone().requires_grad_()
        (first,) = torch.autograd.grad(function(inputs[0], x, *inputs[2:]).square().sum(), x, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), x)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    x = inputs[1].clone().requires_grad_()
    (plain,) = torch.autograd.grad(ours(inputs[0], x, *inputs[2:]).square().sum(), x)
    torch.testing.assert_close(plain, results[0][0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode(name):
    inputs, ours, theirs = layer(name)
    tangents = tuple(x.cos() for x in inputs)
    expected = jvp(theirs, tuple(inputs), tangents)
    torch.testing.assert_close(jvp(ours, tuple(inputs), tangents), expected, rtol=1e-9, atol=1e-11)
    for i, t in enumerate(tangents):  # each alone
        only = tuple(t if j == i else torch.zeros_like(x) for j, x in enumerate(inputs))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) if j == i else x for j, x in enumerate(inputs)]
            change = forward_ad.unpack_dual(ours(*duals)).tangent
        torch.testing.assert_close(change, jvp(theirs, tuple(inputs), only)[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_hessian_vector_products(name):
    inputs, ours, theirs = layer(name)
    results = []
    for function in (ours, theirs):
        loss = lambda x, function=function: function(x, *inputs[1:]).square().sum()  # noqa: E731
        x = inputs[0].clone().requires_grad_()
        with forward_ad.dual_level():  # without torch.func: forward over reverse
            out = loss(forward_ad.make_dual(x, x.detach().cos()))
            eager = forward_ad.unpack_dual(torch.autograd.grad(out, x)[0]).tangent
        results.append([jvp(grad(loss), (inputs[0],), (inputs[0].cos(),))[1], eager])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_merge_states_and_rope():
    out_a, out_b, lse_a, lse_b = (x.requires_grad_() for x in normal((2, 3, 4), (2, 3, 4), (2, 3), (2, 3)))
    inputs = (out_a, lse_a, out_b, lse_b)
    torch.autograd.gradcheck(attnjourney.merge_states, inputs, check_forward_ad=True)
    torch.autograd.gradgradcheck(attnjourney.merge_states, inputs)
    x = normal((1, 2, 4, 4))[0].requires_grad_()
    rope = torch.ops.attnjourney.rope
    torch.autograd.gradcheck(lambda x: rope(x, **_tables(2)), x, check_forward_ad=True)
    loss = lambda x: rope(x, **_tables(2)).pow(3).sum()  # noqa: E731
    assert hessian(loss)(x.detach()).abs().max() > 1


def test_decoding_loses_no_tangent():
    x = torch.randn(1, 2, 1, 4)
    keys = torch.randn(1, 2, 8, 4)
    lengths = torch.tensor([8])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward derivative"):
        attnjourney.decode(forward_ad.make_dual(x, x), keys, keys, lengths)
