"""Checks that the tests of the layer operators share: values and gradients against the same layer in plain PyTorch."""

import torch
from testing import GRADIENT_FACTOR, assert_close_to_reference
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

EXACT = 1e-12  # float64: relative to the largest number of a tensor
FLOAT32_ULPS = 16  # a chain of small products: a few ulp in either, and who has more is luck


def run(function, tensors, constants, grad_out):
    """(out, {name: gradient}) of function(**tensors, **constants); every tensor that is not None requires grad."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves, **constants)
    wanted = {name: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out)
    return out.detach(), dict(zip(wanted, gradients))


def as_double(x):
    return x.double() if isinstance(x, torch.Tensor) else x


def check_layer(op, reference, tensors, constants, grad_out):
    """The rule of testing.py on the result and every gradient; float64 also agrees to EXACT."""
    __tracebackhide__ = True
    wide = [{name: as_double(x) for name, x in group.items()} for group in (tensors, constants)]
    expected, expected_gradients = run(reference, *wide, grad_out.double())
    plain, plain_gradients = run(reference, tensors, constants, grad_out)
    out, gradients = run(op, tensors, constants, grad_out)
    if out.dtype == torch.float64:
        assert_agree(out, expected, "out")
        for name, gradient in gradients.items():
            assert_agree(gradient, expected_gradients[name], f"gradient of {name}")
        return
    rounding = {n: None for n in gradients}
    if out.dtype == torch.float32:
        rounding = {n: FLOAT32_ULPS * torch.finfo(torch.float32).eps * g.abs() for n, g in expected_gradients.items()}
    assert_close_to_reference(out, plain, expected, name="out")
    for name, gradient in gradients.items():
        assert gradient.dtype == tensors[name].dtype, name
        rule = GRADIENT_FACTOR, f"gradient of {name}", rounding[name]
        assert_close_to_reference(gradient, plain_gradients[name], expected_gradients[name], *rule)


def assert_agree(actual, expected, name, tolerance=EXACT):
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.3g} above {tolerance:.3g}"


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
