"""The node LinearAttention of opset 27, or products that stand for it."""

from __future__ import annotations

from typing import Any

import onnx
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Op, Opset

from ._shapes import FLOAT, ints, repeat_heads, scalar, size

IDENTITY, RELU, ELU = 0, 1, 2
DOMAIN, EXPORTED, OPSET = (
    "attnjourney",
    25,
    27,
)  # of the node until `with_linear_attention`; the opsets before and after


def with_linear_attention(program: Any) -> Any:
    """The nodes LinearAttention of a torch.onnx.ONNXProgram, in place; returns it. torch's exporter stops at opset 25,
    so these wait in a domain of their own. Of the operators that torch exports none differs between 25 and 27 but by
    dtypes that were added.

    Raises:
        ValueError: the program has another opset than 25 or 26.
    """
    imports = program.model.opset_imports
    if imports[""] not in (EXPORTED, EXPORTED + 1):
        raise ValueError(f"program: expected opset_version=25 at its export, got {imports['']}")
    for node in program.model.graph.all_nodes():
        if node.domain == DOMAIN:
            node.domain, node.version = "", OPSET
    imports.pop(DOMAIN, None)
    imports[""] = OPSET
    return program


def _waiting() -> Op:
    """LinearAttention in our domain."""
    standard = onnx.defs.get_schema("LinearAttention", OPSET, "")
    types = [(t.type_param_str, list(t.allowed_type_strs), t.description) for t in standard.type_constraints]
    schema = onnx.defs.OpSchema(
        standard.name, DOMAIN, 1, inputs=list(standard.inputs), outputs=list(standard.outputs), type_constraints=types,
        attributes=list(standard.attributes.values()),
    )  # fmt: skip
    return Op(Opset(DOMAIN, 1), standard.name, schema)


def linear_attention(
    has_node: bool, query: Any, key: Any, value: Any, key_padding_mask: Any = None, initial_state: Any = None,
    initial_normalizer: Any = None, *, feature_map: int = ELU, is_causal: bool = True, scale: float = 1.0,
    normalize: bool = True, eps: float = 1e-6,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Out, denominator, state and normalizer of torch.ops.attnjourney.linear_attention_forward.

    The normalizer is one more column of the values: ones, whose sums of keys are what it is.
    """
    given, heads, key_heads = query, int(query.shape[1]), int(key.shape[1])
    wide = query.dtype.name == "DOUBLE"
    query, key, value = (x if wide else op.Cast(x, to=FLOAT) for x in (query, key, value))
    q, k = _features(query, feature_map), _features(key, feature_map)
    one, zero = op.CastLike(1.0, q), op.CastLike(0.0, q)
    if normalize:
        value = _with_ones(value, one)
    if key_padding_mask is not None:
        hidden = op.Unsqueeze(key_padding_mask, [1, 3])  # (B, 1, S, 1)
        k, value = op.Where(hidden, zero, k), op.Where(hidden, zero, value)
    state = None
    if initial_state is not None:
        column = initial_normalizer
        state = initial_state
        if normalize:
            column = op.Mul(op.ReduceSum(state, ints(-1), keepdims=0), zero) if column is None else column
            state = op.Concat(state, op.Unsqueeze(column, [-1]), axis=-1)
    if has_node and is_causal and not wide and scale != 0:
        out, state = _node(q, k, value, state, scale, heads, key_heads)
    else:
        out, state = _products(op.Mul(q, op.CastLike(scale, q)), k, value, state, is_causal, heads, key_heads)
    if not normalize:
        return op.CastLike(out, given), out, state, out
    last, all_but_last = ints(-1), (ints(0), ints(-1), ints(-1))
    denominator = op.Add(op.Slice(out, last, ints(2**31), ints(-1)), op.CastLike(eps, q))  # (B, H, L, 1)
    empty = op.Equal(denominator, zero)
    out = op.Div(op.Slice(out, *all_but_last), op.Where(empty, one, denominator))
    out = op.Where(empty, zero, out)
    normalizer = op.Squeeze(op.Slice(state, last, ints(2**31), ints(-1)), ints(-1))
    return op.CastLike(out, given), op.Squeeze(denominator, ints(-1)), op.Slice(state, *all_but_last), normalizer


def _features(x: Any, feature_map: int) -> Any:
    if feature_map == RELU:
        return op.Relu(x)
    if feature_map == IDENTITY:
        return x
    zero = op.CastLike(0.0, x)
    return op.Where(op.Greater(x, zero), op.Add(x, op.CastLike(1.0, x)), op.Exp(op.Min(x, zero)))


def _with_ones(value: Any, one: Any) -> Any:
    """(B, H, S, Dv) -> (B, H, S, Dv + 1)."""
    shape = op.Concat(size(value, 0), size(value, 1), size(value, 2), ints(1), axis=0)
    return op.Concat(value, op.Expand(one, shape), axis=-1)


def _node(q: Any, k: Any, value: Any, state: Any, scale: float, heads: int, key_heads: int) -> tuple[Any, Any]:
    packed = [
        op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), op.Concat(size(x, 0), size(x, 2), ints(-1), axis=0))
        for x in (q, k, value)
    ]  # (B, L, H * D)
    out, state = _waiting()(
        *packed, state, q_num_heads=heads, kv_num_heads=key_heads, update_rule="linear", scale=scale
    )
    shape = op.Concat(size(q, 0), size(q, 2), ints(heads, -1), axis=0)
    return op.Transpose(op.Reshape(out, shape), perm=[0, 2, 1, 3]), state


def _products(q: Any, k: Any, value: Any, state: Any, is_causal: bool, heads: int, key_heads: int) -> tuple[Any, Any]:
    """With rows times keys of weights where causal."""
    added = op.MatMul(op.Transpose(k, perm=[0, 1, 3, 2]), value)  # (B, Hk, D, Dv)
    total = added if state is None else op.Add(state, added)
    if not is_causal:
        return op.MatMul(q, repeat_heads(total, key_heads, heads)), total
    weights = op.MatMul(q, op.Transpose(repeat_heads(k, key_heads, heads), perm=[0, 1, 3, 2]))
    rows, keys = (op.Range(0, scalar(size(q, 2)), 1) for _ in range(2))
    seen = op.GreaterOrEqual(op.Unsqueeze(rows, [1]), op.Unsqueeze(keys, [0]))
    out = op.MatMul(op.Where(seen, weights, op.CastLike(0.0, q)), repeat_heads(value, key_heads, heads))
    if state is not None:
        out = op.Add(out, op.MatMul(q, repeat_heads(state, key_heads, heads)))
    return out, total
