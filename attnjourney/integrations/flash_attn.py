"""flash-attn's functions over this package's operators: the same names, arguments and results, on CPU and CUDA.

    import attnjourney.integrations.flash_attn as flash_attn
    attnjourney.integrations.flash_attn.install()  # or: code that says `from flash_attn import ...` finds these

Tensors are (batch, seqlen, heads, head_dim), packed ones (total, heads, head_dim). causal, window_size and alibi_slopes
are aligned to the bottom right, as in flash-attn since 2.1. What differs: head dimensions and dtypes are this package's
(float32 and float64 too); dropout has other bits; a row that sees no key has lse -inf; results are deterministic on the
CPU whatever `deterministic` says.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..ops import decode, rope_with_tables, varlen_attention
from ..ops._registry.inference import as_index
from ..ops._registry.registration import needs_node

__version__ = "2.8.3"  # the interface of this version
Result = Tensor | tuple[Tensor, Tensor, Tensor]
Window = tuple[int, int]
UNBOUNDED: Window = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (B, Sq, H, D), k and v (B, Sk, Hk, D) -> (B, Sq, H, Dv); with return_attn_probs also lse (B, H, Sq), and an
    empty tensor in place of the probabilities, which are not kept."""
    _check_rank("q", q, 4)
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    out, lse = _packed(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), _even(batch, rows, q), _even(batch, keys, q), dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes,
    )  # fmt: skip
    out = out.unflatten(0, (batch, rows))
    if not return_attn_probs:
        return out
    return out, lse.unflatten(1, (batch, rows)).transpose(0, 1).contiguous(), q.new_empty(0)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func of kv (B, Sk, 2, Hk, D)."""
    _check_rank("kv", kv, 5)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func of qkv (B, S, 3, H, D)."""
    _check_rank("qkv", qkv, 5)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """q (total_q, H, D), k and v (total_k, Hk, D) -> (total_q, H, Dv), lse (H, total_q). With block_table (B, blocks)
    k and v are (num_blocks, block_size, Hk, D): read in place, gathered for derivatives and for dropout."""
    _check_rank("q", q, 3)
    if block_table is not None and (dropout_p > 0 or needs_node((q, k, v, alibi_slopes), {})):
        k, v = gather_blocks(k, v, cu_seqlens_k, block_table)
        block_table = None
    out, lse = _packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        block_table,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func of kv (total_k, 2, Hk, D)."""
    _check_rank("kv", kv, 4)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func of qkv (total, 3, H, D)."""
    _check_rank("qkv", qkv, 4)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) over a cache, to which k and v (B, Sk, Hk, D) are added first, in place.

    The cache is (B, capacity, Hk, D), with cache_batch_idx (larger B, ...), with block_table (B, blocks) int32
    (num_blocks, block_size, Hk, D). Sequence b holds cache_seqlens[b] keys before the call (all, where None), of which
    the first cache_leftpad[b] are hidden. rotary_cos and rotary_sin (positions, rotary_dim / 2) turn k, and q: at the
    positions of the new keys where causal or in a window, else all rows at the first of them.
    Without gradients. Returns (B, Sq, H, D), with return_softmax_lse also (B, H, Sq).
    """
    _check_rank("q", q, 4)
    if cache_batch_idx is not None and block_table is not None:
        raise ValueError("cache_batch_idx: expected None beside block_table")
    batch, rows = q.shape[:2]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    held = _held(cache_seqlens, capacity, batch, q)
    added = 0 if k is None else k.shape[1]
    first = held if cache_leftpad is None else held - as_index(cache_leftpad)  # position of the first new key
    if rotary_cos is not None:
        if rotary_sin is None or k is None:
            raise ValueError("rotary_cos: expected rotary_sin and new keys beside it")
        follows = causal or window_size != UNBOUNDED
        q = _rotated(q, rotary_cos, rotary_sin, first, rotary_interleaved, int(follows))
        k = _rotated(k, rotary_cos, rotary_sin, first, rotary_interleaved, 1)
    if k is not None:
        if v is None:
            raise ValueError("v: expected a tensor beside k, got None")
        _write(k_cache, v_cache, k, v, held, capacity, cache_batch_idx, block_table)
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[cache_batch_idx], v_cache[cache_batch_idx]
    visible = None
    if cache_leftpad is not None:
        visible = torch.arange(capacity, device=q.device) >= as_index(cache_leftpad)[:, None]  # (B, capacity)
        visible = visible[:, None, None, : int((held + added).max()) if q.is_cpu else capacity]
    out, lse = decode(
        q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2), held + added,
        block_table=None if block_table is None else block_table.to(torch.int32), is_causal=causal,
        window_size=window_size, scale=softmax_scale, attn_mask=visible, softcap=softcap, alibi_slopes=alibi_slopes,
        return_lse=True,
    )  # fmt: skip
    out = out.transpose(1, 2).contiguous()
    return (out, lse) if return_softmax_lse else out


# ------------------------------------------------ the two halves that ring and Ulysses attention are built from


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, and two empty tensors: probabilities, state of the generator. Without dropout."""
    _refuse_dropout(dropout_p)
    with torch.no_grad():
        out, lse, empty = flash_attn_func(
            q, k, v, 0.0, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
            return_attn_probs=True,
        )  # fmt: skip
    return out, lse, empty, empty


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As _flash_attn_forward, of packed sequences."""
    _refuse_dropout(dropout_p)
    with torch.no_grad():
        out, lse, empty = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
            (window_size_left, window_size_right), softcap, alibi_slopes, return_attn_probs=True,
            block_table=block_table,
        )  # fmt: skip
    return out, lse, empty, empty


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradients for these keys into dq, dk and dv; returns the sums of dout * out, (B, H, Sq).

    out and softmax_lse may be those over more keys than k (ring attention). With c = exp(own lse - softmax_lse), the
    share of these keys, the weights are c times the own ones; so the gradients are those of the own result for
    c * dout, and of the own lse for c * (dout . own out - dout . out).
    """
    _refuse_dropout(dropout_p)
    window = window_size_left, window_size_right
    q, k, v = leaves = _leaves(q, k, v)
    with torch.enable_grad():
        own, own_lse, _ = flash_attn_func(
            q, k, v, 0.0, softmax_scale, causal, window, softcap, alibi_slopes, return_attn_probs=True
        )
        own_lse = own_lse.transpose(1, 2)
    sums = _share_of_gradients(dout, out, softmax_lse.transpose(1, 2), own, own_lse, leaves, dq, dk, dv)
    return sums.transpose(1, 2).contiguous()


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As _flash_attn_backward, of packed sequences; softmax_lse and the sums are (H, total_q)."""
    _refuse_dropout(dropout_p)
    window = window_size_left, window_size_right
    q, k, v = leaves = _leaves(q, k, v)
    with torch.enable_grad():
        own, own_lse = _packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, 0.0, softmax_scale, causal, window, softcap, alibi_slopes
        )
        own_lse = own_lse.mT
    return _share_of_gradients(dout, out, softmax_lse.mT, own, own_lse, leaves, dq, dk, dv).mT.contiguous()


def _leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()


def _share_of_gradients(
    dout: Tensor, out: Tensor, lse: Tensor, own: Tensor, own_lse: Tensor, leaves: tuple[Tensor, Tensor, Tensor],
    *results: Tensor | None,
) -> Tensor:  # fmt: skip
    """The formula of _flash_attn_backward; lse and the sums are (..., rows, H), as out without its last dimension."""
    share = (own_lse.detach() - lse).exp().nan_to_num(0.0)
    wide = share.dtype
    sums = (dout.to(wide) * out.to(wide)).sum(-1)
    own_sums = (dout.to(wide) * own.detach().to(wide)).sum(-1)
    cotangents = (share.unsqueeze(-1) * dout).to(own.dtype), share * (own_sums - sums)
    for to, gradient in zip(results, torch.autograd.grad((own, own_lse), leaves, cotangents)):
        if to is not None:
            to.copy_(gradient)
    return sums


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: expected 0 where forward and backward are called apart, got {dropout_p}")


# --------------------------------------------------------------------------------------------------------------- parts


def install() -> None:
    """From here on `import flash_attn`, and of flash_attn.flash_attn_interface, finds this module."""
    module: Any = sys.modules[__name__]
    sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = module
    module.flash_attn_interface = module
    module.__path__ = []  # a package, to those who import flash_attn.flash_attn_interface


def uninstall() -> None:
    """Ends `install`."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        if sys.modules.get(name) is sys.modules[__name__]:
            del sys.modules[name]


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, dropout_p: float, scale: float | None, causal: bool,
    window_size: Window, softcap: float, alibi_slopes: Tensor | None, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if block_table is not None:
        k, v, block_table = as_blocks(k, v, block_table)
    return varlen_attention(
        q, k, v, cu_q, cu_k, dropout_p, causal, block_table=block_table, scale=scale, causal_alignment="bottom_right",
        window_size=(window_size[0], window_size[1]), softcap=softcap, alibi_slopes=alibi_slopes, return_lse=True,
    )  # fmt: skip


