"""Caches of keys and values for generation: append the new tokens' keys and values, then attend with their queries.

All have the same verbs: append, attend, lengths, truncate, reorder, reset. They are for inference: a tensor that
requires grad is refused while gradients are recorded. An error leaves a cache as it was.

    cache = KVCache(batch, num_kv_heads, capacity, head_dim)
    cache.append(key, value)          # (batch, num_kv_heads, N, head_dim): a prompt, a piece of one, one token
    out = cache.attend(query)         # (batch, num_heads, N, head_dim): its rows are the last of each sequence
    out = cache.step(query, key, value)  # both

With dtype=torch.int8 or torch.float8_e4m3fn a cache holds bytes: half the memory of bfloat16, and a step
reads half as much. Tokens of float32, bfloat16 or float16 are quantised as they are appended, with a scale for each
token and head, which is theirs alone: what is appended later changes nothing that is there.

Sequences may have different lengths. In a batch padded on the left, `append(..., lengths=counts)` takes the last
counts[b] of the N tokens; attend aligns query rows the same way, so that those of the padding see nothing at first and
their output is to be ignored.

On CUDA no verb waits for the device, and all can be captured in a graph. What their values say is known there alone: in
place of an error tokens without room are not written (see attnjourney.ops.kv_cache). `check` waits and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .._dtypes import BYTE_DTYPES
from ..ops import kv_cache as ops
from ..ops._registry.inference import as_index, optional_index
from ..ops.decode import UNBOUNDED, decode
from ..ops.mla_decode import mla_decode

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import DecodeOptions

Result = Tensor | tuple[Tensor, Tensor]  # of attend, without and with return_lse


def check_sizes(**sizes: int) -> None:
    """ValueError for the first that is not a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")


def scale_of(cache: Tensor) -> Tensor | None:
    """Room for a float32 number for each row of a cache of bytes."""
    return cache.new_empty(cache.shape[:-1], dtype=torch.float32) if cache.dtype in BYTE_DTYPES else None


