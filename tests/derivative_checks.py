"""Second derivatives, and derivatives in a direction, of attention with any options against the fp64 reference."""

import torch
from options_cases import leaves_of
from testing import FLOOR_ULPS, GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference, random_tensor

import attnjourney
from attnjourney import reference


def function_of(function, arguments, names):
    """(out, lse) as a function of the named tensors alone; lse 0 where it is not finite, as its gradient is."""

    def call(*inputs):
        named = {**arguments, **dict(zip(names, inputs))}
        tensors = [named.pop(name) for name in ("query", "key", "value")]
        out, lse = function(*tensors, return_lse=True, **named)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    return call


def directions(leaves, seed=40):
    """A tangent for each: normal numbers; an eighth of them per head, where ALiBi multiplies them by distances."""
    normal = [random_tensor(x.shape, torch.float64, seed + i, outliers=False) for i, x in enumerate(leaves)]
    return [(t / 8 if x.dim() <= 2 else t).to(x.dtype) for x, t in zip(leaves, normal)]


def jvp(function, tensors, arguments, dtype=None):
    """{name: out, and the tangents of out and lse}, all inputs moving."""
    tensors, arguments, leaves = leaves_of(tensors, arguments, dtype)
    arguments = {**arguments, **dict(zip(("query", "key", "value"), tensors))}
    inputs = [x.detach() for x in leaves.values()]
    call = function_of(function, arguments, leaves)
    (out, _), changes = torch.func.jvp(call, tuple(inputs), tuple(directions(inputs)))
    return dict(zip(("out", "out_tangent", "lse_tangent"), (out, *changes)))


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


def check(
    tensors, arguments, ours=attnjourney.attention, theirs=reference.attention, label="", kinds=(jvp, double_backward)
):
    """Asserts the tolerance rule for tangents and second derivatives."""
    __tracebackhide__ = True
    results = {}
    for kind in kinds:
        actual, plain = kind(ours, tensors, arguments), kind(theirs, tensors, arguments)
        exact = kind(theirs, tensors, arguments, torch.float64)
        for name, x in actual.items():
            assert x.dtype == plain[name].dtype, f"{label} {name}: {x.dtype}"
            size = exact[name].abs().max() if x.numel() else 0
            # as options_cases.check; a second derivative sums twice as many terms
            ulps = (32 if x.dtype == torch.float64 else 4) * FLOOR_ULPS
            if "sinks" in name or "alibi" in name:
                ulps *= 4
            rounding = torch.full_like(exact[name], ulps * torch.finfo(x.dtype).eps * max(1.0, float(size)))
            if name == "out_tangent":  # a difference: what is subtracted is lse_tangent * out
                product = exact["lse_tangent"].abs().unsqueeze(-1) * exact["out"].abs().amax(-1, keepdim=True)
                rounding += FLOOR_ULPS * torch.finfo(x.dtype).eps * product
            factor = OUTPUT_FACTOR if kind is jvp else GRADIENT_FACTOR
            assert_close_to_reference(x, plain[name], exact[name], factor, f"{label} {name}", rounding)
        results.update(actual)
    return results
