"""Caches of keys and values for generation: append the new tokens' keys and values, then attend with their queries.

All have the same verbs: append, attend, lengths, truncate, reorder, reset. They are for inference: a tensor that
requires grad is refused while gradients are recorded. An error leaves a cache as it was.

    cache = KVCache(batch, num_kv_heads, capacity, head_dim)
    cache.append(key, value)          # (batch, num_kv_heads, N, head_dim): a prompt, a piece of one, one token
    out = cache.attend(query)         # (batch, num_heads, N, head_dim): its rows are the last of each sequence

Sequences may have different lengths. In a batch padded on the left, `append(..., lengths=counts)` takes the last
counts[b] of the N tokens; attend aligns query rows the same way, so that those of the padding see nothing at first and
their output is to be ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import kv_cache as ops
from ..ops.decode import decode
from ..ops.mla_decode import mla_decode


def check_sizes(**sizes: int) -> None:
    """ValueError for the first that is not a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")


class Cache:
    """What the caches share. key (batch, heads, capacity, dim) and value, or value None; lengths (batch,) int64."""

    key: Tensor
    value: Tensor | None
    lengths: Tensor
    capacity: int

    def _new_lengths(self, lengths: Tensor | int) -> Tensor:
        return torch.full_like(self.lengths, lengths) if isinstance(lengths, int) else lengths

    def truncate(self, lengths: Tensor | int) -> None:
        """Forgets all but the first lengths[b] tokens of each sequence (rollback, speculative decoding).

        lengths: (batch,) int64, or one int for all; from 0 to the present length, else ValueError.
        """
        ops.truncate(self.lengths, self._new_lengths(lengths))

    def reorder(self, batch_index: Tensor) -> None:
        """Sequence b becomes what sequence batch_index[b] was (beam search). batch_index: (batch,) int64."""
        ops.reorder(self.key, self.value, self.lengths, batch_index)

    def reset(self) -> None:
        """Empties the cache."""
        self.lengths.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(t.nbytes for t in (self.key, self.value) if t is not None)

    def __repr__(self) -> str:
        shape = f"key={tuple(self.key.shape)}" + (
            f", value={tuple(self.value.shape)}" if self.value is not None else ""
        )
        return f"{type(self).__name__}({shape}, dtype={self.key.dtype}, device={self.key.device})"


class KVCache(Cache):
    """Keys and values of every sequence in one tensor each.

    Args:
        batch, num_kv_heads, capacity, head_dim, v_head_dim: sizes; v_head_dim is head_dim by default.
        dtype, device: of keys and values, torch's defaults by default.

    Attributes:
        key: (batch, num_kv_heads, capacity, head_dim); value: the same with v_head_dim.
        lengths: (batch,) int64, tokens of each sequence.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_sizes(batch=batch, num_kv_heads=num_kv_heads, capacity=capacity, head_dim=head_dim, v_head_dim=v_head_dim)
        self.capacity = capacity
        self.key = torch.empty(batch, num_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.value = torch.empty(batch, num_kv_heads, capacity, v_head_dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        """Adds N tokens to every sequence, or the last lengths[b] of them to sequence b.

        Args:
            key: (batch, num_kv_heads, N, head_dim), positions already encoded; value: the same with v_head_dim.
            lengths: (batch,) int64 from 0 to N.

        Raises:
            ValueError: a shape that does not fit, or more tokens than there is room for.
            RuntimeError: a dtype or device that does not fit, or a tensor that requires grad.
        """
        ops.append(self.key, self.value, self.lengths, key, value, counts=lengths)

    def attend(
        self,
        query: Tensor,
        *,
        is_causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the last rows of each sequence over what the cache holds: see attnjourney.decode.

        query: (batch, num_heads, N, head_dim). Returns (batch, num_heads, N, v_head_dim).
        """
        options = dict(is_causal=is_causal, window_size=window_size, scale=scale, return_lse=return_lse)
        return decode(query, self.key, self.value, self.lengths, **options)


