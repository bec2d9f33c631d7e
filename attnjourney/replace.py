"""Puts this package's attention into models that were written for torch.nn.MultiheadAttention."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .nn import MultiheadAttention


def replace_attention(model: nn.Module) -> list[str]:
    """Turns every torch.nn.MultiheadAttention in `model` into attnjourney.nn.MultiheadAttention, in place: parameters,
    hooks, optimizers and other references to the modules stay what they are, shared modules stay shared.

    nn.TransformerEncoder no longer packs padded input into nested tensors around the replaced layers, and
    nn.TransformerEncoderLayer no longer goes around them in evaluation (nor around an attnjourney.nn.MultiheadAttention
    that is in `model` already). Parametrized modules are replaced and stay parametrized. Other subclasses of
    torch.nn.MultiheadAttention are left alone: their own code decides what they compute.
    torch.jit.script does not take a replaced model; torch.jit.trace, torch.export and torch.compile do.

    Args:
        model: any module; it may be a torch.nn.MultiheadAttention itself.

    Returns:
        The names of the modules that were replaced, one for each place where a module is used, as in
        model.named_modules(remove_duplicate=False). The model itself has the name "".

    Raises:
        TypeError: model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    found = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if _is_torchs(m)]
    for _, module in found:
        # The subclass has the same attributes, so the object itself can become one.
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
        elif _is_torchs(module):  # not yet, by another name
            module.__class__ = _parametrized(type(module))
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and isinstance(layer.self_attn, MultiheadAttention):
            layer.activation_relu_or_gelu = 0  # read for this alone: no inference kernel in place of the module
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            inside = [m for m in encoder.modules() if isinstance(m, MultiheadAttention)]
            if inside and hasattr(encoder, "use_nested_tensor"):
                encoder.enable_nested_tensor = encoder.use_nested_tensor = False
    return [name for name, _ in found]


def _is_torchs(module: nn.Module) -> bool:
    """torch.nn.MultiheadAttention itself, or the class that torch derives from it for a parametrized module."""
    cls = type(module)
    return cls is nn.MultiheadAttention or (cls.__bases__ == (nn.MultiheadAttention,) and is_parametrized(module))


def _parametrized(cls: type) -> type:
    """The class that torch derived, its properties included, derived from ours."""
    own = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (MultiheadAttention,), own)
