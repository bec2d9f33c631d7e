"""The indexers of DeepSeek-V3.2 and GLM-MoE-DSA by attnjourney.lightning_indexer: no score of every row and key."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import lightning_indexer
from .attention import calls
from .masks import MaskDescription, Pattern

PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
NUMBERS = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk", "softmax_scale")
ARGUMENTS = ["self", "hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids", "cache"]


def rotation_of(module: Any) -> Callable | None:
    """The one rotary function that an indexer of this make calls; None for any other module."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in PARTS):
        return None
    if not all(hasattr(module, name) for name in NUMBERS):
        return None
    forward = inspect.unwrap(type(module).forward)
    if list(inspect.signature(forward).parameters) != ARGUMENTS:
        return None
    named = [name for name in forward.__code__.co_names if name.startswith("apply_rotary_pos_emb")]
    return forward.__globals__.get(named[0]) if len(named) == 1 else None


def choose_by_our_indexer(module: Any) -> None:
    rotate, theirs = rotation_of(module), module.forward
    if rotate is None or hasattr(module, "attnjourney_indexer"):
        return

    @torch.no_grad()
    def forward(
        self: Any, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor, position_ids: Any = None, cache: Any = None,
    ) -> Tensor:  # fmt: skip
        options = _options(attention_mask, hidden_states.shape[1])
        if options is None:
            return theirs(hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache=cache)
        batch, rows, _ = hidden_states.shape
        sizes = [self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim]
        query = self.wq_b(q_resid).view(batch, rows, self.n_heads, self.head_dim)
        key = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        (turned, rest), (key_turned, key_rest) = query.split(sizes, -1), key.split(sizes, -1)
        turned, key_turned = rotate(turned, key_turned, *position_embeddings, unsqueeze_dim=2)
        query, key = torch.cat([turned, rest], -1), torch.cat([key_turned, key_rest], -1).squeeze(2)
        if cache is not None:
            key = cache.update_indexer(key, self.layer_idx)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).to(wide) * self.n_heads**-0.5
        calls["lightning_indexer"] += 1
        return lightning_indexer(
            query.transpose(1, 2), key.to(query.dtype), weights.transpose(1, 2), min(self.index_topk, key.shape[1]),
            scale=self.softmax_scale, **options,
        )  # fmt: skip

    module.attnjourney_indexer = True
    module.forward = types.MethodType(forward, module)


def _options(mask: Tensor, rows: int) -> dict[str, Any] | None:
    """Of lightning_indexer, for a mask (B, rows, keys); None where it says more than causality and lengths."""
    if isinstance(mask, MaskDescription):
        if mask.pattern != Pattern(True) or mask.padding is not None:
            return None
        return {"is_causal": True, "causal_alignment": "bottom_right", "key_lengths": mask.lengths}
    if rows == 1 and mask.dtype == torch.bool and not torch.compiler.is_compiling() and bool(mask.all()):
        return {"is_causal": False}
    return None
