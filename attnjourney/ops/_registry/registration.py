"""What PyTorch must know about an operator besides its kernels: fake kernels, autograd, torch.func, autocast, FLOPs.

To add an operator `op`, define three schemas in csrc/<op>.cpp; their names carry the whole meaning:

    op(inputs...) -> Tensor
    op_forward(inputs..., [*, Tensor? dropout_seed=None]) -> (Tensor out, others...)
    op_backward(arguments...) -> (Tensor grad_<input>, ...)

* `op_forward` takes the arguments of `op` in the same order with the same defaults. Its first result is the result of
  `op`, the others are what its backward reads. An operator with a `dropout_p` takes `dropout_seed` as its last
  argument; the seed is drawn here, and only if dropout_p > 0.
* `op_backward` takes, in any order: `grad_<output>` for every differentiable output of `op_forward` (`Tensor?` where
  the gradient may be missing), any inputs and outputs of `op_forward` under their names (these and no others are
  saved), and last the int `need`. Bit i of `need` asks for result i; any other result has the shape (0,).
  An output without a `grad_<output>` is marked as not differentiable; an input without a result must not require grad.

C++ has CPU (and CUDA) kernels for op_forward and op_backward. attnjourney/ops/<op>.py then calls

    register("op", fake=..., composite=..., autocast=..., flops=...)

whose functions receive the operator's arguments by name, defaults filled in: `def fake(*, x, weight, **_)`.

What a call of `op` meets, from the outside in:

    torch.func (FuncTorchDynamicLayerFrontMode)  an autograd.Function with a vmap rule, or the composite
    autocast (AutocastCPU, AutocastCUDA)         casts as torch's own operators do
    Autograd                                     one node if anything requires grad, else op_forward alone
    CPU, CUDA                                    op_forward alone (inference_mode comes straight here)

op_forward and op_backward have the same kernels, so calling them directly loses no gradient either.

Forward-mode AD and second derivatives come from two more schemas, or else go through the composite:

    op_jvp(arguments...) -> (Tensor <output>_tangent, ...)
    op_backward_jvp(arguments...) -> (Tensor grad_<input>_tangent, ...)

* `op_jvp` takes any inputs and outputs of op_forward under their names, and `Tensor? <input>_tangent` for every input
  with a gradient; None is a tangent of zero. It returns a tangent for every differentiable output, in order.
* `op_backward_jvp` takes any arguments of op_backward, tangents of its inputs, its `grad_<output>` and the outputs by
  the same rule, and last `need`. It returns the derivatives of op_backward's results.

What these two give closes over all second derivatives (see derivatives.py); third ones raise NotImplementedError. An
operator without them and without a composite raises it for second ones and in forward mode, too.

operator.py reads the schemas, nodes.py and derivatives.py hold the autograd nodes, this file registers. Where the
library of nodes in C++ is there (attnjourney/_node.py), it does the same for plain tensors: cpp_nodes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from ..._errors import raise_typed
from . import cpp_nodes
from .derivatives import Derivatives
from .flop_counter import register_flop_formula
from .nodes import eager_node, transformed_node
from .operator import NAMESPACE, Operator, Signature, draw_seed
from .torch_internals import any_requires_grad, autocast_on, below_autograd, grad_enabled

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # lives as long as the module: its kernels go with it
OPERATORS: dict[str, Operator] = {}  # by name, all that `register` has completed


def needs_node(args: tuple, kwargs: dict) -> bool:
    return (grad_enabled() and any_requires_grad(*args, *kwargs.values())) or forward_ad._current_level >= 0


def first(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What an operator returns of the results of its composite."""
    return results[0] if isinstance(results, tuple) else results


