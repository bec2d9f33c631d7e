"""Grouped-query attention as one layer: torch.ops.attnjourney.gqa."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._layer_checks import check_heads, check_matrix, check_sequence, check_tables, check_weight
from ._registry.fakes import empty_gradients, empty_lse, empty_stats
from ._registry.flops import layer_flops
from ._registry.registration import register


def gqa(
    x: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    o_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    o_bias: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    r"""Grouped-query self-attention from x to the output projection, one operator forward and one backward (Ainslie et
    al. 2023, arXiv 2305.13245). num_kv_heads = num_heads is multi-head attention, num_kv_heads = 1 multi-query
    attention (Shazeer 2019, arXiv 1911.02150). Keys and values are never repeated.

    Args:
        x: (batch, seq, embed), float32, float64, bfloat16 or float16. Every other tensor but cos, sin has its dtype.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, Hkv, a divisor of H; query head h reads key/value head h // (H / Hkv).
        q_weight: (H * D, embed); the head dimension D follows from it.
        k_weight: (Hkv * D, embed).
        v_weight: (Hkv * Dv, embed); Dv may differ from D.
        o_weight: (out, H * Dv).
        q_bias, k_bias, v_bias, o_bias: (H * D,), (Hkv * D,), (Hkv * Dv,), (out,).
        cos, sin: (seq, rotary_dim / 2), or (batch, seq, rotary_dim / 2) where positions differ by sequence; float32 or
            x's dtype. Rotary position embedding (arXiv 2104.09864) of the first rotary_dim <= D numbers of every query
            and key head, in half-split layout: number j turns with number j + rotary_dim / 2. They get no gradient.
        is_causal: row i sees keys 0 .. i.

    Returns:
        (batch, seq, out) in x's dtype.

    Raises:
        ValueError: a shape or a head count that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: cos or sin requires grad; differentiated three times, or twice
            in forward mode.
    """
    weights = (q_weight, k_weight, v_weight, o_weight, q_bias, k_bias, v_bias, o_bias)
    return _gqa(x, num_heads, num_kv_heads, *weights, cos=cos, sin=sin, is_causal=is_causal)


def _check(
    *, x: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor | None, sin: Tensor | None, is_causal: bool,
    **weights: Any,
) -> None:  # fmt: skip
    check_sequence("x", x)
    batch, seq, embed = x.shape
    if num_heads <= 0:
        raise ValueError(f"num_heads: expected a positive number, got {num_heads}")
    check_heads("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    for name in ("q_weight", "v_weight", "o_weight"):
        check_matrix(name, weights[name])
    head_dim = check_heads("num_heads", num_heads, "the rows of q_weight", weights["q_weight"].shape[0])
    v_head_dim = check_heads("num_kv_heads", num_kv_heads, "the rows of v_weight", weights["v_weight"].shape[0])
    for name, dim in (("q_weight", head_dim), ("v_weight", v_head_dim)):
        if dim == 0:
            raise ValueError(f"{name}: expected at least one row per head, got shape {tuple(weights[name].shape)}")
    out = weights["o_weight"].shape[0]
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * v_head_dim, "o": out}
    for kind, n in rows.items():
        columns = num_heads * v_head_dim if kind == "o" else embed
        check_weight(f"{kind}_weight", weights[f"{kind}_weight"], (n, columns), "x", x)
    for kind, n in rows.items():
        check_weight(f"{kind}_bias", weights[f"{kind}_bias"], (n,), "x", x)
    if check_tables(cos, sin, batch, seq, "x", x) > head_dim and cos is not None:
        at_most = f"at most head_dim / 2 columns, head_dim is {head_dim}"
        raise ValueError(f"cos: expected {at_most}, got shape {tuple(cos.shape)}")


def _fake(**arguments: Any) -> tuple[Tensor, ...]:
    _check(**arguments)
    x, num_heads = arguments["x"], arguments["num_heads"]
    q_weight, k_weight, v_weight, o_weight = (arguments[f"{kind}_weight"] for kind in "qkvo")
    batch, seq, _embed = x.shape
    widths = (o_weight.shape[0], q_weight.shape[0], k_weight.shape[0], v_weight.shape[0], o_weight.shape[1])
    out, query, key, value, attn = (x.new_empty((batch, seq, width)) for width in widths)
    rows = batch, num_heads, seq
    return out, query, key, value, attn, empty_lse(x, *rows), empty_stats(x, *rows)


def _fake_backward(
    *, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, o_weight: Tensor, need: int, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    weights = [w.shape for w in (q_weight, k_weight, v_weight, o_weight)]
    shapes = [x.shape, *weights, *[shape[:1] for shape in weights]]
    return empty_gradients(x, shapes, need)


def _composite(**arguments: Any) -> Tensor:
    from ..reference.gqa import grouped_query_layer

    return grouped_query_layer(torch.ops.attnjourney.attention, **arguments)


def _flops(
    *, x: torch.Size, num_heads: int, q_weight: torch.Size, k_weight: torch.Size, v_weight: torch.Size,
    o_weight: torch.Size, **_: Any,
) -> tuple[int, ...]:  # fmt: skip
    batch, seq, _embed = x
    projections = 2 * batch * seq * sum(rows * columns for rows, columns in (q_weight, k_weight, v_weight, o_weight))
    head_dim, v_head_dim = q_weight[0] // num_heads, o_weight[1] // num_heads
    return layer_flops(projections, batch, num_heads, seq, seq, head_dim, v_head_dim)


_gqa = register(
    "gqa",
    fake=_fake,
    fake_backward=_fake_backward,
    composite=_composite,
    autocast=("x", "q_weight", "k_weight", "v_weight", "o_weight", "q_bias", "k_bias", "v_bias", "o_bias"),
    flops=_flops,
)
