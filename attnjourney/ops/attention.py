"""Scaled dot-product attention, the core operator: torch.ops.attnjourney.attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ._attention_checks import check
from ._registration import register


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""softmax(scale * query key^T + mask) value per head, in O(L + S) memory; a drop-in for
    torch.nn.functional.scaled_dot_product_attention (Vaswani et al. 2017, arXiv 1706.03762; computed by the online
    softmax of FlashAttention, arXiv 2205.14135).

    Args:
        query: (..., Hq, L, E). Any rank from 2; rank 3 has no batch dimension, rank 2 no heads either. float32,
            float64, bfloat16 or float16.
        key: (..., Hk, S, E), of query's rank and dtype. A batch or head dimension of size 1 broadcasts.
        value: (..., Hk, S, Ev); Ev may differ from E.
        attn_mask: broadcasts to (..., Hq, L, S). bool: True where a key may be attended to. Floating (query's dtype or
            float32): added to the scaled scores; -inf hides the key. Trainable.
        dropout_p: probability of dropping a weight, always applied: pass 0.0 in evaluation. The bits follow
            torch.manual_seed and depend on nothing else than the seed and the weight's position.
        is_causal: row i sees keys 0 .. i (top-left alignment, whatever L and S). Composes with attn_mask: a key must
            be visible to both.
        scale: 1 / sqrt(E) by default.
        enable_gqa: Hq may be a multiple of Hk; query head h reads key/value head h // (Hq / Hk).

    Returns:
        (..., Hq, L, Ev) in query's dtype, contiguous. A row that sees no key is 0 and gives no gradient.

    Raises:
        ValueError: a shape, dropout_p or scale that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated twice, or in forward mode.
    """
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _fake(*, query, key, value, attn_mask, scale, enable_gqa, **_):
    lead = check(query, key, value, attn_mask, scale, enable_gqa)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    length = query.shape[-2]
    out = query.new_empty((*lead, length, value.shape[-1]))
    return out, query.new_empty((*lead, length), dtype=lse_dtype)


def _flops(*, query, key, value, **_):
    """As torch counts F.scaled_dot_product_attention: masks are ignored; the backward recomputes the scores."""
    *lead, length, dim = query
    batch_heads = 1
    for d, n in enumerate(lead):
        batch_heads *= max(n, key[d], value[d])
    pairs = 2 * batch_heads * length * key[-2]
    return pairs * (dim + value[-1]), pairs * (3 * dim + 2 * value[-1])


# ---- torch.func.vmap: the new dimension goes in front, as one more batch dimension. Inputs without it are expanded
# (stride 0), so that their gradients come out per sample. Dropout with randomness="different" is one call with one
# seed, whose bits differ by batch index; "same" needs the same bits for every sample: one call each (None).


def _to_front(x: Tensor | None, in_dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return x.unsqueeze(0).expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)


def _align(mask: Tensor | None, rank: int) -> Tensor | None:
    """(batch, *dims) -> (batch, 1..., *dims) of that rank, as a mask broadcasts from the right."""
    if mask is None or mask.dim() >= rank:
        return mask
    return mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


def _one_seed(seed: Tensor | None, in_dim: int | None) -> Tensor | None:
    return seed if seed is None or in_dim is None else seed.select(in_dim, 0)


def _vmap_forward(info, in_dims, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed):
    if dropout_seed is not None and in_dims[8] is None:
        return None
    q, k, v = (_to_front(x, d, info.batch_size) for x, d in zip((query, key, value), in_dims))
    if in_dims[3] is not None:
        attn_mask = _align(attn_mask.movedim(in_dims[3], 0), q.dim())
    options = dict(scale=scale, enable_gqa=enable_gqa, dropout_seed=_one_seed(dropout_seed, in_dims[8]))
    return torch.ops.attnjourney.attention_forward(q, k, v, attn_mask, dropout_p, is_causal, **options), (0, 0)


def _vmap_backward(info, in_dims, *arguments):
    *tensors, dropout_p, is_causal, scale, enable_gqa, dropout_seed, need = arguments
    if dropout_seed is not None and in_dims[12] is None:
        return None
    tensors = [_to_front(x, d, info.batch_size) for x, d in zip(tensors, in_dims)]
    mask, rank = tensors[5], tensors[2].dim()
    tensors[5] = _align(mask, rank)
    options = dict(scale=scale, enable_gqa=enable_gqa, dropout_seed=_one_seed(dropout_seed, in_dims[12]), need=need)
    gradients = list(torch.ops.attnjourney.attention_backward(*tensors, dropout_p, is_causal, **options))
    if need & 8 and mask is not None:
        gradients[3] = gradients[3].reshape(mask.shape)
    return tuple(gradients), tuple(0 if need >> bit & 1 else None for bit in range(4))


_attention = register(
    "attention",
    fake=_fake,
    vmap=(_vmap_forward, _vmap_backward),
    autocast=("query", "key", "value", "attn_mask"),
    flops=_flops,
)