class Cache:
    """What the caches share. key (batch, heads, capacity, dim) and value, or value None; lengths (batch,) int64. Of
    bytes: key_scale and value_scale (batch, heads, capacity)."""

    key: Tensor
    value: Tensor | None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    lengths: Tensor
    capacity: int

    def _step(self, append: Callable[[], None], attend: Callable[[], Any]) -> Any:
        """append, then attend; an error in either leaves the cache as it was."""
        before = self.lengths.clone()
        append()
        try:
            return attend()
        except Exception:
            self.truncate(before)
            raise

    def _scales(self) -> dict[str, Any]:
        """Of a cache of bytes, as the operators take them."""
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: scale for name, scale in scales.items() if scale is not None}

    def _new_lengths(self, lengths: Tensor | int) -> Tensor:
        return torch.full_like(self.lengths, lengths) if isinstance(lengths, int) else as_index(lengths)

    def truncate(self, lengths: Tensor | int) -> None:
        """Forgets all but the first lengths[b] tokens of each sequence (rollback, speculative decoding).

        lengths: (batch,) int64 or int32, or one int for all; from 0 to the present length, else ValueError.
        """
        ops.truncate(self.lengths, self._new_lengths(lengths))

    def reorder(self, batch_index: Tensor) -> None:
        """Sequence b becomes what sequence batch_index[b] was (beam search). batch_index: (batch,) int64
        or int32."""
        ops.reorder(self.key, self.value, self.lengths, as_index(batch_index), **self._scales())

    def reset(self) -> None:
        """Empties the cache."""
        self.lengths.zero_()

    def check(self) -> None:
        """ValueError if a sequence was given more tokens than there is room for. On CUDA nothing else says so: append
        does not wait to learn the lengths. This does."""
        lost = self._lost()
        if lost.any():
            b = int(lost.nonzero()[0])
            raise ValueError(
                f"key: the cache overflowed: expected at most {self.capacity} tokens, or as many as there are blocks "
                f"for, got {int(self.lengths[b])} for batch row {b}"
            )

    def _lost(self) -> Tensor:
        """Bool (batch,): sequences of which tokens were not written."""
        return self.lengths > self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values, and of their scales."""
        tensors = (self.key, self.value, self.key_scale, self.value_scale)
        return sum(t.nbytes for t in tensors if t is not None)

    def __repr__(self) -> str:
        shape = f"key={tuple(self.key.shape)}" + (
            f", value={tuple(self.value.shape)}" if self.value is not None else ""
        )
        return f"{type(self).__name__}({shape}, dtype={self.key.dtype}, device={self.key.device})"


class KeyValueCache(Cache):
    """What the caches of keys and values share."""

    value: Tensor

    @overload
    def attend(
        self, query: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions]
    ) -> Tensor: ...
    @overload
    def attend(
        self, query: Tensor, *, return_lse: Literal[True], **options: Unpack[DecodeOptions]
    ) -> tuple[Tensor, Tensor]: ...
    def attend(
        self,
        query: Tensor,
        *,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = None,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        prefix_length: int = 0,
        softcap: float | None = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        """Attention of the last rows of each sequence over what the cache holds: see attnjourney.decode.

        query: (batch, num_heads, N, head_dim). Returns (batch, num_heads, N, v_head_dim).
        """
        return decode(
            query, self.key, self.value, self.lengths, **self._place(), **self._scales(), is_causal=is_causal,
            window_size=self._window(window_size), scale=scale, attn_mask=attn_mask, prefix_length=prefix_length,
            softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse,
        )  # fmt: skip

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        raise NotImplementedError

    def step(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, **options: Any) -> Any:
        """append, then attend with its options; an error in either leaves the cache as it was."""
        self._window(options.get("window_size"))
        return self._step(lambda: self.append(key, value, lengths), lambda: self.attend(query, **options))

    def _place(self) -> dict:
        """Where `decode` finds the keys, besides key, value and lengths."""
        return {}

    def _window(self, window_size: tuple[int, int] | None) -> tuple[int, int]:
        return UNBOUNDED if window_size is None else window_size


class KVCache(KeyValueCache):
    """Keys and values of every sequence in one tensor each.

    Args:
        batch, num_kv_heads, capacity, head_dim, v_head_dim: sizes; v_head_dim is head_dim by default.
        dtype, device: of keys and values, torch's defaults by default. torch.int8, torch.float8_e4m3fn: bytes.

    Attributes:
        key: (batch, num_kv_heads, capacity, head_dim); value: the same with v_head_dim.
        key_scale, value_scale: of bytes, (batch, num_kv_heads, capacity) float32, what each token's are multiplied by;
            else None.
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
        self.key_scale, self.value_scale = scale_of(self.key), scale_of(self.value)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        """Adds N tokens to every sequence, or the last lengths[b] of them to sequence b.

        Args:
            key: (batch, num_kv_heads, N, head_dim), positions already encoded; value: the same with v_head_dim.
            lengths: (batch,) int64 or int32 from 0 to N.

        Raises:
            ValueError: a shape that does not fit, or more tokens than there is room for.
            RuntimeError: a dtype or device that does not fit, or a tensor that requires grad.
        """
        counts = optional_index(lengths)
        ops.append(self.key, self.value, self.lengths, key, value, counts=counts, **self._scales())