def _even(batch: int, length: int, like: Tensor) -> Tensor:
    """Offsets of sequences of one length: (batch + 1,)."""
    return torch.arange(batch + 1, device=like.device) * length


def _check_rank(name: str, x: Tensor, rank: int) -> None:
    if x.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, got shape {tuple(x.shape)}")


def _held(lengths: Tensor | int | None, capacity: int, batch: int, like: Tensor) -> Tensor:
    """cache_seqlens as (B,) int64."""
    if isinstance(lengths, Tensor):
        return as_index(lengths)
    return torch.full((batch,), capacity if lengths is None else lengths, dtype=torch.int64, device=like.device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, step: int) -> Tensor:
    """x (B, S, H, D), its first rotary_dim numbers turned at the positions first + step * row."""
    at = first[:, None] + step * torch.arange(x.shape[1], device=x.device)  # (B, S)
    return rope_with_tables(x.transpose(1, 2), cos[at], sin[at], interleaved=interleaved).transpose(1, 2)


def _write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, held: Tensor, capacity: int, batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """k and v (B, S, Hk, D) behind the keys held."""
    at = held[:, None] + torch.arange(k.shape[1], device=k.device)  # (B, S)
    if k.is_cpu and at.numel() and int(at.max()) >= capacity:
        raise ValueError(f"k: expected at most {capacity} keys in all, the cache's capacity, got {int(at.max()) + 1}")
    if block_table is not None:
        size = k_cache.shape[1]
        row, column = block_table.to(torch.int64).gather(1, at // size), at % size
    else:
        sequence = torch.arange(k.shape[0], device=k.device) if batch_idx is None else batch_idx.to(torch.int64)
        row, column = sequence[:, None], at
    k_cache[row, column] = k.to(k_cache.dtype)
    v_cache[row, column] = v.to(v_cache.dtype)


def as_blocks(k: Tensor, v: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(num_blocks, block_size, Hk, D) and any table of numbers as attnjourney's operators take them."""
    return k.transpose(1, 2), v.transpose(1, 2), block_table.to(torch.int32).contiguous()


def gather_blocks(k: Tensor, v: Tensor, cu_seqlens_k: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of (num_blocks, block_size, Hk, D) packed: (total_k, Hk, D)."""
    size = k.shape[1]
    lengths = cu_seqlens_k.diff().to(torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=k.device), lengths)
    at = torch.arange(len(sequence), device=k.device) - cu_seqlens_k.to(torch.int64)[sequence]
    rows = block_table.to(torch.int64)[sequence, at // size] * size + at % size
    return k.flatten(0, 1)[rows], v.flatten(0, 1)[rows]
