"""Scaled dot-product attention, the core operator: torch.ops.attnjourney.attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ._attention_checks import alignment_index, check
from ._operator import draw_seed
from ._registration import LIBRARY, register

UNBOUNDED = (-1, -1)


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
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = UNBOUNDED,
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""softmax(scale * query key^T + mask) value per head, in O(L + S) memory; a drop-in for
    torch.nn.functional.scaled_dot_product_attention (Vaswani et al. 2017, arXiv 1706.03762; computed by the online
    softmax of FlashAttention, arXiv 2205.14135). All options compose, and all are differentiated,
    twice and in forward mode too, in the same memory.

    A row stands at position p = i, or i + S - L with causal_alignment="bottom_right" (with lengths: each sequence's
    own). It sees key j if j < prefix_length, or if causality (j <= p) and the window (p - left <= j <= p + right) allow
    it; and if j < key_length and attn_mask allow it. Scores: scale, softcap, then attn_mask and ALiBi.

    Args:
        query: (..., Hq, L, E). Any rank from 2; rank 3 has no batch dimension, rank 2 no heads either. float32,
            float64, bfloat16 or float16.
        key: (..., Hk, S, E), of query's rank and dtype. A batch or head dimension of size 1 broadcasts.
        value: (..., Hk, S, Ev); Ev may differ from E.
        attn_mask: broadcasts to (..., Hq, L, S). bool: True where a key may be attended to. Floating (query's dtype or
            float32): added to the scaled scores; -inf hides the key. Trainable: the gradient is summed in its shape.
        dropout_p: probability of dropping a weight, always applied: pass 0.0 in evaluation. The bits follow
            torch.manual_seed and depend on nothing else than the seed and the weight's position.
        is_causal: row position p sees keys 0 .. p.
        scale: 1 / sqrt(E) by default; may be 0 or negative.
        enable_gqa: Hq may be a multiple of Hk; query head h reads key/value head h // (Hq / Hk).
        causal_alignment: "top_left", as torch's own function, or "bottom_right". Also shifts the window and ALiBi.
        window_size: (left, right), both ends inclusive; -1 is unbounded. Time follows the window.
        prefix_length: the first keys, visible whatever causality and window say.
        key_lengths, query_lengths: (B,) int32 or int64, B the product of the batch dimensions. Keys beyond are never
            read; rows beyond give 0, lse -inf and no gradient.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118); 0 turns it off.
        sinks: (Hq,) or (B, Hq), float32 or query's dtype: one logit that joins each head's denominator (arXiv
            2309.17453; as trained in gpt-oss). Trainable.
        alibi_slopes: (Hq,) or (B, Hq), float32 or query's dtype: -slope * |p - j| is added (arXiv 2108.12409).
            Trainable.
        dropout_seed: int64 scalar: the bits of dropout. Drawn from torch's generator by default.
        return_lse: also return the logarithm of each row's denominator, differentiable.

    Returns:
        (..., Hq, L, Ev) in query's dtype, contiguous. A row that sees no key is 0 and gives no gradient.
        With return_lse also (..., Hq, L), float32 (float64 for float64), natural logarithm; -inf where a row sees no
        key (the sink, where there is one).

    Raises:
        ValueError: a shape, a length or a number that does not fit; names the argument, the expected and the given.
        RuntimeError: a dtype or a device that does not fit.
        NotImplementedError: differentiated three times, or twice in forward mode.
    """
    options = {"scale": scale, "enable_gqa": enable_gqa}  # and what is not the default: each one costs time
    if causal_alignment != "top_left":
        options["causal_alignment"] = alignment_index(causal_alignment)
    if window_size is not UNBOUNDED:
        options["window_size"] = window_size
    if prefix_length != 0:
        options["prefix_length"] = prefix_length
    if softcap != 0.0:
        options["softcap"] = softcap
    if key_lengths is not None:
        options["key_lengths"] = key_lengths
    if query_lengths is not None:
        options["query_lengths"] = query_lengths
    if sinks is not None:
        options["sinks"] = sinks
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if dropout_seed is not None:
        options["dropout_seed"] = dropout_seed
    operator = _attention_with_lse if return_lse else _attention
    return operator(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _fake(
    *,
    query,
    key,
    value,
    attn_mask,
    scale,
    enable_gqa,
    dropout_p,
    is_causal,
    causal_alignment,
    prefix_length,
    dropout_seed,
    **options,
):
    lead = check(query, key, value, attn_mask, scale, enable_gqa, **options)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    length = query.shape[-2]
    out = query.new_empty((*lead, length, value.shape[-1]))
    return out, query.new_empty((*lead, length), dtype=lse_dtype)


def _flops(*, query, key, value, **others):
    """As torch counts F.scaled_dot_product_attention: masks are ignored; all but the forward recompute the scores.
    Products that a missing tangent leaves out are not counted."""
    *lead, length, dim = query
    batch_heads = 1
    for d, n in enumerate(lead):
        batch_heads *= max(n, key[d], value[d])
    pairs = 2 * batch_heads * length * key[-2]
    q, k, v, grad = (others.get(f"{x}_tangent") is not None for x in ("query", "key", "value", "grad_out"))
    v_dim = value[-1]
    jvp = dim * (1 + q + k) + v_dim * (1 + v)
    backward_jvp = dim * (3 + 2 * q + 2 * k) + v_dim * (2 + v + 2 * grad)
    return tuple(pairs * n for n in (dim + v_dim, 3 * dim + 2 * v_dim, jvp, backward_jvp))


# ---- torch.func.vmap: the new dimension goes in front, as one more batch dimension. Inputs without it are expanded
# (stride 0), so that their gradients come out per sample. Dropout with randomness="different" is one call with one
# seed, whose bits differ by batch index; "same" needs the same bits for every sample: one call each (None).

_TENSORS = ("query", "key", "value", "attn_mask", "key_lengths", "query_lengths", "sinks", "alibi_slopes")


def _to_front(x: Tensor | None, in_dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return x.unsqueeze(0).expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)


def _align(mask: Tensor | None, rank: int) -> Tensor | None:
    """(batch, *dims) -> (batch, 1..., *dims) of that rank, as a mask broadcasts from the right."""
    if mask is None or mask.dim() >= rank:
        return mask
    return mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


def _per_head(x: Tensor | None, batch: int) -> Tensor | None:
    """(samples, heads) or (samples, batch, heads) -> (samples * batch, heads)."""
    if x is None:
        return None
    return (x.unsqueeze(1).expand(-1, batch, -1) if x.dim() == 2 else x).flatten(0, 1)


def _fold(info, in_dims: dict, call: dict, expand: bool) -> tuple[dict, int] | None:
    """The arguments of one call over all samples, by name, and a sample's batch size; None: a call a sample."""
    seed = call["dropout_seed"]
    if seed is not None:
        if in_dims["dropout_seed"] is None:
            return None
        call["dropout_seed"] = seed.select(in_dims["dropout_seed"], 0)
    for name in _TENSORS:
        if name != "attn_mask" or expand or in_dims[name] is not None:
            call[name] = _to_front(call[name], in_dims[name], info.batch_size)
    query, key, value = call["query"], call["key"], call["value"]
    if expand or in_dims["attn_mask"] is not None:
        call["attn_mask"] = _align(call["attn_mask"], query.dim())
    batch = 1
    for sizes in zip(query.shape[1:-3], key.shape[1:-3], value.shape[1:-3]):
        batch *= next((n for n in sizes if n != 1), 1)
    for name in ("key_lengths", "query_lengths"):
        if call[name] is not None:
            call[name] = call[name].flatten()
    for name in ("sinks", "alibi_slopes"):
        call[name] = _per_head(call[name], batch)
    return call, batch


def _vmap_forward(info, in_dims, *arguments):
    operator = torch.ops.attnjourney.attention_forward.default
    names = [a.name for a in operator._schema.arguments]
    folded = _fold(info, dict(zip(names, in_dims)), dict(zip(names, arguments)), expand=False)
    return folded and (operator(**folded[0]), (0, 0))


def _fold_all(operator, info, in_dims, arguments) -> tuple[dict, int] | None:
    """_fold, with results, gradients and tangents folded alike."""
    names = [a.name for a in operator._schema.arguments]
    in_dims, call = dict(zip(names, in_dims)), dict(zip(names, arguments))
    folded = _fold(info, in_dims, call, expand=True)
    if folded is None:
        return None
    call, batch = folded
    rank = call["query"].dim()
    for name in names:
        base = name.removesuffix("_tangent")
        if base in ("grad_out", "grad_lse", "out", "lse") or (base != name and base in _TENSORS):
            call[name] = _to_front(call[name], in_dims[name], info.batch_size)
            if base == "attn_mask":
                call[name] = _align(call[name], rank)
            elif base in ("sinks", "alibi_slopes"):
                call[name] = _per_head(call[name], batch)
    return call, batch


def _vmap_jvp(info, in_dims, *arguments):
    operator = torch.ops.attnjourney.attention_jvp.default
    folded = _fold_all(operator, info, in_dims, arguments)
    return folded and (operator(**folded[0]), (0, 0))


def _vmap_gradients(operator, info, in_dims, *arguments):
    names = [a.name for a in operator._schema.arguments]
    given, dims = dict(zip(names, arguments)), dict(zip(names, in_dims))
    shapes = {
        name: _to_front(given[name], dims[name], info.batch_size).shape
        for name in ("attn_mask", "sinks", "alibi_slopes")
        if given[name] is not None
    }
    folded = _fold_all(operator, info, in_dims, arguments)
    if folded is None:
        return None
    call, batch = folded
    gradients = list(operator(**call))
    need = call["need"]
    for bit, name in ((3, "attn_mask"), (4, "sinks"), (5, "alibi_slopes")):
        if need >> bit & 1 and name in shapes:
            shape = shapes[name]
            if name != "attn_mask" and len(shape) == 2:  # one for all of a sample's batch
                gradients[bit] = gradients[bit].unflatten(0, (info.batch_size, batch)).sum(1)
            gradients[bit] = gradients[bit].reshape(shape)
    present = (True, True, True, *(name in shapes for name in ("attn_mask", "sinks", "alibi_slopes")))
    return tuple(gradients), tuple(0 if need >> bit & 1 and there else None for bit, there in enumerate(present))


_attention = register(
    "attention",
    fake=_fake,
    vmap=(
        _vmap_forward,
        partial(_vmap_gradients, torch.ops.attnjourney.attention_backward.default),
        _vmap_jvp,
        partial(_vmap_gradients, torch.ops.attnjourney.attention_backward_jvp.default),
    ),
    autocast=("query", "key", "value", "attn_mask"),
    flops=_flops,
)


def _with_lse(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    if dropout_p > 0 and options.get("dropout_seed") is None:
        options["dropout_seed"] = draw_seed(query)
    return torch.ops.attnjourney.attention_forward.default(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )


for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):  # attention_forward has all the kernels
    LIBRARY.impl("attention_with_lse", _with_lse, _key)
_attention_with_lse = torch.ops.attnjourney.attention_with_lse.default
