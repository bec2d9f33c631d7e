"""Puts this package's attention into models that were written for torch.nn.MultiheadAttention."""

from __future__ import annotations

from torch import nn

from .nn import MultiheadAttention


def replace_attention(model: nn.Module) -> list[str]:
    """Turns every torch.nn.MultiheadAttention in `model` into attnjourney.nn.MultiheadAttention, in place: parameters,
    hooks, optimizers and other references to the modules stay what they are, shared modules stay shared.

    nn.TransformerEncoder no longer packs padded input into nested tensors around the replaced layers, and
    nn.TransformerEncoderLayer no longer goes around them in evaluation. Subclasses of torch.nn.MultiheadAttention are
    left alone: their own code decides what they compute.

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
    found = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if type(m) is nn.MultiheadAttention]
    for _, module in found:
        # The subclass has the same attributes, so the object itself can become one.
        module.__class__ = MultiheadAttention
        module._qkv_same_embed_dim = False
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            inside = [m for m in encoder.modules() if isinstance(m, MultiheadAttention)]
            if inside and hasattr(encoder, "use_nested_tensor"):
                encoder.enable_nested_tensor = encoder.use_nested_tensor = False
    return [name for name, _ in found]
