"""F.scaled_dot_product_attention, and all that is built on it, over attnjourney.attention: attnjourney.activate."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention import SDPBackend

from ..ops import attention
from . import native_mha
from .activity import left_to_torch, ran

_NAME = "scaled_dot_product_attention"
_FLASH, _MATH = int(SDPBackend.FLASH_ATTENTION.value), int(SDPBackend.MATH.value)
_CACHE_TAG = "attnjourney.activate"
_TRACED = (FakeTensor, FunctionalTensor)

# The dispatcher asks these before torch's composite function, from the outside in. AutogradCPU sees eager calls,
# autocast's and those of a tracer; export, which stops above it, keeps torch's operator. A transform of torch.func
# would take the composite function apart first; tensors of inference_mode have no autograd key, but pass BackendSelect.
_KEYS = ("FuncTorchDynamicLayerFrontMode", "AutogradCPU", "AutogradCUDA", "BackendSelect")

_lock = threading.RLock()
_library: torch.library.Library | None = None


def _has_rules(x: Tensor) -> bool:
    """Whether its class decides what an operator does with x: DTensor, quantised weights; fake tensors too."""
    return type(x) is not Tensor and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def refusal(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> str | None:
    """Why `activate` leaves this call to torch's function, or None."""
    if not torch._C._get_flash_sdp_enabled():
        return "sdpa_kernel: FLASH_ATTENTION is not among the kernels allowed"
    order = torch._C._get_sdp_priority_order()
    if order.index(_MATH) < order.index(_FLASH):
        return "sdpa_kernel: MATH comes before FLASH_ATTENTION"
    if attn_mask is not None and is_causal:
        return "attn_mask together with is_causal, which torch's function refuses"
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if x is None:
            continue
        if _has_rules(x) and not isinstance(x, _TRACED):
            return f"{name}: a {type(x).__name__}"
        if x.layout is not torch.strided or x.is_nested:
            return f"{name}: not a dense tensor"
        if not (x.is_cpu or x.is_cuda):
            return f"{name}: on the device {x.device.type}"
    if query.dtype not in native_mha.DTYPES:
        return f"query: dtype {query.dtype}"
    return None


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    reason = refusal(query, key, value, attn_mask, is_causal)
    if reason is None:
        try:
            out = attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        except (ValueError, RuntimeError) as error:  # it does not fit: torch takes it, or has an error of its own
            reason = str(error)
        else:
            ran("traced" if isinstance(out, _TRACED) else "attnjourney")
            return out
    left_to_torch(reason)
    composite = torch.ops.aten.scaled_dot_product_attention.default.decompose
    return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def activated() -> bool:
    """Whether `activate` is on."""
    return _library is not None


def activate() -> None:
    """F.scaled_dot_product_attention is attnjourney.attention from here on, in the whole process, until `deactivate`.

    So is everything that calls it: eager code and torch.compile (this package's forward and backward in the graph),
    autocast, inference_mode, torch.func, nn.MultiheadAttention and nn.TransformerEncoder, in training and in evaluation
    with their inference kernel, and exported and scripted programs that hold the operator. torch.export keeps
    torch's operator, so programs stay portable.

    sdpa_kernel and the flags of torch.backends.cuda decide as before: where FLASH_ATTENTION is not allowed, or MATH is
    preferred, torch's own runs. So does what this package does not serve: tensor subclasses with rules of their own
    (DTensor), nested tensors, devices other than the CPU and CUDA, other dtypes, and calls that torch's function
    refuses. `activity` counts the calls, with the reasons.

    Dropout has other bits than torch's. A switch drops what torch.compile holds, for compiled code does not see it.
    What is recomputed in a backward (checkpoint) must be so in the state of its forward.

    Raises:
        RuntimeError: called while torch.compile or torch.export traces.
    """
    global _library
    _refuse_tracing("activate")
    with _lock:
        if _library is not None:
            return
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of the first kernel in a process that takes another's place
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for key in _KEYS:
                library.impl(_NAME, _kernel, key)
            native_mha.register(library)
        _library = library
        _forget_graphs()


def deactivate() -> None:
    """Ends `activate`; nothing where it is not on."""
    global _library
    _refuse_tracing("deactivate")
    with _lock:
        if _library is None:
            return
        _library._destroy()
        _library = None
        _forget_graphs()


@contextmanager
def active(on: bool = True) -> Iterator[None]:
    """`with attnjourney.active():` is activate() inside, and what was before outside; active(False) is deactivate()."""
    before = activated()
    activate() if on else deactivate()
    try:
        yield
    finally:
        activate() if before else deactivate()


def _refuse_tracing(name: str) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(f"attnjourney.{name}: call it outside of the function that is compiled or exported")


def _forget_graphs() -> None:
    """Compiled code holds torch's operators or ours; nothing in its guards or in the key of its cache says which, and
    torch.ops remembers which kernel a key led to."""
    for name in (_NAME, native_mha.NAME):
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    config = torch.compiler.config
    tag = config.cache_key_tag.replace(_CACHE_TAG, "")
    config.cache_key_tag = tag + _CACHE_TAG if activated() else tag