class WindowCache(KVCache):
    """A ring for sliding windows: memory for the window and some tokens more, however long the sequences grow.

    A prompt may be longer than the ring: its keys stay next to the ring, for the attend that follows, until the next
    append, truncate, reorder or reset. (Rows of the padding then stand where keys are gone.)

    Args:
        batch, num_kv_heads, head_dim, v_head_dim, dtype, device: as KVCache.
        window: keys to the left that a row sees besides its own: `left` of window_size. (transformers' sliding_window
            counts the row's own key too: window = sliding_window - 1.)
        max_append: the most tokens of an append, and rows of an attend, for which the ring is enough; truncate can go
            back as far.

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
        self._recent: _Recent | None = None

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        """As KVCache.append, without a limit on the length."""
        self._write(key, value, lengths, self._beside(key, value, lengths))

    def _beside(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> _Recent | None:
        long = key.dim() == 4 and key.shape[2] > self.max_append
        return _Recent(self, key, value, lengths) if long else None

    def _write(self, key: Tensor, value: Tensor, lengths: Tensor | None, recent: _Recent | None) -> None:
        counts = optional_index(lengths)
        ops.append(self.key, self.value, self.lengths, key, value, counts=counts, ring=True, **self._scales())
        torch.maximum(self.longest, self.lengths, out=self.longest)
        self._recent = recent

    def attend(self, query: Tensor, **options: Any) -> Any:
        """As KVCache.attend, without prefix_length; window_size is (window, -1) by default and may be narrower on the
        left, never wider."""
        if self._recent is None or query.dim() != 4 or query.shape[2] <= self.max_append:
            return super().attend(query, **options)
        options["window_size"] = self._window(options.get("window_size"))
        return self._recent.attend(query, **options)

    def step(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, **options: Any) -> Any:
        options["window_size"] = self._window(options.get("window_size"))
        recent, before = self._beside(key, value, lengths), (self.longest.clone(), self._recent)
        if recent is not None:  # the ring is written last: that cannot be taken back
            out = recent.attend(query, **options)
            self._write(key, value, lengths, recent)
            return out
        try:
            return super().step(query, key, value, lengths, **options)
        except Exception:
            self.longest.copy_(before[0])
            self._recent = before[1]
            raise

    def _lost(self) -> Tensor:
        return torch.zeros_like(self.lengths, dtype=torch.bool)  # a ring has room

    def _place(self) -> dict:
        return {"ring": True}

    def _window(self, window_size: tuple[int, int] | None) -> tuple[int, int]:
        left, right = (self.window, -1) if window_size is None else window_size
        if not 0 <= left <= self.window:
            raise ValueError(
                f"window_size: expected a left part from 0 to the cache's window, {self.window}, got {left}"
            )
        return left, right

    def truncate(self, lengths: Tensor | int) -> None:
        """As KVCache.truncate, as far back as the tokens appended next still find their whole window: max_append tokens
        before the greatest length so far (all tokens while that is at most the capacity). Rows of an attend before
        that append may stand where keys are gone, as those of the padding do."""
        lowest = torch.where(self.longest > self.capacity, self.longest - self.max_append, 0)
        ops.truncate(self.lengths, self._new_lengths(lengths), lowest=lowest)
        self._recent = None

    def reorder(self, batch_index: Tensor) -> None:
        super().reorder(batch_index)
        self.longest.copy_(self.longest[batch_index])
        self._recent = None

    def reset(self) -> None:
        super().reset()
        self.longest.zero_()
        self._recent = None


class _Recent:
    """The tokens of an append that the ring has no room for, behind those of the window before them, in order.

    Attributes:
        cache: KVCache of window + N tokens. start: (batch,) the number of its first token in the whole sequence.
    """

    def __init__(self, ring: WindowCache, key: Tensor, value: Tensor, counts: Tensor | None):
        batch, heads, _, dim = ring.key.shape
        window = ring.window
        self.cache = KVCache(
            batch, heads, window + key.shape[2], dim, ring.value.shape[3], dtype=ring.key.dtype, device=ring.key.device
        )
        kept = ring.lengths.clamp(max=window)
        self.start = ring.lengths - kept
        slots = (self.start[:, None] + torch.arange(window, device=kept.device)) % ring.capacity  # (batch, window)
        for to, x in ((self.cache.key, ring.key), (self.cache.value, ring.value)):
            if x.dtype in BYTE_DTYPES:  # torch gathers no float8
                to, x = to.view(torch.uint8), x.view(torch.uint8)
            to[:, :, :window] = x.gather(2, slots[:, None, :, None].expand(-1, heads, -1, x.shape[3]))
        scales = ((self.cache.key_scale, ring.key_scale), (self.cache.value_scale, ring.value_scale))
        for scale, own in scales:
            if scale is not None and own is not None:
                scale[:, :, :window] = own.gather(2, slots[:, None].expand(-1, heads, -1))
        self.cache.lengths.copy_(kept)
        self.cache.append(key, value, counts)

    def attend(self, query: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Any:
        if options.get("prefix_length"):
            raise ValueError("prefix_length: expected 0 beside a ring, which forgets its first keys")
        if attn_mask is not None and attn_mask.dim() and attn_mask.shape[-1] != 1:
            keys = attn_mask.shape[-1]
            if self.start.device.type == "cpu":  # elsewhere nothing waits for the lengths
                longest = int((self.start + self.cache.lengths).max())
                if keys != longest:
                    shape = tuple(attn_mask.shape)
                    raise ValueError(
                        f"attn_mask: expected a last dimension of 1 or of the longest length, {longest}, got shape "
                        f"{shape}"
                    )
            mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(query.shape[0], -1, -1, -1)
            columns = self.start[:, None] + torch.arange(self.cache.capacity, device=mask.device)
            columns = columns.clamp(max=keys - 1)[:, None, None, :].expand(*mask.shape[:3], -1)
            attn_mask = mask.gather(-1, columns)  # column j is now the cache's key j; those past the end are not read
        return self.cache.attend(query, attn_mask=attn_mask, **options)


class LatentCache(Cache):
    """Latents of multi-head latent attention: kv_lora_rank + qk_rope_head_dim numbers a token (DeepSeek-V3: 576),
    where keys and values of its 128 heads would be 40,960.

    Args:
        batch, capacity, kv_lora_rank, qk_rope_head_dim, dtype, device: sizes and kind.

    Attributes:
        latent: (batch, capacity, kv_lora_rank + qk_rope_head_dim): the normed latent, then the rotary key, turned.
        latent_scale: of bytes, (batch, capacity) float32: what each token's latent and rotary key are multiplied by;
            else None.
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
        check_sizes(batch=batch, capacity=capacity)
        self._set_sizes(kv_lora_rank, qk_rope_head_dim)
        self.capacity = capacity
        self.key = torch.empty(batch, 1, capacity, kv_lora_rank + qk_rope_head_dim, dtype=dtype, device=device)
        self.value, self.key_scale = None, scale_of(self.key)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    def _set_sizes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
        check_sizes(kv_lora_rank=kv_lora_rank)
        if not isinstance(qk_rope_head_dim, int) or qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim: expected an int of at least 0, got {qk_rope_head_dim!r}")
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim

    @property
    def latent(self) -> Tensor:
        return self.key.squeeze(1)

    @property
    def latent_scale(self) -> Tensor | None:
        return None if self.key_scale is None else self.key_scale.squeeze(1)

    def append(self, latent: Tensor, lengths: Tensor | None = None) -> None:
        """latent: (batch, N, kv_lora_rank + qk_rope_head_dim); lengths, errors: as KVCache.append."""
        width = self.key.shape[-1]
        if latent.dim() != 3 or latent.shape[-1] != width:
            raise ValueError(f"latent: expected shape (batch, tokens, {width}), got {tuple(latent.shape)}")
        self._write(latent.unsqueeze(1), lengths)

    def _write(self, latent: Tensor, lengths: Tensor | None) -> None:
        """latent: (batch, 1, N, width)"""
        counts = optional_index(lengths)
        ops.append(self.key, None, self.lengths, latent, None, counts=counts, **self._scales())

    @overload
    def attend(
        self, query: Tensor, kv_b_weight: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions]
    ) -> Tensor: ...
    @overload
    def attend(
        self, query: Tensor, kv_b_weight: Tensor, *, return_lse: Literal[True], **options: Unpack[DecodeOptions]
    ) -> tuple[Tensor, Tensor]: ...
    def attend(
        self,
        query: Tensor,
        kv_b_weight: Tensor,
        *,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = UNBOUNDED,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        prefix_length: int = 0,
        softcap: float | None = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        """Attention of the last rows of each sequence over the latents: see attnjourney.mla_decode.

        query: (batch, num_heads, N, nope + rope); kv_b_weight: (num_heads * (nope + v), kv_lora_rank).
        Returns (batch, num_heads, N, v).
        """
        self._check_weight(kv_b_weight)
        return mla_decode(
            query, self.latent, self.lengths, kv_b_weight, latent_scale=self.latent_scale, **self._place(),
            is_causal=is_causal, window_size=window_size, scale=scale, attn_mask=attn_mask,
            prefix_length=prefix_length, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse,
        )  # fmt: skip

    def _check_weight(self, kv_b_weight: Tensor) -> None:
        rank, shape = self.kv_lora_rank, tuple(kv_b_weight.shape)
        if shape[1:] != (rank,):
            raise ValueError(f"kv_b_weight: expected {rank} columns (kv_lora_rank), got shape {shape}")

    def _place(self) -> dict:
        """Where `mla_decode` finds the latents, besides latent and lengths."""
        return {}

    def step(
        self, query: Tensor, latent: Tensor, kv_b_weight: Tensor, lengths: Tensor | None = None, **options: Any
    ) -> Any:
        """append, then attend with its options; an error in either leaves the cache as it was."""
        return self._step(lambda: self.append(latent, lengths), lambda: self.attend(query, kv_b_weight, **options))
