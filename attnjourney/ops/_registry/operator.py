"""What an operator's three schemas say: its arguments, what is saved for backward, which gradients there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ... import _library
from .torch_internals import constant_in_graphs

_library.load()
NAMESPACE = "attnjourney"


def draw_seed(like: Tensor) -> Tensor:
    """A dropout seed: an int64 scalar from torch's generator on the device of `like`, so torch.manual_seed rules it.

    Functions draw it and hand it to their operators. Where a compiled graph has a backward, the partitioner may compute
    anything again in it (activation_memory_budget below 1): marked as checkpointed, the draw is then made again from
    the generator's state of the forward, else from a later one, and gradients would be those of other bits.
    """
    if like is None:
        raise TypeError("query: must be Tensor, not NoneType")
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled() and _graphs_recompute():
        return checkpoint(_draw, like.device, use_reentrant=False)
    return _draw(like.device)


@constant_in_graphs
def _graphs_recompute() -> bool:
    import torch._functorch.config

    return torch._functorch.config.activation_memory_budget < 1


def _draw(device: torch.device) -> Tensor:
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


def seed_is_apart(dropout_p: float) -> bool:
    """Whether a function whose operator takes no seed draws one and calls its op_forward: in graphs that recompute."""
    return dropout_p > 0 and torch.compiler.is_dynamo_compiling() and _graphs_recompute()


def seed_for(like: Tensor, dropout_p: float, dropout_seed: Tensor | None = None) -> Tensor | None:
    """The seed given, or one drawn where dropout is on."""
    return draw_seed(like) if dropout_seed is None and dropout_p > 0 else dropout_seed


class Signature:
    """The arguments of an operator as one flat tuple in schema order, whatever way they were passed."""

    def __init__(self, operator: torch._ops.OpOverload):
        arguments = operator._schema.arguments
        self.operator = operator
        self.names = [a.name for a in arguments]
        self.tensors = {a.name for a in arguments if "Tensor" in str(a.type)}
        self.optional = {a.name for a in arguments if "Optional" in str(a.type)}
        self.defaults = tuple(a.default_value for a in arguments if not a.kwarg_only)
        self.keywords = [a.name for a in arguments if a.kwarg_only]
        self.keyword_defaults = tuple(a.default_value for a in arguments if a.kwarg_only)
        self.outputs = [r.name for r in operator._schema.returns]

    def flat(self, args: tuple, kwargs: dict) -> tuple:
        if not kwargs:
            return (*args, *self.defaults[len(args) :], *self.keyword_defaults)
        keywords = [kwargs.get(name, default) for name, default in zip(self.keywords, self.keyword_defaults)]
        return (*args, *self.defaults[len(args) :], *keywords)

    def named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        return dict(zip(self.names, self.flat(args, kwargs)))

    def checked(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """`named`, where every tensor that is needed is there and all are on one device: what a fake kernel checks
        first. It is also what a call reaches that mixes a device with "meta"."""
        named = self.named(args, kwargs)
        for name, x in named.items():
            if x is None and name in self.tensors and name not in self.optional:
                raise TypeError(f"{name}: must be Tensor, not NoneType")
        return on_one_device(named)

    def call(self, flat: tuple) -> Any:
        if not self.keywords:
            return self.operator(*flat)
        n = len(self.defaults)
        if torch.compiler.is_dynamo_compiling():
            return self.operator(*flat[:n], **dict(zip(self.keywords, flat[n:])))
        keywords = zip(self.keywords, flat[n:], self.keyword_defaults)  # passing one takes a microsecond or two
        return self.operator(*flat[:n], **{name: x for name, x, default in keywords if x is not default})


def on_one_device(named: dict[str, Any]) -> dict[str, Any]:
    """named, or RuntimeError for the first tensor that is not on the device of the first one."""
    like_name, like = next((name, x) for name, x in named.items() if isinstance(x, Tensor))
    for name, x in named.items():
        if isinstance(x, Tensor) and x.device != like.device:
            raise RuntimeError(f"{name}: expected to be on the device of {like_name}, {like.device}, got {x.device}")
    return named


def carries_tangent(x: Any) -> bool:
    """Whether forward-mode differentiation, if it is on, moves x."""
    return forward_ad._current_level >= 0 and isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def pick(indices: Sequence[int]) -> Callable[[Sequence], tuple]:
    """tuple(x[i] for i in indices), fast."""
    if len(indices) == 1:
        (i,) = indices
        return lambda x: (x[i],)
    return itemgetter(*indices) if indices else lambda x: ()


class Operator:
    """The overloads of an operator and what follows from their schemas."""

    def __init__(self, name: str, repeats: Sequence[tuple[int, int]] = (), composite: Callable | None = None):
        namespace = getattr(torch.ops, NAMESPACE)
        self.name = f"{NAMESPACE}::{name}"
        self.repeats = repeats
        self.public = Signature(getattr(namespace, name).default)
        self.forward = forward = Signature(getattr(namespace, name + "_forward").default)
        self.backward = backward = Signature(getattr(namespace, name + "_backward").default)
        self.has_jvp = hasattr(namespace, name + "_jvp")
        if self.has_jvp:  # derivatives in a direction
            self.jvp = Signature(getattr(namespace, name + "_jvp").default)
            self.backward_jvp = Signature(getattr(namespace, name + "_backward_jvp").default)
        self.composite = None if self.has_jvp else composite  # what second derivatives go through instead

        if forward.names[: len(self.public.names)] != self.public.names:
            raise RuntimeError(f"{self.name}_forward must begin with the arguments of {self.name}")
        self.differentiable = [o for o in forward.outputs if f"grad_{o}" in backward.names]  # outputs with a gradient
        self.gradients = [forward.names.index(o.removeprefix("grad_")) for o in backward.outputs]  # bit -> input

        # saved for backward: tensors through save_for_backward, the rest as attributes
        pool = forward.names + [o for o in forward.outputs if o not in forward.names]
        used = [n for n in pool if n in backward.names or (self.composite and n in forward.names)]
        tensors = [n for n in used if n not in forward.names or n in forward.tensors]
        others = [n for n in used if n not in tensors]
        self.tensors, self.others = tensors, others
        everything = forward.names + forward.outputs
        self.pick_tensors = pick([everything.index(n) for n in tensors])
        self.pick_others = pick([forward.names.index(n) for n in others])

        # the arguments of backward, found in (gradients of outputs, saved tensors, saved others, need)
        available = [f"grad_{o}" for o in self.differentiable] + tensors + others + ["need"]
        missing = [n for n in backward.names if n not in available]
        if missing:
            raise RuntimeError(
                f"{self.name}_backward: {missing} are no input, output or gradient of {self.name}_forward"
            )
        self.pick_backward = pick([available.index(n) for n in backward.names])
        # output gradients that may not be missing, and the saved output that has the shape of a zero in its place
        required = [i for i, o in enumerate(self.differentiable) if f"grad_{o}" not in backward.optional]
        saved_at = {n: i for i, n in enumerate(tensors)}
        self.required = [(i, saved_at.get(self.differentiable[i])) for i in required]
        if len(self.differentiable) > 1 and any(at is None for _, at in self.required):
            raise RuntimeError(
                f"{self.name}_backward: an output gradient must be optional where the output is not saved"
            )
        constants = forward.tensors - {forward.names[i] for i in self.gradients} - {"dropout_seed"}
        self.constants = [i for i, name in enumerate(forward.names) if name in constants]  # inputs without a gradient

        self.dropout = "dropout_seed" in forward.names
        names = self.public.names
        keyword_dropout = not self.dropout or "dropout_p" in self.public.keywords
        self.dropout_index = 1 << 30 if keyword_dropout else names.index("dropout_p")

    def dropout_on(self, args: tuple, kwargs: dict) -> bool:
        p = args[self.dropout_index] if len(args) > self.dropout_index else kwargs.get("dropout_p", 0.0)
        return p > 0 and kwargs.get("dropout_seed") is None

    def without_repeats(self, *args: Any) -> tuple:
        """The positional arguments of the public operator, None for a tensor that is there twice."""
        for i, _ in reversed(self.repeats):
            if args[i] is None:
                raise TypeError(f"{self.public.names[i]}: must be Tensor, not NoneType")
        left = list(args)
        for i, j in self.repeats:
            if args[i] is args[j]:
                left[i] = None
        return tuple(left)

    def flat(self, args: tuple, kwargs: dict) -> tuple:
        """The arguments of the public operator as those of op_forward, a dropout seed drawn where one is needed."""
        if self.repeats:
            args = self.without_repeats(*args)
        if self.dropout and self.dropout_on(args, kwargs):
            kwargs = {**kwargs, "dropout_seed": draw_seed(args[0])}
        return self.forward.flat(args, kwargs)

    def save(self, ctx: Any, flat: tuple, outputs: tuple) -> None:
        ctx.save_for_backward(*self.pick_tensors((*flat, *outputs)))
        ctx.others = self.pick_others(flat)
        ctx.set_materialize_grads(False)

    def named(self, ctx: Any) -> dict[str, Any]:
        """What `save` has saved, by name."""
        return {**dict(zip(self.tensors, ctx.saved_tensors)), **dict(zip(self.others, ctx.others))}

    def backward_arguments(self, ctx: Any, grads: tuple, needs: tuple) -> tuple | None:
        """The flat arguments of op_backward; None if no gradient has come in."""
        saved = ctx.saved_tensors
        for i, at in self.required:
            if grads[i] is None:
                if all(g is None for g in grads):
                    return None
                grads = (*grads[:i], torch.zeros_like(saved[at]), *grads[i + 1 :])
        need = 0
        for bit, index in enumerate(self.gradients):
            if needs[index]:
                need |= 1 << bit
        return self.pick_backward((*grads, *saved, *ctx.others, need))

    def spread(self, gradients: tuple, needs: tuple) -> tuple:
        """The results of op_backward as one gradient or None for each input."""
        result = [None] * len(needs)
        for index, gradient in zip(self.gradients, gradients):
            if needs[index]:
                result[index] = gradient
        return tuple(result)

    def check_constants(self, needs: tuple) -> None:
        for index in self.constants:
            if needs[index]:
                raise self.refuse(f"the gradient of {self.forward.names[index]}")

    def refuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{self.name}: {what} is not implemented yet")
