"""Multi-head latent attention as one layer: torch.ops.attnjourney.mla."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import check_scale
from ._layer_checks import check_matrix, check_sequence, check_tables, check_weight
from ._registry.fakes import empty_lse, empty_stats
from ._registry.flops import layer_flops
from ._registry.registration import register


def mla(
    x: Tensor,
    num_heads: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    q_a_weight: Tensor | None,
    q_a_norm_weight: Tensor | None,
    q_b_weight: Tensor,
    kv_a_weight: Tensor,
    kv_a_norm_weight: Tensor,
    kv_b_weight: Tensor,
    o_weight: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Tensor:
    r"""Multi-head latent self-attention from x to the output projection, one operator forward and one backward
    (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437). Weights are named and laid out as in transformers'
    deepseek_v3: q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj.

    Args:
        x: (batch, seq, embed), float32, float64, bfloat16 or float16. Every other tensor but cos, sin has its dtype.
        num_heads: H.
        qk_nope_head_dim, qk_rope_head_dim: a query or key head is [nope | rope]; only the rope part is rotated.
        v_head_dim: of a value head.
        q_a_weight: (q_lora_rank, embed), or None: then q_b_weight reads x and q_a_norm_weight is None too.
        q_a_norm_weight: (q_lora_rank,), of the RMS norm between q_a_weight and q_b_weight.
        q_b_weight: (H * (nope + rope), q_lora_rank); (H * (nope + rope), embed) without q_a_weight.
        kv_a_weight: (kv_lora_rank + rope, embed): the latent, and the rotary key that all heads share.
        kv_a_norm_weight: (kv_lora_rank,), of the RMS norm of the latent (the shared key is not normed).
        kv_b_weight: (H * (nope + v_head_dim), kv_lora_rank): per head its nope rows of the key, then its value rows.
        o_weight: (out, H * v_head_dim).
        cos, sin: (seq, rope / 2), or (batch, seq, rope / 2) where positions differ by sequence; float32 or x's dtype.
            Rotary position embedding (arXiv 2104.09864) in interleaved layout: number 2 j turns with number 2 j + 1.
            None: no rotation. They get no gradient.
        is_causal: row i sees keys 0 .. i.
        scale: of the scores, (nope + rope) ** -0.5 by default.
        eps: of both norms.

    Returns:
        (batch, seq, out) in x's dtype.

    Raises:
        ValueError: a shape or a number that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: cos or sin requires grad; differentiated three times, or twice
            in forward mode.
    """
    dims = (num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
    weights = (q_a_weight, q_a_norm_weight, q_b_weight, kv_a_weight, kv_a_norm_weight, kv_b_weight, o_weight)
    return _mla(x, *dims, *weights, cos=cos, sin=sin, is_causal=is_causal, scale=scale, eps=eps)


def _check(
    *, x: Tensor, num_heads: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
    q_a_weight: Tensor | None, q_a_norm_weight: Tensor | None, q_b_weight: Tensor, kv_a_weight: Tensor,
    kv_a_norm_weight: Tensor, kv_b_weight: Tensor, o_weight: Tensor, cos: Tensor | None, sin: Tensor | None,
    is_causal: bool, scale: float | None, eps: float,
) -> None:  # fmt: skip
    check_sequence("x", x)
    batch, seq, embed = x.shape
    nope, rope, qk = qk_nope_head_dim, qk_rope_head_dim, qk_nope_head_dim + qk_rope_head_dim
    dims = {"num_heads": (num_heads, 1), "qk_nope_head_dim": (nope, 0), "qk_rope_head_dim": (rope, 0)}
    for name, (number, least) in {**dims, "v_head_dim": (v_head_dim, 1)}.items():
        if number < least:
            raise ValueError(
                f"{name}: expected a {'positive number' if least else 'number of at least 0'}, got {number}"
            )
    if qk == 0:
        raise ValueError("qk_nope_head_dim, qk_rope_head_dim: expected a sum of at least 1, got 0")
    for number in (num_heads, nope, rope, v_head_dim):
        if number >= 1 << 30:
            raise ValueError(f"num_heads, head dimensions: expected numbers below 2^30, got {number}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps}")
    if (q_a_weight is None) != (q_a_norm_weight is None):
        given, missing = ("q_a_weight", "q_a_norm_weight")[:: -1 if q_a_weight is None else 1]
        raise ValueError(f"{missing}: expected a tensor beside {given}, got None")
    query_width = embed
    if q_a_weight is not None:
        check_matrix("q_a_weight", q_a_weight)
        query_width = q_a_weight.shape[0]
        if query_width == 0:
            raise ValueError(f"q_a_weight: expected at least one row, got shape {tuple(q_a_weight.shape)}")
        check_weight("q_a_weight", q_a_weight, (query_width, embed), "x", x)
        check_weight("q_a_norm_weight", q_a_norm_weight, (query_width,), "x", x)
    check_weight("q_b_weight", q_b_weight, (num_heads * qk, query_width), "x", x)
    check_matrix("kv_a_weight", kv_a_weight)
    kv_lora = kv_a_weight.shape[0] - rope
    if kv_lora <= 0:
        shape = tuple(kv_a_weight.shape)
        raise ValueError(f"kv_a_weight: expected more rows than qk_rope_head_dim, {rope}, got shape {shape}")
    check_weight("kv_a_weight", kv_a_weight, (kv_lora + rope, embed), "x", x)
    check_weight("kv_a_norm_weight", kv_a_norm_weight, (kv_lora,), "x", x)
    check_weight("kv_b_weight", kv_b_weight, (num_heads * (nope + v_head_dim), kv_lora), "x", x)
    check_matrix("o_weight", o_weight)
    check_weight("o_weight", o_weight, (o_weight.shape[0], num_heads * v_head_dim), "x", x)
    rotary_dim = check_tables(cos, sin, batch, seq, "x", x)
    if cos is not None and rotary_dim != rope:
        expected = f"({seq}, qk_rope_head_dim / 2), qk_rope_head_dim is {rope}"
        raise ValueError(f"cos: expected shape {expected}, got {tuple(cos.shape)}")
    check_scale(scale)


def _fake(**arguments: Any) -> tuple[Tensor, ...]:
    _check(**arguments)
    names = ("q_a_weight", "q_b_weight", "kv_a_weight", "kv_b_weight", "o_weight")
    x, num_heads = arguments["x"], arguments["num_heads"]
    q_a_weight, q_b_weight, kv_a_weight, kv_b_weight, o_weight = (arguments[name] for name in names)
    batch, seq, _embed = x.shape
    widths = o_weight.shape[0], *(w.shape[0] for w in (q_b_weight, kv_b_weight, kv_a_weight)), o_weight.shape[1]
    out, query, kv, kv_a, attn = (x.new_empty((batch, seq, width)) for width in widths)
    kv_rstd = empty_lse(x, batch, seq)
    q_a = x.new_empty((0,) if q_a_weight is None else (batch, seq, q_a_weight.shape[0]))
    q_rstd = empty_lse(x, 0) if q_a_weight is None else empty_lse(x, batch, seq)
    rows = batch, num_heads, seq
    return out, query, kv, kv_a, kv_rstd, q_a, q_rstd, attn, empty_lse(x, *rows), empty_stats(x, *rows)


def _composite(**arguments: Any) -> Tensor:
    from ..reference.mla import latent_layer

    return latent_layer(torch.ops.attnjourney.attention, **arguments)


def _flops(
    *, x: torch.Size, num_heads: int, q_a_weight: torch.Size | None, q_b_weight: torch.Size, kv_a_weight: torch.Size,
    kv_b_weight: torch.Size, o_weight: torch.Size, **_: Any,
) -> tuple[int, ...]:  # fmt: skip
    batch, seq, _embed = x
    weights = [w for w in (q_a_weight, q_b_weight, kv_a_weight, kv_b_weight, o_weight) if w is not None]
    projections = 2 * batch * seq * sum(rows * columns for rows, columns in weights)
    head_dim, v_head_dim = q_b_weight[0] // num_heads, o_weight[1] // num_heads
    return layer_flops(projections, batch, num_heads, seq, seq, head_dim, v_head_dim)


_mla = register(
    "mla",
    fake=_fake,
    composite=_composite,
    autocast=(
        "x",
        "q_a_weight",
        "q_a_norm_weight",
        "q_b_weight",
        "kv_a_weight",
        "kv_a_norm_weight",
        "kv_b_weight",
        "o_weight",
    ),
    flops=_flops,
)
