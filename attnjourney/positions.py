"""Positions: rotary embeddings and their extensions to longer contexts, the sinusoidal table, ALiBi slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._dtypes import accumulation_dtype

# ---- frequencies: all in float64


def _default(dim: int, theta: float) -> Tensor:
    # on the CPU also where a model is built on another default device, meta for one
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def _plain(dim, theta):
    return _default(dim, theta), 1.0


def _linear(dim, theta, *, factor):
    return _default(dim, theta) / factor, 1.0


def _ntk(dim, theta, *, factor):
    return _default(dim, theta * factor ** (dim / (dim - 2))), 1.0


def _dynamic(dim, theta, *, factor, max_position_embeddings, seq_len=None):
    ratio = max(seq_len or 0, max_position_embeddings) / max_position_embeddings
    return _default(dim, theta * (factor * ratio - (factor - 1)) ** (dim / (dim - 2))), 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN raises the temperature of a context `factor` times longer (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(
    dim, theta, *, factor, original_max_position_embeddings, beta_fast=32.0, beta_slow=1.0, truncate=True,
    attention_factor=None, mscale=None, mscale_all_dim=None,
):  # fmt: skip
    def pair_that_turns(rotations):  # the pair that makes so many full turns over the original context
        return dim * math.log(original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low if high > low else 0.001)
    ramp = ramp.clamp(0, 1)  # 0: fast pairs stay, 1: slow pairs are interpolated
    inv_freq = _default(dim, theta)
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), attention_factor


def _llama3(dim, theta, *, factor, original_max_position_embeddings, low_freq_factor=1.0, high_freq_factor=4.0):
    inv_freq = _default(dim, theta)
    turns = original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slow, fast = turns < low_freq_factor, turns > high_freq_factor
    return torch.where(slow, inv_freq / factor, torch.where(fast, inv_freq, between)), 1.0


def _longrope(
    dim, theta, *, short_factor, long_factor, original_max_position_embeddings, factor=None,
    max_position_embeddings=None, attention_factor=None, seq_len=None,
):  # fmt: skip
    if factor is None and max_position_embeddings is not None:
        factor = max_position_embeddings / original_max_position_embeddings
    if factor is None and attention_factor is None:
        raise TypeError("rope_frequencies: longrope needs factor, max_position_embeddings or attention_factor")
    if attention_factor is None:
        more = math.log(max(factor, 1.0)) / math.log(original_max_position_embeddings)
        attention_factor = math.sqrt(1 + more)
    name, factors = ("short_factor", short_factor)
    if (seq_len or 0) > original_max_position_embeddings:
        name, factors = ("long_factor", long_factor)
    factors = torch.as_tensor(factors, dtype=torch.float64, device="cpu")
    if factors.shape != (dim // 2,):
        raise ValueError(f"{name}: expected rotary_dim / 2 = {dim // 2} numbers, got shape {tuple(factors.shape)}")
    return _default(dim, theta) / factors, attention_factor


METHODS: dict[str, Callable] = {
    "default": _plain,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def rope_frequencies(method: str, rotary_dim: int, theta: float = 10000.0, **parameters: Any) -> tuple[Tensor, float]:
    """The frequencies of rotary position embedding, changed so that a model works beyond its training length.

    Args:
        method: with its parameters, which are named as in the configurations of transformers:
            "default": theta^(-2 j / rotary_dim) (Su et al. 2021, arXiv 2104.09864);
            "linear" (`factor`): position interpolation (Chen et al. 2023, arXiv 2306.15595);
            "ntk" (`factor`): theta grows by factor^(d / (d - 2));
            "dynamic" (`factor`, `max_position_embeddings`, `seq_len`): the same, by the length that is there;
            "yarn" (`factor`, `original_max_position_embeddings`, `beta_fast` 32, `beta_slow` 1, `truncate` True,
            `attention_factor`, `mscale`, `mscale_all_dim`): Peng et al. 2023, arXiv 2309.00071;
            "llama3" (`factor`, `original_max_position_embeddings`, `low_freq_factor` 1, `high_freq_factor` 4):
            Llama 3.1 (arXiv 2407.21783);
            "longrope" (`short_factor`, `long_factor`: rotary_dim / 2 numbers each,
            `original_max_position_embeddings`, `factor` or `max_position_embeddings`, `attention_factor`, `seq_len`):
            Ding et al. 2024, arXiv 2402.13753.
        rotary_dim: an even number.
        theta: the base.

    Returns:
        inv_freq, (rotary_dim / 2,) float64, and the attention factor, by which cos and sin are multiplied.

    Raises:
        ValueError: an unknown method, or a number that makes no sense. TypeError: a parameter too many or too few.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    _check_rotary_dim(rotary_dim)
    for name, number in (("theta", theta), ("factor", parameters.get("factor"))):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    return METHODS[method](rotary_dim, float(theta), **parameters)


