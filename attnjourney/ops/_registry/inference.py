"""Registration of operators that have no backward: those that read and write caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..._dtypes import BYTE_DTYPES
from ..._errors import raise_typed
from . import cpp_nodes
from .flop_counter import register_flop_formula
from .operator import NAMESPACE, Signature, carries_tangent
from .registration import LIBRARY
from .torch_internals import any_requires_grad, below_autograd, grad_enabled


def as_index(x: Tensor) -> Tensor:
    """Lengths or numbers of sequences as the operators read them: int32 becomes int64, strides become dense. What else
    is wrong is for the operator to say."""
    if x.dtype == torch.int32:
        return x.to(torch.int64)
    return x if x.is_contiguous() else x.contiguous()


def optional_index(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_index(x)


def register_inference(
    name: str,
    *,
    fake: Callable[..., object],
    flops: Callable[..., int] | None = None,
    autocast: dict[str, str] | None = None,
    vmap: Callable | None = None,
) -> torch._ops.OpOverload:
    """Completes the operator `name`, whose schema and kernels the C++ library has registered, and returns it.

    While gradients are recorded, an input that requires one raises RuntimeError: it would be lost without a word.

    Args:
        fake: the results as empty tensors, from tensors without data; receives the arguments by name.
        flops: of one call, from shapes in place of tensors.
        autocast: {input: cache}: under autocast a floating input takes the dtype of that cache, which is never cast;
            beside one of bytes, autocast's.
        vmap: `vmap(signature, info, in_dims, *flat)`, the batching rule as of torch.autograd.Function.vmap, the
            arguments flat in the order of the schema. Without it, vmap of the operator raises NotImplementedError.
    """
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    signature = Signature(operator)
    arguments = operator._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def autograd(*args, **kwargs):
        if grad_enabled() and any_requires_grad(*args, *kwargs.values()):
            named = signature.named(args, kwargs).items()
            which = next(key for key, x in named if isinstance(x, Tensor) and x.requires_grad)
            raise RuntimeError(
                f"{which}: expected a tensor that does not require grad, {NAMESPACE}::{name} has no backward: "
                "call it under torch.no_grad() or detach the tensor"
            )
        if forward_ad._current_level >= 0 and any(map(carries_tangent, (*args, *kwargs.values()))):
            raise NotImplementedError(f"{NAMESPACE}::{name} has no forward derivative: its tangent would be lost")
        flat = signature.flat(args, kwargs) if written else ()
        check_written(flat)
        try:
            with below_autograd():
                result = operator(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            raise_typed(error)
        for i in written:
            if flat[i] is not None:
                torch.autograd.graph.increment_version(flat[i])
        return result

    def check_written(flat: tuple) -> None:
        for i in written:
            if flat[i] is not None and flat[i].is_inference() and not torch.is_inference_mode_enabled():
                raise RuntimeError(
                    f"{signature.names[i]}: inplace update to inference tensor outside InferenceMode is not allowed: "
                    "clone() it before"
                )

    LIBRARY.impl(name, autograd, "Autograd")
    cpp_nodes.add_inference(name, written)
    if written:
        register_negative(signature, written)

    def batched(*args, **kwargs):
        def rule(info, in_dims, *flat):
            if vmap is None:
                raise NotImplementedError(
                    f"{NAMESPACE}::{name} under vmap: it writes into a cache; give it all sequences in one batch"
                )
            return vmap(signature, info, in_dims, *flat)

        return _one_level_of_vmap(name, rule, lambda *flat: signature.call(flat), signature.flat(args, kwargs))

    LIBRARY.impl(name, batched, "FuncTorchBatched")
    cast_like = autocast or {}
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")) if cast_like else ():
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def cast(*args, device_type=device_type, excluded=excluded, **kwargs):
            named = signature.named(args, kwargs)
            for x, like in cast_like.items():
                if isinstance(named[x], Tensor) and named[x].is_floating_point() and named[x].dtype != torch.float64:
                    dtype = named[like].dtype
                    of_bytes = dtype in BYTE_DTYPES  # which every dtype goes with
                    named[x] = named[x].to(torch.get_autocast_dtype(device_type) if of_bytes else dtype)
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return operator(**named)

        LIBRARY.impl(name, cast, key)

    def checked_fake(*args, **kwargs):
        return fake(**signature.checked(args, kwargs))

    torch.library.register_fake(operator, checked_fake, lib=LIBRARY)
    if flops is not None:

        def count(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
            return flops(**signature.named(args, kwargs))

        register_flop_formula([operator._overloadpacket], count)
    return operator


def register_negative(signature: Signature, written: list[int]) -> None:
    """Tensors that are views of another one's negative (`z.conj().imag`): torch's own kernel for them takes operators
    that return what they write."""

    def kernel(*args, **kwargs):
        flat = list(signature.flat(args, kwargs))
        dense = [x.resolve_neg() if isinstance(x, Tensor) else x for x in flat]
        signature.call(tuple(dense))
        for i in written:
            if dense[i] is not flat[i]:
                flat[i].copy_(dense[i])

    LIBRARY.impl(signature.operator.name().removeprefix(f"{NAMESPACE}::"), kernel, "Negative")


def _one_level_of_vmap(name: str, rule: Callable, call: Callable, flat: tuple) -> Any:
    """What torch.library.register_vmap does, which leaves keyword-only tensors wrapped. Its two parts are private."""
    try:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    except ImportError as error:
        raise NotImplementedError(
            f"{NAMESPACE}::{name} under vmap: torch {torch.__version__} no longer has what batching it needs ({error})"
        ) from error
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, call, *flat)
