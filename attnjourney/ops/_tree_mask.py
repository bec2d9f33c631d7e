"""The mask of a tree of drafted tokens, for decoding all of its paths in one call (speculative decoding)."""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry.inference import as_index


def tree_mask(parents: Tensor, lengths: Tensor, keys: int | None = None) -> Tensor:
    """Which keys each token of a drafted tree sees: what `decode` and `mla_decode` take as attn_mask.

    A sequence's drafted tokens are the last L of its cache. Each sees the text before the tree, its ancestors and
    itself, so that one call gives every path of the tree what decoding it alone would. The mask is all there is to it:
    `decode(query, key, value, lengths, is_causal=False, attn_mask=tree_mask(parents, lengths))`. Positions (rotary,
    ALiBi, window_size) are a matter of depth: see :func:`attnjourney.tree_depths`; decode's own ALiBi and window count
    places in the cache.

    Args:
        parents: (L,) or (B, L) int64 or int32: the number of each token's parent in the tree, less than its own; -1: a
            child of the text.
        lengths: (B,) int64 or int32: tokens of each sequence in the cache, those of the tree included.
        keys: columns of the mask, the longest length (for which CUDA waits) or the cache's capacity; by default the
            longest length.

    Returns:
        Bool (B, 1, L, keys), True where a key is seen.

    Raises:
        ValueError: a shape that does not fit; on the CPU also a parent that does not come before its child, and a
            sequence shorter than its tree. RuntimeError: a dtype that does not fit.
    """
    seen = _ancestors(parents)  # (L, L) or (B, L, L)
    lengths = _index("lengths", lengths)
    tokens = parents.shape[-1]
    if lengths.dim() != 1 or (parents.dim() == 2 and parents.shape[0] != lengths.shape[0]):
        raise ValueError(f"lengths: expected shape (batch,), got {tuple(lengths.shape)} beside {tuple(parents.shape)}")
    if lengths.device.type == "cpu" and (lengths < tokens).any():
        raise ValueError(f"lengths: expected at least the {tokens} tokens of the tree, got {int(lengths.min())}")
    if keys is None:
        keys = int(lengths.max()) if len(lengths) else 0
    # (batch, keys): of the tree, from 0 on; below 0 of the text
    token = torch.arange(keys, device=lengths.device) - (lengths[:, None] - tokens)
    if tokens == 0:
        return token.new_zeros((len(lengths), 1, 0, keys), dtype=torch.bool)
    column = token.clamp(0, tokens - 1)[:, None, :].expand(-1, tokens, -1)
    of_tree = seen.expand(len(lengths), -1, -1).gather(-1, column)
    return (((token < 0)[:, None] | of_tree) & (token < tokens)[:, None]).unsqueeze(1)


def tree_depths(parents: Tensor) -> Tensor:
    """How many drafted tokens lie before each one on its path: it stands at the length of the text plus that.

    parents: as of :func:`attnjourney.tree_mask`. Returns int64 of its shape.
    """
    return _ancestors(parents).sum(-1) - 1


def _index(name: str, x: Tensor) -> Tensor:
    if x.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{name}: expected dtype torch.int64 or torch.int32, got {x.dtype}")
    return as_index(x)


def _ancestors(parents: Tensor) -> Tensor:
    """Bool (..., L, L): whether the column's token is the row's, or lies before it on its path."""
    if parents.dim() not in (1, 2):
        raise ValueError(f"parents: expected shape (tokens,) or (batch, tokens), got {tuple(parents.shape)}")
    parents = _index("parents", parents)
    tokens = parents.shape[-1]
    number = torch.arange(tokens, device=parents.device)
    wrong = (parents >= number) | (parents < -1)
    if parents.device.type == "cpu" and wrong.any():  # elsewhere nothing waits for the values
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"parents: expected -1 or the number of a token before its child, got {int(parents[where])} at {where}"
        )
    seen = ((parents.unsqueeze(-1) == number) | (number.unsqueeze(-1) == number)).float()
    for _ in range(max(0, tokens - 1).bit_length()):  # paths of twice the length each time
        seen = (seen @ seen > 0).float()
    return seen > 0