def _check_rotary_dim(rotary_dim: int, name: str = "rotary_dim") -> None:
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"{name}: expected an even number of at least 0, got {rotary_dim}")


# ---- rotation


def rope_tables(
    inv_freq: Tensor, position_ids: Tensor, attention_factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, times attention_factor: (*position_ids.shape, len(inv_freq)) each.

    The angles are float64 whatever the model's dtype and autocast say: in bfloat16, 256 positions behind 65536 are one
    number.
    """
    angle = position_ids.to(torch.float64).unsqueeze(-1) * inv_freq.to(position_ids.device, torch.float64)
    return (angle.cos() * attention_factor).to(dtype), (angle.sin() * attention_factor).to(dtype)


def check_position_ids(position_ids: Tensor, batch: int, seq: int) -> None:
    """(seq,) or (batch, seq) integers."""
    if position_ids.shape not in ((seq,), (batch, seq)):
        raise ValueError(f"position_ids: expected shape ({seq},) or ({batch}, {seq}), got {tuple(position_ids.shape)}")
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"position_ids: expected dtype torch.int64 or torch.int32, got {position_ids.dtype}")


def rope(
    x: Tensor,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    offset: int = 0,
    inv_freq: Tensor | None = None,
    attention_factor: float = 1.0,
) -> Tensor:
    """Rotary position embedding of queries or keys (Su et al. 2021, arXiv 2104.09864), one operator forward and one
    backward. Pair j of position n turns by the angle n * inv_freq[j], in float64.

    Args:
        x: (batch, heads, seq, head_dim), float32, float64, bfloat16 or float16.
        theta: inv_freq[j] = theta^(-2 j / rotary_dim).
        rotary_dim: how many of a row's first numbers turn, even; head_dim by default. The rest passes through.
        interleaved: pair j is (2 j, 2 j + 1), as in GPT-J, in place of (j, j + rotary_dim / 2), as in Llama.
        position_ids: (seq,) or (batch, seq) integers; 0 .. seq - 1 by default.
        offset: added to every position.
        inv_freq: (rotary_dim / 2,) in place of theta's, such as those of `rope_frequencies`.
        attention_factor: multiplies cos and sin.

    Returns:
        x's shape and dtype, contiguous. Differentiable to any order.

    Raises:
        ValueError: a shape or a number that does not fit. RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: inv_freq requires grad.
    """
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (batch, heads, seq, head_dim), got shape {tuple(x.shape)}")
    batch, _, seq, head_dim = x.shape
    if inv_freq is not None and inv_freq.dim() != 1:
        raise ValueError(f"inv_freq: expected 1 dimension (rotary_dim / 2,), got shape {tuple(inv_freq.shape)}")
    if rotary_dim is None:
        rotary_dim = head_dim if inv_freq is None else 2 * inv_freq.shape[0]
    _check_rotary_dim(rotary_dim)
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_dim: expected at most head_dim, {head_dim}, got {rotary_dim}")
    if inv_freq is None:
        inv_freq = _default(rotary_dim, float(theta))
    elif 2 * inv_freq.shape[0] != rotary_dim:
        raise ValueError(f"inv_freq: expected {rotary_dim // 2} numbers, rotary_dim / 2, got {inv_freq.shape[0]}")
    if position_ids is None:
        position_ids = torch.arange(seq, device=x.device)
    else:
        check_position_ids(position_ids, batch, seq)
    dtype = accumulation_dtype(x.dtype)
    cos, sin = rope_tables(inv_freq, position_ids + offset, attention_factor, dtype)
    return torch.ops.attnjourney.rope(x, cos, sin, interleaved=interleaved)


# ---- other positions


def sinusoidal_positions(
    seq_len: int,
    dim: int,
    theta: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The sinusoidal table, (seq_len, dim) (Vaswani et al. 2017, arXiv 1706.03762): sin and cos of
    n * theta^(-2 j / dim) in columns 2 j and 2 j + 1. Raises ValueError if dim is odd."""
    _check_rotary_dim(dim, "dim")
    cos, sin = rope_tables(_default(dim, theta), torch.arange(seq_len, device=device), dtype=dtype)
    return torch.stack([sin, cos], -1).flatten(-2)


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The slopes of ALiBi, (num_heads,) float32 (Press et al. 2022, arXiv 2108.12409): head h adds
    -slope[h] * distance to its scores. For n = num_heads a power of 2 they are 2^(-8 k / n), k = 1 .. n; for another
    number those of the next lower power, then every second one of twice that power. Raises ValueError below 1 head."""
    if num_heads < 1:
        raise ValueError(f"num_heads: expected a positive number, got {num_heads}")
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * k / n) for k in range(1, n + 1)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(num_heads - n)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