def _caster(op: Operator, names: Sequence[str]) -> Callable[[str, tuple, dict], tuple[tuple, dict]]:
    """Casts the named inputs to autocast's dtype as torch's own lower-precision operators do: never float64."""
    cast_names = frozenset(names)
    at = [i for i, name in enumerate(op.public.names) if name in cast_names and name not in op.public.keywords]
    keywords = cast_names & set(op.public.keywords)

    def cast(device_type: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        dtype = torch.get_autocast_dtype(device_type)

        done = {}  # a tensor that is there twice stays one tensor

        def one(x):
            if x is None or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type != device_type:
                return x
            if id(x) not in done:
                done[id(x)] = x.to(dtype)
            return done[id(x)]

        positional = list(args)
        for i in at:
            if i < len(positional):
                positional[i] = one(positional[i])
        return tuple(positional), {name: one(x) if name in keywords else x for name, x in kwargs.items()}

    return cast


def register(
    name: str,
    *,
    fake: Callable[..., tuple],
    repeats: Sequence[tuple[int, int]] = (),
    also: Sequence[str] = (),
    fake_backward: Callable[..., tuple] | None = None,
    composite: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
    vmap: tuple[Callable, ...] | None = None,
    autocast: Sequence[str] = (),
    flops: Callable[..., tuple[int, ...]] | None = None,
) -> torch._ops.OpOverload:
    """Completes the operator `name`, whose schemas and kernels the C++ library has registered, and returns it.

    All functions but those of `vmap` take the arguments of their operator by name, defaults filled in.

    Args:
        fake: the results of op_forward as empty tensors, from tensors that have no data.
        repeats: pairs i, j, the greatest first: op_forward gets None for argument i where it is the same tensor as j.
        also: further operators whose arguments are those of `op`, and whose results are the first ones of op_forward's.
            Their kernels are the caller's; here they get nodes in C++.
        fake_backward: the same for op_backward. Default: each gradient is like its input, which op_backward must take.
        composite: `op` in terms of differentiable torch functions; serves torch.func, forward-mode AD and double
            backward. Takes the arguments of `op_forward`; returns what `op` does, or all that op_forward returns: where
            several of its results have gradients.
        vmap: instead of composite, the batching rules of op_forward, op_backward and, where there are any, op_jvp and
            op_backward_jvp: `rule(info, in_dims, *arguments)` as in torch.autograd.Function.vmap, arguments flat in
            schema order; its None stands for one call a sample.
        autocast: inputs that autocast casts.
        flops: of the forward, of the backward and, where there are any, of op_jvp and op_backward_jvp, from shapes in
            place of tensors.
    """
    if (composite is None) == (vmap is None):
        raise TypeError("register: give one of composite and vmap")
    op = OPERATORS[name] = Operator(name, repeats, composite)
    derivatives = Derivatives(op, vmap[1:] if vmap else ())
    _register_kernels(op, name, derivatives, also)
    _register_functorch(op, name, derivatives, composite, vmap, autocast)
    _register_autocast(op, name, autocast)
    _register_fakes(op, fake, fake_backward)
    if flops is not None:
        _register_flops(op, flops)
    return op.public.operator


def _register_kernels(op: Operator, name: str, derivatives: Derivatives, also: Sequence[str]) -> None:
    forward, composite = op.forward.operator, op.composite
    apply_public = eager_node(op, derivatives, all_outputs=False)
    apply_forward = eager_node(op, derivatives, all_outputs=True)
    draws, dropout_on, prepare = op.dropout, op.dropout_on, op.without_repeats if op.repeats else None
    grads_on, requires_grad, below = grad_enabled, any_requires_grad, below_autograd  # closures are faster than globals

    def public_forward(*args, **kwargs):
        if prepare is not None:
            args = prepare(*args)
        if draws and dropout_on(args, kwargs):
            kwargs["dropout_seed"] = draw_seed(args[0])
        return forward(*args, **kwargs)[0]

    def public_autograd(*args, **kwargs):  # the hot path: needs_node and public_forward written out
        try:
            if (grads_on() and requires_grad(*args, *kwargs.values())) or forward_ad._current_level >= 0:
                if composite is not None and forward_ad._current_level >= 0:
                    return first(composite(**op.public.named(args, kwargs)))
                return apply_public(*op.flat(args, kwargs))
            if prepare is not None:
                args = prepare(*args)
            if draws and dropout_on(args, kwargs):
                kwargs["dropout_seed"] = draw_seed(args[0])
            with below():
                return forward(*args, **kwargs)[0]
        except (ValueError, RuntimeError) as error:
            raise_typed(error)

    def forward_autograd(*args, **kwargs):
        try:
            if needs_node(args, kwargs):
                return apply_forward(*op.forward.flat(args, kwargs))
            with below():
                return forward(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            raise_typed(error)

    def derivative_autograd(signature, node):
        apply, operator = super(Function, node).apply, signature.operator

        def kernel(*args, **kwargs):
            try:
                if needs_node(args, kwargs):
                    return apply(*signature.flat(args, kwargs))
                with below():
                    return operator(*args, **kwargs)
            except (ValueError, RuntimeError) as error:
                raise_typed(error)

        return kernel

    # nodes in C++ go before those for Autograd, which serve what is not for them
    for device in () if cpp_nodes.add(op, also) else ("CPU", "CUDA"):
        LIBRARY.impl(name, public_forward, device)
    LIBRARY.impl(name, public_autograd, "Autograd")
    LIBRARY.impl(name + "_forward", forward_autograd, "Autograd")
    for suffix, signature, node in derivatives.all():
        LIBRARY.impl(name + suffix, derivative_autograd(signature, node), "Autograd")


def _register_functorch(
    op: Operator, name: str, derivatives: Derivatives, composite: Callable | None, vmap: tuple[Callable, ...] | None,
    autocast: Sequence[str],
) -> None:  # fmt: skip
    cast = _caster(op, autocast)
    transformed: Any = transformed_node(op, derivatives, vmap[0]) if vmap else None

    def cast_inputs(args, kwargs):  # this key comes before the autocast keys
        device = args[0].device.type
        return cast(device, args, kwargs) if autocast and autocast_on(device) else (args, kwargs)

    def public(*args, **kwargs):
        args, kwargs = cast_inputs(args, kwargs)
        if composite is not None:
            return first(composite(**op.public.named(args, kwargs)))
        return transformed.apply(*op.flat(args, kwargs))[0]

    def forward(*args, **kwargs):
        args, kwargs = cast_inputs(args, kwargs)
        if composite is not None:
            results = composite(**op.forward.named(args, kwargs))
            if isinstance(results, tuple):
                return results
            raise NotImplementedError(f"{op.name}_forward does not support torch.func: call {op.name}")
        return transformed.apply(*op.forward.flat(args, kwargs))

    def derivative(signature, node):
        return lambda *args, **kwargs: node.apply(*signature.flat(args, kwargs))

    kernels = [("", public), ("_forward", forward)]
    kernels += [(suffix, derivative(signature, node)) for suffix, signature, node in derivatives.all()]
    for suffix, kernel in kernels:
        LIBRARY.impl(name + suffix, kernel, "FuncTorchDynamicLayerFrontMode")


def _register_autocast(op: Operator, name: str, names: Sequence[str]) -> None:
    if not names:
        return
    cast = _caster(op, names)
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        for suffix, operator in (("", op.public.operator), ("_forward", op.forward.operator)):

            def kernel(*args, device_type=device_type, excluded=excluded, operator=operator, **kwargs):
                args, kwargs = cast(device_type, args, kwargs)
                with torch._C._ExcludeDispatchKeyGuard(excluded):
                    return operator(*args, **kwargs)

            LIBRARY.impl(name + suffix, kernel, key)


def _register_fakes(op: Operator, fake: Callable, fake_backward: Callable | None) -> None:
    def forward(*args, **kwargs):
        return fake(**op.forward.checked(args, kwargs))

    def public(*args, **kwargs):
        return forward(*args, **kwargs)[0]

    def like_inputs(*, need, **named):
        first = named[op.forward.names[0]]
        inputs = [named[output.removeprefix("grad_")] for output in op.backward.outputs]
        return tuple(
            x.new_empty(x.shape) if need >> bit & 1 and x is not None and x.is_floating_point() else first.new_empty(0)
            for bit, x in enumerate(inputs)
        )

    def backward(*args, **kwargs):
        return (fake_backward or like_inputs)(**op.backward.checked(args, kwargs))

    def jvp(*args, **kwargs):
        named = op.jvp.checked(args, kwargs)
        return tuple(named[output].new_empty(named[output].shape) for output in op.differentiable)

    def backward_jvp(*args, **kwargs):
        named = op.backward_jvp.checked(args, kwargs)
        return (fake_backward or like_inputs)(**named)

    kernels = [(public, op.public), (forward, op.forward), (backward, op.backward)]
    if op.has_jvp:
        kernels += [(jvp, op.jvp), (backward_jvp, op.backward_jvp)]
    for kernel, signature in kernels:
        torch.library.register_fake(signature.operator, kernel, lib=LIBRARY)


def _register_flops(op: Operator, flops: Callable[..., tuple[int, ...]]) -> None:
    def register(signature: Signature, which: int, *more: Signature) -> None:
        def formula(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
            return flops(**signature.named(args, kwargs))[which]

        register_flop_formula([s.operator._overloadpacket for s in (signature, *more)], formula)

    register(op.forward, 0, op.public)
    register(op.backward, 1)
    if op.has_jvp:
        register(op.jvp, 2)
        register(op.backward_jvp, 3)
