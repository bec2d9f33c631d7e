"""Second derivatives of an operator that has op_jvp and op_backward_jvp: the nodes of the derivatives themselves.

Write d for the derivative in a direction t of the inputs and g for a cotangent. The operator is F, with results y.

    jvp            F' t                    kernel op_jvp
    backward       g F'                    kernel op_backward
    backward_jvp   g F'' t (+ d(g) F')     kernel op_backward_jvp, given d(y) = F' t

F'' is symmetric, so these three are closed: the backward of `backward` for cotangents t of the gradients is F' t by g
and g F'' t by the inputs; the backward of `jvp` is g F' by t and g F'' t by the inputs; the jvp of `backward` is
backward_jvp. What remains, F''', raises. Derivatives by the inputs are total: y is taken to be F of the inputs, and
gets no gradient of its own.

Every node here is a torch.autograd.Function of one flat tuple in schema order, for eager mode and torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .operator import Operator, Signature
from .torch_internals import below_autograd


def keep(ctx: Any, signature: Signature, flat: tuple, outputs: tuple = ()) -> None:
    """Saves all arguments, and the results, for backward and for jvp."""
    names = (*signature.names, *signature.outputs)
    values = (*flat, *outputs)
    tensors = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
    ctx.kept_names = [names[i] for i in tensors]
    ctx.kept_others = {names[i]: x for i, x in enumerate(values) if not isinstance(x, Tensor)}
    saved = [values[i] for i in tensors]
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> dict:
    return {**ctx.kept_others, **dict(zip(ctx.kept_names, ctx.saved_tensors))}


def one_call_a_sample(signature: Signature, info: Any, in_dims: tuple, flat: tuple) -> tuple[tuple, tuple]:
    """The batching rule of last resort."""
    samples = [
        signature.call(
            tuple(x.select(d, i) if isinstance(x, torch.Tensor) and d is not None else x for x, d in zip(flat, in_dims))
        )
        for i in range(info.batch_size)
    ]
    outputs = tuple(None if x[0] is None else torch.stack(x) for x in zip(*samples))
    return outputs, tuple(None if x is None else 0 for x in outputs)


class Derivatives:
    """The three nodes of an operator and the calls between them, arguments by name."""

    def __init__(self, op: Operator, vmap_rules: Sequence[Callable | None]):
        self.op = op
        self.inputs = [op.forward.names[i] for i in op.gradients]  # that have a gradient, in the order of `need`
        rules = (*vmap_rules, None, None, None)
        self.backward_node = self._node(
            "backward", op.backward, self._backward_of_backward, self._jvp_of_backward, rules[0]
        )
        if op.has_jvp:
            self.jvp_node = self._node("jvp", op.jvp, self._backward_of_jvp, self._jvp_of_jvp, rules[1])
            third = self._third_derivative
            self.backward_jvp_node = self._node("backward_jvp", op.backward_jvp, third, third, rules[2])

    def all(self) -> list[tuple[str, Signature, type[Function]]]:
        """(suffix of the operator's name, signature, node)."""
        found = [("_backward", self.op.backward, self.backward_node)]
        if self.op.has_jvp:
            found.append(("_jvp", self.op.jvp, self.jvp_node))
            found.append(("_backward_jvp", self.op.backward_jvp, self.backward_jvp_node))
        return found

    def _node(
        self, suffix: str, signature: Signature, backward_rule: Callable, jvp_rule: Callable, vmap_rule: Callable | None
    ) -> type[Function]:
        class Node(Function):
            @staticmethod
            def forward(*flat):
                with below_autograd():
                    return signature.call(flat)

            @staticmethod
            def setup_context(ctx, inputs, output):
                keep(ctx, signature, inputs, output if suffix == "jvp" else ())

            @staticmethod
            def backward(ctx, *grads):
                named = backward_rule(kept(ctx), dict(zip(signature.names, ctx.needs_input_grad)), grads)
                return tuple(named.get(name) for name in signature.names)

            @staticmethod
            def jvp(ctx, *tangents):
                return jvp_rule(kept(ctx), dict(zip(signature.names, tangents)))

            @staticmethod
            def vmap(info, in_dims, *flat):
                batched = vmap_rule(info, in_dims, *flat) if vmap_rule else None
                return batched or one_call_a_sample(signature, info, in_dims, flat)

        Node.__name__ = Node.__qualname__ = f"{self.op.name.replace('::', '_')}_{suffix}"
        return Node

    # ---- calls by name; what an operator does not take is left out

    def jvp(self, values: dict, tangents: dict) -> tuple:
        """The tangents of the differentiable results, in the direction {input: tangent}."""
        for name, t in tangents.items():
            if t is not None and f"{name}_tangent" not in self.op.jvp.names:
                raise self.op.refuse(f"the forward derivative of {name}")
        values = {**values, **{f"{name}_tangent": t for name, t in tangents.items()}}
        return self.jvp_node.apply(*(values.get(name) for name in self.op.jvp.names))

    def _backward(self, values: dict, cotangents: Sequence, need: int) -> tuple:
        """The gradients of the inputs, for cotangents of the differentiable results."""
        values = {**values, **self._output_gradients(values, cotangents), "need": need}
        return self.backward_node.apply(*(values[name] for name in self.op.backward.names))

    def _backward_jvp(self, values: dict, tangents: dict, need: int) -> tuple:
        values = {**values, **{f"{name}_tangent": t for name, t in tangents.items()}, "need": need}
        return self.backward_jvp_node.apply(*(values.get(name) for name in self.op.backward_jvp.names))

    def _output_gradients(self, values: dict, cotangents: Sequence) -> dict:
        named = {}
        for output, g in zip(self.op.differentiable, cotangents):
            if g is None and f"grad_{output}" not in self.op.backward.optional:
                g = torch.zeros_like(values[output])
            named[f"grad_{output}"] = g
        return named

    def _need(self, needs: dict, suffix: str = "") -> int:
        return sum(1 << bit for bit, name in enumerate(self.inputs) if needs.get(name + suffix))

    def _gradients(self, results: Sequence, need: int, suffix: str = "") -> dict:
        return {name + suffix: g for bit, (name, g) in enumerate(zip(self.inputs, results)) if need >> bit & 1}

    # ---- rules: what is kept, then needs and cotangents, or tangents, by name

    def _backward_of_backward(self, values: dict, needs: dict, grads: Sequence) -> dict:
        if not self.op.has_jvp:
            raise self.op.refuse("double backward")
        asked = values["need"]
        tangents = {
            name: g for bit, (name, g) in enumerate(zip(self.inputs, grads)) if asked >> bit & 1 and g is not None
        }
        if not tangents:
            return {}
        changes = self.jvp(values, tangents)
        result = {f"grad_{output}": x for output, x in zip(self.op.differentiable, changes)}
        result = {name: x for name, x in result.items() if needs[name]}
        need = self._need(needs)
        if need:
            tangents.update(zip(self.op.differentiable, changes))
            result.update(self._gradients(self._backward_jvp(values, tangents, need), need))
        return result

    def _jvp_of_backward(self, values: dict, tangents: dict) -> tuple:
        if not self.op.has_jvp:
            raise self.op.refuse("forward-mode automatic differentiation of the backward")
        inputs = {name: tangents.get(name) for name in self.inputs}
        outputs = [f"grad_{o}" for o in self.op.differentiable]
        if all(t is None for t in inputs.values()):
            return self._backward(values, [tangents[name] for name in outputs], values["need"])
        changes: Sequence = [tangents.get(o) for o in self.op.differentiable]
        if any(t is None for t in changes):
            changes = self.jvp(values, inputs)
        directions = {**inputs, **dict(zip(self.op.differentiable, changes)), **{n: tangents[n] for n in outputs}}
        return self._backward_jvp(values, directions, values["need"])

    def _backward_of_jvp(self, values: dict, needs: dict, grads: Sequence) -> dict:
        if all(g is None for g in grads):
            return {}
        result: dict[str, Any] = {}
        need = self._need(needs, "_tangent")
        if need:
            result.update(self._gradients(self._backward(values, grads, need), need, "_tangent"))
        need = self._need(needs)
        if need:
            tangents = {name: values.get(f"{name}_tangent") for name in (*self.inputs, *self.op.differentiable)}
            results = self._backward_jvp({**values, **self._output_gradients(values, grads)}, tangents, need)
            result.update(self._gradients(results, need))
        return result

    def _jvp_of_jvp(self, values: dict, tangents: dict) -> tuple:
        if any(tangents.get(name) is not None for name in self.inputs):
            raise self.op.refuse("forward-mode automatic differentiation, nested twice,")
        return self.jvp(values, {name: tangents.get(f"{name}_tangent") for name in self.inputs})

    def _third_derivative(self, *_):
        raise self.op.refuse("the third derivative")
