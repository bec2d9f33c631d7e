"""The layer of torch.nn.MultiheadAttention: torch.ops.attnjourney.mha."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layer_checks import check_dropout, check_heads, check_mask, check_sequence, check_weight
from ._registry.fakes import empty_lse, empty_stats
from ._registry.flops import layer_flops
from ._registry.operator import draw_seed, seed_is_apart
from ._registry.registration import OPERATORS, register
from .attention import attention


def mha(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Multi-head attention with its projections, one autograd node for the layer (Vaswani et al. 2017, arXiv
    1706.03762); weights and masks as torch.nn.MultiheadAttention has them, batch first.

    Inputs that are the same tensor are projected together: self-attention is one product with in_proj_weight.

    Args:
        query: (batch, L, embed). float32, float64, bfloat16 or float16.
        key, value: (batch, S, embed), of query's dtype.
        num_heads: divides embed; each head has embed / num_heads columns.
        in_proj_weight: (3 * embed, embed): the rows of query, key, value in this order.
        in_proj_bias: (3 * embed,) or None.
        out_proj_weight: (embed, embed).
        out_proj_bias: (embed,) or None.
        attn_mask: (L, S) or (batch * num_heads, L, S). bool: True where a key may NOT be attended to, the opposite of
            `attention`. Floating (query's dtype or float32): added to the scaled scores. Trainable.
        key_padding_mask: (batch, S), bool or floating in the same way. Both masks apply, whatever their dtypes.
        is_causal: row i sees keys 0 .. i only; composes with the masks.
        dropout_p: probability of dropping an attention weight, always applied: pass 0.0 in evaluation.

    Returns:
        (batch, L, embed) in query's dtype. A row that sees no key is out_proj_bias.

    Raises:
        ValueError: a shape, num_heads or dropout_p that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated three times, or twice in forward mode.
    """
    weights = (num_heads, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias)
    masks: dict[str, Any] = dict(attn_mask=attn_mask, key_padding_mask=key_padding_mask, is_causal=is_causal)
    if seed_is_apart(dropout_p):
        forward, inputs = torch.ops.attnjourney.mha_forward.default, OPERATORS["mha"].without_repeats(query, key, value)
        return forward(*inputs, *weights, **masks, dropout_p=dropout_p, dropout_seed=draw_seed(query))[0]
    return _mha(query, key, value, *weights, **masks, dropout_p=dropout_p)


def _check(
    query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int, in_proj_weight: Tensor,
    in_proj_bias: Tensor | None, out_proj_weight: Tensor, out_proj_bias: Tensor | None, attn_mask: Tensor | None,
    key_padding_mask: Tensor | None, dropout_p: float,
) -> None:  # fmt: skip
    check_sequence("query", query)
    batch, length, embed = query.shape
    keys = length if key is None else key.shape[1] if key.dim() == 3 else 0
    check_heads("num_heads", num_heads, "query's last dimension", embed)
    for name, x in (("key", key), ("value", value)):
        if x is None:
            continue
        check_sequence(name, x)
        check_weight(name, x, (batch, keys, embed), "query", query)
    weights = {
        "in_proj_weight": (in_proj_weight, (3 * embed, embed)),
        "out_proj_weight": (out_proj_weight, (embed, embed)),
        "in_proj_bias": (in_proj_bias, (3 * embed,)),
        "out_proj_bias": (out_proj_bias, (embed,)),
    }
    for name, (weight, shape) in weights.items():
        check_weight(name, weight, shape, "query", query)
    check_dropout(dropout_p)
    check_mask("attn_mask", attn_mask, ((length, keys), (batch * num_heads, length, keys)), query)
    check_mask("key_padding_mask", key_padding_mask, ((batch, keys),), query)


def _fake(
    *, query: Tensor, key: Tensor | None, num_heads: int, is_causal: bool, dropout_seed: Tensor | None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(query, key, num_heads=num_heads, **others)
    batch, length, embed = query.shape
    keys = length if key is None else key.shape[1]
    lse = empty_lse(query, batch, num_heads, length)
    projected = query.new_empty(batch * (length + 2 * keys) * embed)
    stats = empty_stats(query, batch, num_heads, length)
    return query.new_empty(query.shape), query.new_empty(query.shape), lse, stats, projected


def _fake_backward(
    *, query: Tensor, key: Tensor | None, value: Tensor | None, attn_mask: Tensor | None,
    key_padding_mask: Tensor | None, need: int, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if query.dim() != 3:
        raise ValueError(f"query: expected 3 dimensions (batch, seq, embed), got shape {tuple(query.shape)}")
    embed = query.shape[2]
    shapes: list[Sequence[int] | None] = [None if x is None else x.shape for x in (query, key, value)]
    shapes += [(3 * embed, embed), (3 * embed,), (embed, embed), (embed,)]
    gradients = [query.new_empty(0 if shape is None else shape) for shape in shapes]
    for mask in (attn_mask, key_padding_mask):
        if mask is not None and mask.is_floating_point():
            gradients.append(mask.new_empty(mask.shape))
        else:
            gradients.append(query.new_empty(0))
    return tuple(g if need >> bit & 1 else query.new_empty(0) for bit, g in enumerate(gradients))


def _composite(
    *, query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int, in_proj_weight: Tensor,
    in_proj_bias: Tensor | None, out_proj_weight: Tensor, out_proj_bias: Tensor | None, attn_mask: Tensor | None,
    key_padding_mask: Tensor | None, is_causal: bool, dropout_p: float, dropout_seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from ..reference.mha import attention_mask

    key = query if key is None else key  # as mha_forward has them
    value = key if value is None else value
    weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (  # (batch, heads, seq, head_dim)
        F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).transpose(-3, -2)
        for x, weight, bias in zip((query, key, value), weights, biases)
    )
    out = attention(
        q, k, v, attention_mask(attn_mask, key_padding_mask, num_heads), dropout_p, is_causal, dropout_seed=dropout_seed
    )
    return F.linear(out.transpose(-3, -2).flatten(-2), out_proj_weight, out_proj_bias)


def _flops(*, query: torch.Size, key: torch.Size | None, num_heads: int, **_: Any) -> tuple[int, ...]:
    batch, length, embed = query
    keys = length if key is None else key[1]
    projections, head_dim = 2 * batch * (2 * length + 2 * keys) * embed * embed, embed // num_heads
    return layer_flops(projections, batch, num_heads, length, keys, head_dim, head_dim)


_mha = register(
    "mha",
    repeats=((2, 1), (1, 0)),  # key is query, value is key: one variable, one product, one gradient
    fake=_fake,
    fake_backward=_fake_backward,
    composite=_composite,
    autocast=(
        "query",
        "key",
        "value",
        "in_proj_weight",
        "in_proj_bias",
        "out_proj_weight",
        "out_proj_bias",
        "attn_mask",
        "key_padding_mask",
    ),
    flops=_flops,
)