class WindowCache(KVCache):
    """A ring for sliding windows: memory for the window and for one append, however long the sequences grow.

    Args:
        batch, num_kv_heads, head_dim, v_head_dim, dtype, device: as KVCache.
        window: keys to the left that a row sees beside its own: `left` of window_size. (transformers' sliding_window
            counts the row's own key too: window = sliding_window - 1.)
        max_append: the most tokens of one append; a longer prompt comes in pieces, each followed by its attend.

    Attributes:
        capacity: window + max_append; token j lies at j % capacity.
        lengths: (batch,) int64: tokens ever seen, not only those still there.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        window: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        max_append: int = 128,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if not isinstance(window, int) or window < 0:
            raise ValueError(f"window: expected an int of at least 0, got {window!r}")
        check_sizes(max_append=max_append)
        capacity = window + max_append
        super().__init__(batch, num_kv_heads, capacity, head_dim, v_head_dim, dtype=dtype, device=device)
        self.window, self.max_append = window, max_append
        self.longest = torch.zeros_like(self.lengths)  # ever; what lay `capacity` before it has been overwritten

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        """As KVCache.append, without a limit on the length; ValueError for more than max_append tokens at once."""
        if key.dim() == 4 and key.shape[2] > self.max_append:
            raise ValueError(f"key: expected at most max_append={self.max_append} tokens, got shape {tuple(key.shape)}")
        ops.append(self.key, self.value, self.lengths, key, value, counts=lengths, ring=True)
        torch.maximum(self.longest, self.lengths, out=self.longest)

    def attend(
        self,
        query: Tensor,
        *,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = None,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As KVCache.attend; window_size is (window, -1) by default and may be narrower on the left, never wider."""
        left, right = (self.window, -1) if window_size is None else window_size
        if not 0 <= left <= self.window:
            raise ValueError(
                f"window_size: expected a left part from 0 to the cache's window, {self.window}, got {left}"
            )
        return decode(
            query, self.key, self.value, self.lengths, ring=True, is_causal=is_causal, window_size=(left, right),
            scale=scale, return_lse=return_lse,
        )  # fmt: skip

    def truncate(self, lengths: Tensor | int) -> None:
        """As KVCache.truncate, as far back as no key of the window has been overwritten: at least max_append tokens
        before the greatest length so far (all tokens while that is at most the capacity)."""
        lowest = torch.where(self.longest > self.capacity, self.longest - self.max_append, 0)
        ops.truncate(self.lengths, self._new_lengths(lengths), lowest=lowest)

    def reorder(self, batch_index: Tensor) -> None:
        ops.reorder(self.key, self.value, self.longest.clone(), batch_index)  # what was cut off may still be rewritten
        self.lengths.copy_(self.lengths[batch_index])
        self.longest.copy_(self.longest[batch_index])

    def reset(self) -> None:
        super().reset()
        self.longest.zero_()


class LatentCache(Cache):
    """Latents of multi-head latent attention: kv_lora_rank + qk_rope_head_dim numbers a token (DeepSeek-V3: 576),
    where keys and values of its 128 heads would be 40,960.

    Args:
        batch, capacity, kv_lora_rank, qk_rope_head_dim, dtype, device: sizes and kind.

    Attributes:
        latent: (batch, capacity, kv_lora_rank + qk_rope_head_dim): the normed latent, then the rotary key, turned.
        lengths: (batch,) int64.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        check_sizes(batch=batch, capacity=capacity, kv_lora_rank=kv_lora_rank)
        if not isinstance(qk_rope_head_dim, int) or qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim: expected an int of at least 0, got {qk_rope_head_dim!r}")
        self.capacity, self.kv_lora_rank, self.qk_rope_head_dim = capacity, kv_lora_rank, qk_rope_head_dim
        self.key = torch.empty(batch, 1, capacity, kv_lora_rank + qk_rope_head_dim, dtype=dtype, device=device)
        self.value = None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def latent(self) -> Tensor:
        return self.key.squeeze(1)

    def append(self, latent: Tensor, lengths: Tensor | None = None) -> None:
        """latent: (batch, N, kv_lora_rank + qk_rope_head_dim); lengths, errors: as KVCache.append."""
        width = self.key.shape[-1]
        if latent.dim() != 3 or latent.shape[-1] != width:
            raise ValueError(f"latent: expected shape (batch, tokens, {width}), got {tuple(latent.shape)}")
        ops.append(self.key, None, self.lengths, latent.unsqueeze(1), None, counts=lengths)

    def attend(
        self,
        query: Tensor,
        kv_b_weight: Tensor,
        *,
        is_causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the last rows of each sequence, in the latent space: see attnjourney.mla_decode.

        query: (batch, num_heads, N, nope + rope); kv_b_weight: (num_heads * (nope + v), kv_lora_rank).
        Returns (batch, num_heads, N, v).
        """
        rank, shape = self.kv_lora_rank, tuple(kv_b_weight.shape)
        if shape[1:] != (rank,):
            raise ValueError(f"kv_b_weight: expected {rank} columns (kv_lora_rank), got shape {shape}")
        options = dict(is_causal=is_causal, window_size=window_size, scale=scale, return_lse=return_lse)
        return mla_decode(query, self.latent, self.lengths, kv_b_weight, **options)
