"""The autograd nodes of an operator: one for eager mode and torch.compile, one for torch.func.

_derivatives.py has those of its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from .derivatives import Derivatives, one_call_a_sample
from .operator import Operator, pick
from .torch_internals import below_autograd, grad_enabled, transforms_active


def eager_node(op: Operator, derivatives: Derivatives, all_outputs: bool) -> Callable:
    """The node of eager mode and torch.compile. forward(ctx, ...) instead of setup_context: that alone costs 60 us."""
    grads_of, mark_constants = _outputs(op)
    missing = (None,) * (len(op.differentiable) - 1)

    class Eager(Function):
        @staticmethod
        def forward(ctx, *flat):
            if op.constants:
                op.check_constants(ctx.needs_input_grad)
            with below_autograd():
                outputs = op.forward.call(flat)
            op.save(ctx, flat, outputs)
            if forward_ad._current_level >= 0:
                ctx.save_for_forward(*op.pick_tensors((*flat, *outputs)))
            if not all_outputs:
                return outputs[0]
            mark_constants(ctx, outputs)
            return outputs

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad
            grads = grads_of(grads) if all_outputs else (*grads, *missing)
            higher = grad_enabled() or forward_ad._current_level >= 0  # will be differentiated again
            if higher and op.composite is not None:
                return through_composite(op, op.named(ctx), grads, [i for i, need in enumerate(needs) if need])
            flat = op.backward_arguments(ctx, grads, needs)
            if flat is None:
                return (None,) * len(needs)
            if higher or transforms_active():
                gradients = derivatives.backward_node.apply(*flat)
            else:
                with below_autograd():
                    gradients = op.backward.call(flat)
            return op.spread(gradients, needs)

        @staticmethod
        def jvp(ctx, *tangents):
            changes = _jvp(op, derivatives, ctx, tangents)
            return changes if all_outputs else changes[0]

    make_class: Any = type(Function)
    named = make_class(op.name.replace("::", "_"), (Eager,), {})  # grad_fn's name is that of its class
    return super(Function, named).apply  # the C++ part alone: Function.apply's Python serves torch.func only


def transformed_node(op: Operator, derivatives: Derivatives, vmap_rule: Callable) -> type[Function]:
    """The node of torch.func: every transform peels off one level and comes back here."""
    grads_of, mark_constants = _outputs(op)

    class Transformed(Function):
        @staticmethod
        def forward(*flat):
            return op.forward.call(flat)

        @staticmethod
        def setup_context(ctx, inputs, output):
            op.save(ctx, inputs, output)
            ctx.save_for_forward(*op.pick_tensors((*inputs, *output)))
            mark_constants(ctx, output)

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad
            flat = op.backward_arguments(ctx, grads_of(grads), needs)
            if flat is None:
                return (None,) * len(needs)
            return op.spread(derivatives.backward_node.apply(*flat), needs)

        @staticmethod
        def jvp(ctx, *tangents):
            return _jvp(op, derivatives, ctx, tangents)

        @staticmethod
        def vmap(info, in_dims, *flat):
            return vmap_rule(info, in_dims, *flat) or one_call_a_sample(op.forward, info, in_dims, flat)

    Transformed.__name__ = Transformed.__qualname__ = op.name.replace("::", "_")
    return Transformed


def _outputs(op: Operator) -> tuple[Callable, Callable]:
    """What picks the differentiable ones from the gradients of all outputs, and what marks the others in a context."""
    constants = pick([i for i, o in enumerate(op.forward.outputs) if o not in op.differentiable])

    def mark_constants(ctx, outputs):
        if len(op.differentiable) < len(op.forward.outputs):
            ctx.mark_non_differentiable(*[x for x in constants(outputs) if x is not None])

    return pick([op.forward.outputs.index(o) for o in op.differentiable]), mark_constants


def _jvp(op: Operator, derivatives: Derivatives, ctx: Any, tangents: tuple) -> tuple:
    """The tangents of all results of op_forward."""
    if not op.has_jvp:
        raise op.refuse(f"forward-mode automatic differentiation of {op.forward.operator.name()}")
    named = {name: t for name, t in zip(op.forward.names, tangents) if t is not None}
    changes = dict(zip(op.differentiable, derivatives.jvp(op.named(ctx), named)))
    return tuple(changes.get(o) for o in op.forward.outputs)


def through_composite(op: Operator, values: dict[str, Any], grads: Sequence, wanted: list[int]) -> tuple:
    """The gradients of an operator without op_jvp as differentiable functions of its inputs, `values`: the backward of
    its composite, run again. Its memory is that of the operators it is composed of. `grads`: of the differentiable
    results, None where there is none. One or None for each input."""
    result: list[torch.Tensor | None] = [None] * len(op.forward.names)
    given = [(output, g) for output, g in zip(op.differentiable, grads) if g is not None]
    if not given:
        return tuple(result)
    again = grad_enabled()
    named = {name: values[name] for name in op.forward.names}
    with torch.enable_grad(), torch.autocast(given[0][1].device.type, enabled=False):
        for i in wanted:  # a view each: an input that is there twice gets its two gradients apart
            name = op.forward.names[i]
            named[name] = named[name].view_as(named[name])
        assert op.composite is not None
        results = op.composite(**named)
        all_results = results if isinstance(results, tuple) else (results,)
        out = [all_results[op.forward.outputs.index(output)] for output, _ in given]
        inputs = [named[op.forward.names[i]] for i in wanted]
        found = torch.autograd.grad(out, inputs, [g for _, g in given], create_graph=again, allow_unused=True)
    for i, g in zip(wanted, found):
        result[i] = g
    return tuple(result)
