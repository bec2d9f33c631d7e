"""Checks that the tests of the layer operators share: values and gradients against the same layer in plain PyTorch."""

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tests.support.arithmetic import roundings_of
from tests.support.plain import is_float
from tests.support.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

SAME = 1e-12  # float64, two ways to the same numbers: relative to the largest of a tensor


def run(function, tensors, constants, grad_out):
    """(out, {name: gradient}) of function(**tensors, **constants); every tensor that is not None requires grad."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves, **constants)
    wanted = {name: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out)
    return out.detach(), dict(zip(wanted, gradients))


def results(function, tensors, constants, grad_out, dtype=None):
    """[out, *gradients] of run(), every floating tensor in that dtype."""

    def cast(x):
        return x.to(dtype or x.dtype) if is_float(x) else x

    tensors, constants = ({name: cast(x) for name, x in group.items()} for group in (tensors, constants))
    out, gradients = run(function, tensors, constants, cast(grad_out))
    return [out, *gradients.values()]


def plain_results(reference, tensors, constants, grad_out):
    """Those of the layer in plain PyTorch. In float64 it is no less exact than what it is compared with: its error in
    float32, in the proportion of the two epsilons."""
    if grad_out.dtype != torch.float64:
        return results(reference, tensors, constants, grad_out)
    arguments = [{n: x.float() if is_float(x) else x for n, x in group.items()} for group in (tensors, constants)]
    plain, exact = (results(reference, *arguments, grad_out.float(), t) for t in (torch.float32, torch.float64))
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    right = results(reference, tensors, constants, grad_out, torch.float64)
    return [x + (a.double() - b) * ratio for x, a, b in zip(right, plain, exact)]


def check_layer(op, reference, tensors, constants, grad_out):
    """The rule of testing.py on the result and every gradient; what rounding must cost: arithmetic.py (in 16 bits, the
    rule's own 4 ulp)."""
    __tracebackhide__ = True

    def in_double():
        return results(reference, tensors, constants, grad_out, torch.float64)

    exact, plain = in_double(), plain_results(reference, tensors, constants, grad_out)
    actual = results(op, tensors, constants, grad_out)
    roundings = [None] * len(exact)
    if grad_out.dtype.itemsize > 2:
        roundings = roundings_of(in_double, exact, grad_out.dtype)
    names = ["out", *(f"gradient of {name}" for name, x in tensors.items() if x is not None)]
    for name, x, same_dtype, wide, rounding in zip(names, actual, plain, exact, roundings, strict=True):
        assert x.dtype == grad_out.dtype, name
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(x, same_dtype, wide, factor, name, rounding)


def assert_agree(actual, expected, name, tolerance=SAME):
    """Two ways to the same numbers agree; right against float64 is what check_layer asks."""
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.3g} above {tolerance:.3g}"


def check_per_sample_gradients(op, tensors, constants):
    """vmap of grad over the batch of x gives what a loop gives, for every weight."""
    __tracebackhide__ = True
    weights = {name: x for name, x in tensors.items() if name != "x"}

    def loss(weights, x):
        return op(x=x.unsqueeze(0), **weights, **constants).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, tensors["x"])
    for i, x in enumerate(tensors["x"]):
        _, expected = run(lambda **w: loss(w, x), weights, {}, torch.ones((), dtype=torch.float64))  # noqa: B023
        for name in weights:
            assert_agree(per_sample[name][i], expected[name], name)


def aten_calls(function):
    """The names, without their aten::, of the ATen operators that a call runs, those called from C++ too."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return [e.name.removeprefix("aten::") for e in profiler.events() if e.name.startswith("aten::")]


def count_flops(function, tensors, constants, grad_out):
    """(forward, backward), with a gradient for every tensor."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in tensors.items()}
    with FlopCounterMode(display=False) as forward:
        out = function(**leaves, **constants)
    with FlopCounterMode(display=False) as backward:
        out.backward(grad_out)
    return forward.get_total_flops(), backward.get_total_flops()


def on_device(device, arguments):
    """The arguments with every tensor on that device; meta: what the fake kernels see."""
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
