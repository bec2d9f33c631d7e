"""The node Attention, and the logarithm of its sums where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxscript.onnx_opset import opset23 as op

from ._shapes import FLOAT, ints, per_head, repeat_heads, scalar, size
from .masks import visible_keys


@dataclass
class _Call:
    """What the node is given: (B, H, L, E) each, and a floating mask with -inf where a key is hidden."""

    query: Any
    key: Any
    value: Any
    mask: Any  # (B or 1, H or 1, L, S), or None
    sees: Any  # bool (B or 1, H or 1, L, 1): whether a row sees a key; None where all do
    is_causal: bool  # where there is no mask
    scale: float | None
    softcap: float
    lead: Any  # the dimensions that were added
    heads: int
    key_heads: int
    dim: int
    wide: bool  # float64

    def out(self) -> Any:
        attributes = {"softcap": self.softcap} if self.scale is None else {"softcap": self.softcap, "scale": self.scale}
        if self.mask is None:
            out, _, _, _ = op.Attention(self.query, self.key, self.value, is_causal=int(self.is_causal), **attributes)
        else:
            out, _, _, _ = op.Attention(self.query, self.key, self.value, self.mask, **attributes)
            out = op.Where(self.sees, out, op.CastLike(0.0, self.query))
        return out if self.lead is None else op.Squeeze(out, self.lead)

    def lse(self) -> Any:
        """(B, H, L): the node's own sums are not among its results."""
        query, key = (x if self.wide else op.Cast(x, to=FLOAT) for x in (self.query, self.key))
        scale = self.dim**-0.5 if self.scale is None else self.scale
        key = repeat_heads(key, self.key_heads, self.heads)
        scores = op.Mul(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])), op.CastLike(scale, query))
        if self.softcap:
            cap = op.CastLike(self.softcap, query)
            scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
        scores = op.Add(scores, op.CastLike(self.mask, query))
        top = op.ReduceMax(scores, ints(-1), keepdims=1)
        top = op.Where(op.IsInf(op.Cast(top, to=FLOAT)), op.CastLike(0.0, top), top)  # a row that sees no key
        total = op.ReduceSum(op.Exp(op.Sub(scores, top)), ints(-1), keepdims=1)
        lse = op.Squeeze(op.Add(op.Log(total), top), ints(-1))
        return lse if self.lead is None else op.Squeeze(lse, self.lead)


def attention(*arguments: Any, **options: Any) -> Any:
    """Of torch.ops.attnjourney.attention."""
    return _prepared(*arguments, **options).out()


def attention_forward(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Out and lse; what nobody reads of them the exporter leaves out. The third result is for derivatives alone."""
    call = _prepared(*arguments, needs_mask=True, **options)
    return _prepared(*arguments, **options).out(), call.lse()


def _prepared(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: tuple[int, int] = (-1, -1), prefix_length: int = 0, key_lengths: Any = None,
    query_lengths: Any = None, softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
    origin: tuple[int, ...] = (0, 0, 0, 0), dropout_seed: Any = None, needs_mask: bool = False,
    key_heads: int | None = None, has_bool_mask: bool | None = None,
) -> _Call:  # fmt: skip
    """Rank 2 and 3 are made (B, H, L, E). Without dropout. Of a value between nodes only the caller knows key_heads and
    has_bool_mask."""
    if dropout_p > 0:
        raise ValueError(f"dropout_p: expected 0 in an exported program, got {dropout_p}: export the model in eval()")
    if any(origin):
        raise ValueError(f"origin: expected zeros in an exported program, got {tuple(origin)}")
    rank = len(query.shape)
    if rank > 4:
        raise ValueError(f"query: expected at most 4 dimensions for ONNX, got {rank}")
    lead = ints(*range(4 - rank)) if rank < 4 else None
    heads = int(query.shape[-3]) if rank > 2 else 1
    if key_heads is None:
        key_heads = int(key.shape[-3]) if rank > 2 else 1
    if has_bool_mask is None:
        has_bool_mask = attn_mask is not None and attn_mask.dtype.name == "BOOL"
    facts = {"heads": heads, "key_heads": key_heads, "dim": int(query.shape[-1]), "wide": query.dtype.name == "DOUBLE"}
    if lead is not None:
        query, key, value = (op.Unsqueeze(x, lead) for x in (query, key, value))
    options = (window_size[0], window_size[1], prefix_length, key_lengths, query_lengths, sinks, alibi_slopes)
    plain = attn_mask is None and not causal_alignment and options == (-1, -1, 0, None, None, None, None)
    if plain and not needs_mask:
        return _Call(query, key, value, None, None, is_causal, scale, softcap, lead, **facts)
    visible, distance = visible_keys(
        scalar(size(query, 2)), scalar(size(key, 2)), is_causal, causal_alignment, window_size, prefix_length,
        key_lengths, query_lengths,
    )  # fmt: skip
    bias = None
    if attn_mask is not None and has_bool_mask:
        visible = op.And(visible, attn_mask)
    elif attn_mask is not None:
        bias = op.CastLike(attn_mask, query)
        visible = op.And(visible, op.Not(op.IsInf(op.Cast(attn_mask, to=FLOAT), detect_positive=0)))
    if alibi_slopes is not None:
        slope = op.Mul(op.CastLike(per_head(alibi_slopes), query), op.CastLike(distance, query))
        bias = op.Neg(slope) if bias is None else op.Sub(bias, slope)
    bias = op.CastLike(0.0, query) if bias is None else bias
    mask = op.Where(visible, bias, op.CastLike(float("-inf"), query))  # (B or 1, H or 1, L, S)
    sees = op.Greater(op.ReduceMax(op.Cast(visible, to=FLOAT), ints(-1), keepdims=1), 0.0)
    if sinks is not None:  # one more key: zeros, whose score is the logit that joins
        key, value = (op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0]) for x in (key, value))
        logit = op.CastLike(per_head(sinks), query)
        rows = op.Concat(size(query, 0), size(query, 1), size(query, 2), ints(1), axis=0)
        wide = op.Concat(size(query, 0), size(query, 1), size(mask, 2), size(mask, 3), axis=0)
        mask = op.Concat(op.Expand(mask, wide), op.Expand(logit, rows), axis=-1)
    return _Call(query, key, value, mask, sees, False, scale, softcap, lead, **facts)
