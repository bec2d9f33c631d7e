"""What registration.py makes of schemas, shown on an operator of the test's own."""

import pytest
import torch
from torch.func import grad, jvp, vmap

from attnjourney.ops._registry import registration

SCHEMAS = """
_toy(Tensor x, Tensor y) -> Tensor
_toy_forward(Tensor x, Tensor y) -> (Tensor square, Tensor sign, Tensor cube)
_toy_backward(Tensor? grad_square, Tensor? grad_cube, Tensor x, Tensor y, int need) -> (Tensor grad_x, Tensor grad_y)
_toy_jvp(Tensor x, Tensor? x_tangent, Tensor? y_tangent) -> (Tensor square_tangent, Tensor cube_tangent)
_toy_backward_jvp(Tensor? grad_square, Tensor? grad_cube, Tensor x, Tensor? x_tangent, Tensor? grad_square_tangent, Tensor? grad_cube_tangent, int need) -> (Tensor grad_x_tangent, Tensor grad_y_tangent)
"""  # noqa: E501


def _zero(x):
    return 0.0 if x is None else x


def _forward(x, y):
    return x.square() + y, x.sign(), x**3 - y


def _backward(square, cube, x, y, need):
    grad_x = 2 * x * _zero(square) + 3 * x.square() * _zero(cube)
    return grad_x, torch.zeros_like(x) + _zero(square) - _zero(cube)


def _jvp(x, x_change, y_change):
    return 2 * x * _zero(x_change) + _zero(y_change), 3 * x.square() * _zero(x_change) - _zero(y_change)


def _backward_jvp(square, cube, x, x_change, square_change, cube_change, need):
    grad_x, grad_y = _backward(square_change, cube_change, x, None, need)
    return grad_x + (2 * _zero(square) + 6 * x * _zero(cube)) * _zero(x_change), grad_y


@pytest.fixture(scope="module")
def toy():
    """x, y -> x^2 + y, sign(x), x^3 - y: an output without a gradient between two that have one."""
    library = torch.library.Library("attnjourney", "FRAGMENT")
    for schema in SCHEMAS.strip().splitlines():
        library.define(schema)
    kernels = {"_forward": _forward, "_backward": _backward, "_jvp": _jvp, "_backward_jvp": _backward_jvp}
    for suffix, kernel in kernels.items():
        library.impl("_toy" + suffix, kernel, "CPU")
    nothing = lambda *_: None  # noqa: E731  one call a sample
    registration.register("_toy", fake=lambda *, x, y: _forward(x, y), vmap=(nothing,) * 4)
    yield torch.ops.attnjourney._toy_forward
    del registration.OPERATORS["_toy"]


def loss(toy):
    def of(x):
        square, sign, cube = toy(x, x.detach() * 0)
        return (square + 5 * cube * sign).sum()

    return of


X = torch.tensor([[-2.0, 1.0, 3.0], [0.5, -1.5, 4.0]], dtype=torch.float64)
FIRST = 2 * X + 15 * X.square() * X.sign()
SECOND = 2 + 30 * X.abs()


def test_an_output_without_gradient_between_two_that_have_one(toy):
    x = X.clone().requires_grad_()
    (eager,) = torch.autograd.grad(loss(toy)(x), x, create_graph=True)
    torch.testing.assert_close(eager, FIRST)
    torch.testing.assert_close(torch.autograd.grad(eager.sum(), x)[0], SECOND)
    torch.testing.assert_close(grad(loss(toy))(X), FIRST)
    torch.testing.assert_close(vmap(grad(loss(toy)))(X), FIRST)
    torch.testing.assert_close(jvp(loss(toy), (X,), (torch.ones_like(X),))[1], FIRST.sum())
    torch.testing.assert_close(jvp(grad(loss(toy)), (X,), (torch.ones_like(X),))[1], SECOND)
    torch.testing.assert_close(grad(lambda x: grad(loss(toy))(x).sum())(X), SECOND)


def test_it_does_not_require_grad(toy):
    assert [y.requires_grad for y in toy(X.clone().requires_grad_(), X)] == [True, False, True]
    flags = []
    grad(lambda x: [flags.extend(y.requires_grad for y in toy(x, X)), toy(x, X)[0].sum()][1])(X)
    assert flags == [True, False, True]
