"""Attention over queries, keys and values in e4m3: torch.ops.attnjourney.attention_fp8, and how numbers become e4m3."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._attention_checks import alignment_index, check
from ._attention_rules import per_head, to_front
from ._registry.fakes import broadcasts, need
from ._registry.flops import attention_flops
from ._registry.inference import optional_index, register_inference
from ._registry.operator import Signature

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BLOCK = 128  # rows that share a scale
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # their indices are the operator's int
UNBOUNDED = (-1, -1)
PARTS = ("block", "head", "tensor")


@overload
def attention_fp8(
    query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    is_causal: bool = ..., *, scale: float | None = ..., enable_gqa: bool = ..., causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ..., prefix_length: int = ..., key_lengths: Tensor | None = ...,
    softcap: float | None = ..., sinks: Tensor | None = ..., out_dtype: torch.dtype = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention_fp8(
    query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    is_causal: bool = ..., *, scale: float | None = ..., enable_gqa: bool = ..., causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ..., prefix_length: int = ..., key_lengths: Tensor | None = ...,
    softcap: float | None = ..., sinks: Tensor | None = ..., out_dtype: torch.dtype = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_scale: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] | None = UNBOUNDED,
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""softmax(scale * query key^T + mask) value over numbers in e4m3 (float8_e4m3fn) with a scale for each block of
    128 rows (block quantization of FlashAttention-3, arXiv 2407.08608), for inference: there is no backward.

    A number is its byte times the scale of its row's block; :func:`quantize_fp8` makes both. Scores, weights and sums
    are float32: the result has the error of float32 attention over these numbers.

    Args:
        query: (B, Hq, L, E), float8_e4m3fn. Batch and head dimensions broadcast as in :func:`attention`.
        key: (B, Hk, S, E), float8_e4m3fn.
        value: (B, Hk, S, Ev), float8_e4m3fn.
        query_scale: float32, broadcasts to (B, Hq, ceil(L / 128)), three dimensions: number i is that of rows 128 i ..
            128 i + 127. (B, Hq, 1) has one scale a head, (1, 1, 1) one in all.
        key_scale: the same of key, (B, Hk, ceil(S / 128)).
        value_scale: the same of value.
        is_causal: row position p sees keys 0 .. p.
        scale: 1 / sqrt(E) by default; may be 0 or negative.
        enable_gqa, causal_alignment, window_size, prefix_length, softcap: as in :func:`attention`.
        key_lengths: (B,) int32 or int64: keys beyond are never read.
        sinks: (Hq,) or (B, Hq), float32: one logit that joins each head's denominator.
        out_dtype: bfloat16, float16 or float32.
        return_lse: also return the logarithm of each row's denominator.

    Returns:
        (B, Hq, L, Ev) in out_dtype, and with return_lse (B, Hq, L) float32. A row that sees no key is 0 with lse -inf
        (the sink, where there is one). A NaN shows in the rows that see it and in no other.

    Raises:
        ValueError: a shape or a number that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit, an input that requires grad, or tensors on CUDA.
    """
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype: expected torch.bfloat16, torch.float16 or torch.float32, got {out_dtype}")
    out, lse = _attention_fp8(
        query, key, value, query_scale, key_scale, value_scale, is_causal, scale=scale, enable_gqa=enable_gqa,
        causal_alignment=alignment_index(causal_alignment), window_size=window_size or UNBOUNDED,
        prefix_length=prefix_length, key_lengths=optional_index(key_lengths), softcap=softcap or 0.0, sinks=sinks,
        out_dtype=OUT_DTYPES.index(out_dtype),
    )  # fmt: skip
    return (out, lse) if return_lse else out


