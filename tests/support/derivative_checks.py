"""Second derivatives, and derivatives in a direction, of attention with any options against the fp64 reference."""

import functools

import torch

import attnjourney
from attnjourney import reference
from tests.support.options_cases import leaves_of
from tests.support.plain import is_float
from tests.support.rounding import rounding_of
from tests.support.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference, random_tensor


def function_of(function, arguments, names):
    """(out, lse) as a function of the named tensors alone; lse 0 where it is not finite, as its gradient is."""

    def call(*inputs):
        named = {**arguments, **dict(zip(names, inputs))}
        tensors = [named.pop(name) for name in ("query", "key", "value")]
        out, lse = function(*tensors, return_lse=True, **named)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    return call


def directions(leaves, seed=40):
    """A tangent for each, the same numbers in every dtype: normal ones in steps of 1/64; an eighth of them per head,
    where ALiBi multiplies them by distances."""
    normal = [random_tensor(x.shape, torch.float64, seed + i, outliers=False) for i, x in enumerate(leaves)]
    steps = [((x * 64).round() / 64).clamp(-255 / 64, 255 / 64) for x in normal]
    return [(t / 8 if x.dim() <= 2 else t).to(x.dtype) for x, t in zip(leaves, steps)]


def jvp(function, tensors, arguments, dtype=None):
    """{name: tangent} of out and lse, all inputs moving."""
    tensors, arguments, leaves = leaves_of(tensors, arguments, dtype)
    arguments = {**arguments, **dict(zip(("query", "key", "value"), tensors))}
    inputs = [x.detach() for x in leaves.values()]
    call = function_of(function, arguments, leaves)
    changes = torch.func.jvp(call, tuple(inputs), tuple(directions(inputs)))[1]
    return dict(zip(("out_tangent", "lse_tangent"), changes))


def double_backward(function, tensors, arguments, dtype=None):
    """{name: gradient} of a sum of all gradients, by the inputs and by the gradients of out and lse."""
    tensors, arguments, leaves = leaves_of(tensors, arguments, dtype)
    arguments = {**arguments, **dict(zip(("query", "key", "value"), tensors))}
    outputs = function_of(function, arguments, leaves)(*leaves.values())
    grads = [x.requires_grad_() for x in directions([x.detach() for x in outputs], 60)]
    first = torch.autograd.grad(outputs, list(leaves.values()), grads, create_graph=True)
    wanted = {**leaves, "grad_out": grads[0], "grad_lse": grads[1]}
    second = torch.autograd.grad(first, list(wanted.values()), directions(first, 80), allow_unused=True)
    return {f"second {n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), second)}


def plain_values(kind, tensors, arguments):
    """Those of the formula in plain PyTorch. In float64 it is no less exact than the reference: its error in float32,
    in the proportion of the two epsilons."""
    if tensors[0].dtype != torch.float64:
        return kind(reference.attention, tensors, arguments)
    narrow = [x.float() for x in tensors]
    options = {n: x.float() if is_float(x) else x for n, x in arguments.items()}
    plain, exact = (kind(reference.attention, narrow, options, t) for t in (torch.float32, torch.float64))
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    right = kind(reference.attention, tensors, arguments)
    return {name: x + (plain[name].double() - exact[name]) * ratio for name, x in right.items()}


def check(tensors, arguments, label="", in_plain=None):
    """Asserts the tolerance rule for tangents and second derivatives; what rounding must cost: rounding.py.

    in_plain: arguments that take the place of ours in the formulas that ours is compared with.
    """
    __tracebackhide__ = True
    results, plainly = {}, {**arguments, **(in_plain or {})}
    for kind in (jvp, double_backward):
        actual = kind(attnjourney.attention, tensors, arguments)
        compare(kind, actual, tensors, plainly, label, OUTPUT_FACTOR if kind is jvp else GRADIENT_FACTOR)
        results.update(actual)
    return results


def compare(kind, actual, tensors, arguments, label="", factor=GRADIENT_FACTOR):
    """The same for what `kind` gives, by name, and whoever has computed it."""
    __tracebackhide__ = True
    plain = plain_values(kind, tensors, arguments)
    exact = kind(reference.attention, tensors, arguments, torch.float64)
    roundings = functools.cache(lambda: rounding_of(kind, tensors, arguments, exact))
    for name in exact:
        x = actual[name]
        assert x.dtype == plain[name].dtype, f"{label} {name}: {x.dtype}"
        rounding = functools.partial(lambda name: roundings()[name], name)
        assert_close_to_reference(x, plain[name], exact[name], factor, f"{label} {name}", rounding)
