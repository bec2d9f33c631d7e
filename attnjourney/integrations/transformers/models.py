"""Which models can be served, and what their layers must be told."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import NAME
from .indexers import choose_by_our_indexer


def use(model: PreTrainedModel) -> PreTrainedModel:
    """Attention of `model` is this package's from here on; returns it.

    Raises:
        TypeError: it is no model of transformers.
        ValueError: its class takes the name of an attention function and never calls it, as falcon, bloom or mpt:
            some of these would then compute something else without a word.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            where = f" ({name})" if name else ""
            raise ValueError(
                f"model: {type(part).__name__}{where} has attention of its own and does not call the function that is "
                "registered; where it has attn_implementation='sdpa', attnjourney.activate() serves that"
            )
    model.set_attn_implementation(NAME)
    for part in model.modules():
        if _makes_keys_of_latents(part):
            _leave_latents_of_our_cache(part)
        if _makes_a_relative_bias(part):
            _make_the_bias_of_its_diagonals(part)
        choose_by_our_indexer(part)
    return model


def _makes_keys_of_latents(module: Any) -> bool:
    """As DeepseekV3Attention: expand_kv makes keys and values of cached latents with kv_b_proj."""
    if not hasattr(type(module), "expand_kv") or hasattr(module, "attnjourney_expand_kv"):
        return False
    projection = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, name, None) for name in ("num_heads", "qk_nope_head_dim", "v_head_dim")]
    if type(projection) is not nn.Linear or projection.bias is not None or None in sizes:
        return False
    heads, nope, v = sizes
    return projection.weight.shape[0] == heads * (nope + v)


def _leave_latents_of_our_cache(module: Any) -> None:
    expand = module.expand_kv

    def expand_kv(self: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        return (latent, rotary) if hasattr(latent, "attnjourney_latents") else expand(latent, rotary)

    module.attnjourney_expand_kv = True
    module.expand_kv = types.MethodType(expand_kv, module)


def _makes_a_relative_bias(module: Any) -> bool:
    """As T5Attention: compute_bias looks the bias of every row and key up in a table, by their distance alone."""
    compute = getattr(type(module), "compute_bias", None)
    if compute is None or "compute_bias" in vars(module) or not hasattr(module, "relative_attention_bias"):
        return False
    return list(inspect.signature(compute).parameters) == [
        "self", "query_length", "key_length", "device", "past_seen_tokens"
    ]  # fmt: skip


def _make_the_bias_of_its_diagonals(module: Any) -> None:
    """One look-up a distance, rows + keys - 1 in place of rows * keys, forward and backward; the keys of a row lie side
    by side, where a look-up of all has the heads there."""
    compute = module.compute_bias

    def compute_bias(
        self: nn.Module, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        """(1, heads, rows, keys)."""
        last = compute(1, query_length + key_length - 1, device, past_seen_tokens + query_length - 1)[:, :, 0]
        return last.unfold(2, key_length, 1).flip(2)  # row i is the last row's, shifted by rows - 1 - i

    module.compute_bias = types.MethodType(compute_bias, module)