def quantize_fp8(
    x: Tensor, per: Literal["block", "head", "tensor"] = "block", *, signs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(numbers in e4m3, scales) of x, as :func:`attention_fp8` takes them; in plain PyTorch, on any device.

    A scale takes the largest magnitude of what shares it to 448, the largest number of e4m3. What is not finite becomes
    a NaN.

    Args:
        x: (B, H, L, E), float32, float64, bfloat16 or float16.
        per: what shares a scale: "block", 128 rows of a head; "head", all rows of a head; "tensor", all numbers.
        signs: (E,), each 1 or -1 (:func:`hadamard_signs`), E a power of two: x is rotated before, x diag(signs) H /
            sqrt(E) with a Hadamard matrix H, so that outliers are spread over the whole row (incoherent processing,
            QuIP# arXiv 2402.04396, FlashAttention-3 arXiv 2407.08608). The same signs for query and key leave their
            products as they are; value is not rotated.

    Returns:
        (B, H, L, E) float8_e4m3fn, and float32 (B, H, ceil(L / 128)), (B, H, 1) or (1, 1, 1).
    """
    if per not in PARTS:
        raise ValueError(f"per: expected 'block', 'head' or 'tensor', got {per!r}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise RuntimeError(f"x: expected dtype torch.float32, float64, bfloat16 or float16, got {x.dtype}")
    need(x.dim() == 4, "x: expected 4 dimensions (batch, heads, length, head_dim)", x)
    y = x.detach().float()
    if signs is not None:
        y = _rotated(y, signs)
    finite = y.isfinite()
    size = torch.where(finite, y.abs(), 0.0)
    length, blocks = x.shape[2], -(-x.shape[2] // BLOCK)
    if per == "block":
        rows = torch.nn.functional.pad(size, (0, 0, 0, blocks * BLOCK - length)).unflatten(2, (blocks, BLOCK))
        top = rows.amax((3, 4)) if x.shape[3] else rows.new_zeros(rows.shape[:3])
    elif size.numel() == 0:
        top = size.new_zeros((*x.shape[:2], 1) if per == "head" else (1, 1, 1))
    else:
        top = size.amax((2, 3)).unsqueeze(2) if per == "head" else size.amax().view(1, 1, 1)
    scale = torch.where(top == 0, 1.0, (top / LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    of_rows = scale.repeat_interleave(BLOCK, 2)[:, :, :length] if per == "block" else scale
    numbers = (y / of_rows.unsqueeze(3)).clamp(-LARGEST, LARGEST)
    return torch.where(finite, numbers, math.nan).to(FP8), scale


def hadamard_signs(head_dim: int, *, generator: torch.Generator | None = None, device: Any = None) -> Tensor:
    """(head_dim,) float32, each 1 or -1 at random: of :func:`quantize_fp8`."""
    bits = torch.randint(2, (head_dim,), generator=generator, device=device)
    return 1.0 - 2.0 * bits.float()


def _rotated(x: Tensor, signs: Tensor) -> Tensor:
    """x diag(signs) H / sqrt(E): log2(E) sums and differences of halves."""
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ValueError(f"signs: expected None beside a head_dim that is no power of two, {size}")
    need(signs.shape == (size,), f"signs: expected shape ({size},)", signs)
    y = x * signs.to(x)
    for level in range(size.bit_length() - 1):
        y = y.unflatten(-1, (-1, 2, 1 << level))
        first, second = y.unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
    return y * size**-0.5


def _check_scale(name: str, scales: Tensor, of: str, x: Tensor) -> None:
    if scales.dtype != torch.float32:
        raise RuntimeError(f"{name}: expected dtype torch.float32, got {scales.dtype}")
    want = (x.shape[0], x.shape[1], (x.shape[2] + BLOCK - 1) // BLOCK)
    fits = scales.dim() == 3 and all(broadcasts(n, w) for n, w in zip(scales.shape, want))
    need(fits, f"{name}: expected a number for each batch item, head and {BLOCK} rows of {of}, {want}", scales)


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    is_causal: bool, scale: float | None, enable_gqa: bool, causal_alignment: int, prefix_length: int, out_dtype: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        need(x.dim() == 4, f"{name}: expected 4 dimensions", x)
        if x.dtype != FP8:
            raise RuntimeError(f"{name}: expected dtype torch.float8_e4m3fn, got {x.dtype}")
    sinks = options["sinks"]
    if sinks is not None and sinks.dtype != torch.float32:
        raise RuntimeError(f"sinks: expected dtype torch.float32, got {sinks.dtype}")
    lead = check(query, key, value, None, scale, enable_gqa, **options)
    for name, scales, of, x in (
        ("query_scale", query_scale, "query", query), ("key_scale", key_scale, "key", key),
        ("value_scale", value_scale, "value", value),
    ):  # fmt: skip
        _check_scale(name, scales, of, x)
    if out_dtype not in range(len(OUT_DTYPES)):
        raise ValueError(f"out_dtype: expected 0 (bfloat16), 1 (float16) or 2 (float32), got {out_dtype}")
    rows = (*lead, query.shape[2])
    out = query.new_empty((*rows, value.shape[3]), dtype=OUT_DTYPES[out_dtype])
    return out, query.new_empty(rows, dtype=torch.float32)


def _flops(*, query: torch.Size, key: torch.Size, value: torch.Size, **others: Any) -> int:
    pairs = max(query[0], key[0]) * max(query[1], key[1]) * query[2] * key[2]
    return attention_flops(pairs, query, value, others)[0]


def _vmap(signature: Signature, info: Any, in_dims: tuple, *flat: Any) -> tuple[tuple, tuple]:
    """One call over all samples, whose items become one batch."""
    size, dims, call = info.batch_size, dict(zip(signature.names, in_dims)), dict(zip(signature.names, flat))
    tensors = ("query", "key", "value", "query_scale", "key_scale", "value_scale")
    for name in (*tensors, "key_lengths"):
        call[name] = to_front(call[name], dims[name], size)
    batch = max((call[name].shape[1] for name in tensors[:3] if call[name].shape[1] != 1), default=1)
    for name in tensors:
        rest = call[name].shape[2:]
        call[name] = call[name].expand(size, batch, *rest).reshape(size * batch, *rest)
    if call["key_lengths"] is not None:
        call["key_lengths"] = call["key_lengths"].flatten()
    sinks = call["sinks"]
    if sinks is not None and (dims["sinks"] is not None or sinks.dim() == 2):
        call["sinks"] = per_head(to_front(sinks, dims["sinks"], size), batch)
    results = signature.call(tuple(call.values()))
    return tuple(x.unflatten(0, (size, batch)) for x in results), (0, 0)


_attention_fp8 = register_inference("attention_fp8", fake=_fake, flops=_flops, vmap=_vmap)
