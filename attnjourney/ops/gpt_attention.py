"""The attention layer of GPT: torch.ops.attnjourney.gpt_attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layer_checks import check_dropout, check_heads, check_sequence, check_weight
from ._registry.fakes import empty_gradients, empty_lse, empty_stats
from ._registry.flops import layer_flops
from ._registry.operator import draw_seed, seed_is_apart
from ._registry.registration import register
from .attention import attention


def gpt_attention(
    x: Tensor,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    *,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Causal multi-head self-attention with its projections, one autograd node for the layer (Radford et al. 2018,
    "Improving Language Understanding by Generative Pre-Training"; Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        x: (batch, seq, embed). float32, float64, bfloat16 or float16.
        num_heads: divides embed; each head has embed / num_heads columns.
        qkv_weight: (3 * embed, embed): the rows of query, key, value in this order, in x's dtype.
        qkv_bias: (3 * embed,) or None.
        out_weight: (embed, embed).
        out_bias: (embed,) or None.
        dropout_p: probability of dropping an attention weight, always applied: pass 0.0 in evaluation.

    Returns:
        (batch, seq, embed) in x's dtype; position i depends on positions 0 .. i.

    Raises:
        ValueError: a shape, num_heads or dropout_p that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated three times, or twice in forward mode.
    """
    arguments = (x, num_heads, qkv_weight, qkv_bias, out_weight, out_bias)
    if seed_is_apart(dropout_p):
        forward = torch.ops.attnjourney.gpt_attention_forward.default
        return forward(*arguments, dropout_p=dropout_p, dropout_seed=draw_seed(x))[0]
    return _gpt_attention(*arguments, dropout_p=dropout_p)


def _fake(
    *, x: Tensor, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor | None, out_weight: Tensor,
    out_bias: Tensor | None, dropout_p: float, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_sequence("x", x)
    embed = x.shape[2]
    check_heads("num_heads", num_heads, "x's last dimension", embed)
    check_weight("qkv_weight", qkv_weight, (3 * embed, embed), "x", x)
    check_weight("out_weight", out_weight, (embed, embed), "x", x)
    check_weight("qkv_bias", qkv_bias, (3 * embed,), "x", x)
    check_weight("out_bias", out_bias, (embed,), "x", x)
    check_dropout(dropout_p)
    batch, seq, embed = x.shape
    lse = empty_lse(x, batch, num_heads, seq)
    stats = empty_stats(x, batch, num_heads, seq)
    return x.new_empty(x.shape), x.new_empty(x.shape), lse, stats, x.new_empty((batch, seq, 3 * embed))


def _fake_backward(*, x: Tensor, need: int, **_: Any) -> tuple[Tensor, ...]:
    if x.dim() != 3:
        raise ValueError(f"x: expected 3 dimensions (batch, seq, embed), got shape {tuple(x.shape)}")
    embed = x.shape[2]
    shapes = x.shape, (3 * embed, embed), (3 * embed,), (embed, embed), (embed,)
    return empty_gradients(x, shapes, need)


def _composite(
    *, x: Tensor, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor | None, out_weight: Tensor,
    out_bias: Tensor | None, dropout_p: float, dropout_seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    qkv = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1))  # (batch, seq, 3, heads, head_dim)
    q, k, v = qkv.transpose(-4, -2).unbind(-3)  # each (batch, heads, seq, head_dim)
    out = attention(q, k, v, None, dropout_p, True, dropout_seed=dropout_seed)
    return F.linear(out.transpose(-3, -2).flatten(-2), out_weight, out_bias)


def _flops(*, x: torch.Size, num_heads: int, **_: Any) -> tuple[int, ...]:
    batch, seq, embed = x
    head_dim = embed // num_heads
    return layer_flops(2 * batch * seq * embed * 4 * embed, batch, num_heads, seq, seq, head_dim, head_dim)


_gpt_attention = register(
    "gpt_attention",
    fake=_fake,
    fake_backward=_fake_backward,
    composite=_composite,
    autocast=("x", "qkv_weight", "qkv_bias", "out_weight", "out_bias"),
    flops=_flops,
)
