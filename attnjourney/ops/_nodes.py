"""The autograd nodes of an operator: one for eager mode and torch.compile, one for torch.func, one for the backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Function, forward_ad

from ._operator import Operator, Signature, pick

_below_autograd = torch._C._AutoDispatchBelowAutograd
_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active


def backward_node(op: Operator, vmap_rule: Callable | None) -> type[Function]:
    """op_backward as a Function: batches under vmap; its own derivatives raise."""

    class Backward(Function):
        @staticmethod
        def forward(*flat):
            with _below_autograd():
                return op.backward.call(flat)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grads):
            raise op.refuse("double backward")

        @staticmethod
        def jvp(ctx, *tangents):
            raise op.refuse("forward-mode automatic differentiation of the backward")

        @staticmethod
        def vmap(info, in_dims, *flat):
            batched = vmap_rule(info, in_dims, *flat) if vmap_rule else None
            return batched or one_call_a_sample(op.backward, info, in_dims, flat)

    Backward.__name__ = Backward.__qualname__ = op.name.replace("::", "_") + "_backward"
    return Backward


def one_call_a_sample(signature: Signature, info, in_dims, flat: tuple) -> tuple[tuple, tuple]:
    """The batching rule of last resort."""
    samples = [
        signature.call(
            tuple(x.select(d, i) if isinstance(x, torch.Tensor) and d is not None else x for x, d in zip(flat, in_dims))
        )
        for i in range(info.batch_size)
    ]
    outputs = tuple(None if x[0] is None else torch.stack(x) for x in zip(*samples))
    return outputs, tuple(None if x is None else 0 for x in outputs)


def eager_node(op: Operator, backward_function: type[Function], all_outputs: bool) -> Callable:
    """The node of eager mode and torch.compile. forward(ctx, ...) instead of setup_context: that alone costs 60 us."""
    grads_of = pick([op.forward.outputs.index(o) for o in op.differentiable])
    not_differentiable = pick([i for i, o in enumerate(op.forward.outputs) if o not in op.differentiable])
    missing = (None,) * (len(op.differentiable) - 1)
    has_constants = len(op.differentiable) < len(op.forward.outputs)

    class Eager(Function):
        @staticmethod
        def forward(ctx, *flat):
            if op.constants:
                op.check_constants(ctx.needs_input_grad)
            with _below_autograd():
                outputs = op.forward.call(flat)
            op.save(ctx, flat, outputs)
            if not all_outputs:
                return outputs[0]
            if has_constants:
                ctx.mark_non_differentiable(*[x for x in not_differentiable(outputs) if x is not None])
            return outputs

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad
            flat = op.backward_arguments(ctx, grads_of(grads) if all_outputs else (*grads, *missing), needs)
            if flat is None:
                return (None,) * len(needs)
            if _transforms_active() or forward_ad._current_level >= 0:
                gradients = backward_function.apply(*flat)
            elif _grad_enabled():
                raise op.refuse("double backward (create_graph=True)")
            else:
                with _below_autograd():
                    gradients = op.backward.call(flat)
            return op.spread(gradients, needs)

        @staticmethod
        def jvp(ctx, *tangents):
            raise op.refuse("forward-mode automatic differentiation")

    Eager.__name__ = Eager.__qualname__ = op.name.replace("::", "_")
    return super(Function, Eager).apply  # the C++ part alone: Function.apply's Python serves torch.func only


def transformed_node(op: Operator, backward_function: type[Function], vmap_rule: Callable) -> type[Function]:
    """The node of torch.func: every transform peels off one level and comes back here."""

    class Transformed(Function):
        @staticmethod
        def forward(*flat):
            return op.forward.call(flat)

        @staticmethod
        def setup_context(ctx, inputs, output):
            op.save(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad
            flat = op.backward_arguments(ctx, grads, needs)
            if flat is None:
                return (None,) * len(needs)
            return op.spread(backward_function.apply(*flat), needs)

        @staticmethod
        def jvp(ctx, *tangents):
            raise op.refuse("forward-mode automatic differentiation")

        @staticmethod
        def vmap(info, in_dims, *flat):
            return vmap_rule(info, in_dims, *flat) or one_call_a_sample(op.forward, info, in_dims, flat)

    Transformed.__name__ = Transformed.__qualname__ = op.name.replace("::", "_")
    return Transformed
