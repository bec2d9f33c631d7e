"""The node tests of ONNX's Attention: every output that attnjourney has, against the numbers in the onnx wheel."""

import math

import pytest
import torch

import attnjourney
from tests.support.onnx_nodes import node_cases

# qk_matmul_output is the whole matrix of scores where its mode is 0 (scaled), 1 (capped) or 2 (with the mask): a fused
# operator does not have it, and gives only the weights (mode 3). The other outputs of these nodes are checked.
SCORES_NOT_GIVEN = {
    "test_attention_4d_with_qk_matmul": 0,
    "test_attention_4d_with_qk_matmul_bias": 2,
    "test_attention_4d_with_qk_matmul_softcap": 1,
    "test_attention_4d_with_past_and_present_qk_matmul_bias": 2,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask": 2,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask": 2,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": 2,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": 2,
    "test_attention_4d_with_past_and_present_qk_matmul": 0,
    "test_attention_3d_with_past_and_present_qk_matmul": 0,
    "test_attention_3d_with_past_and_present_qk_matmul_bias": 2,
    "test_attention_3d_with_past_and_present_qk_matmul_softcap": 1,
}
CASES = {case.name: case for case in node_cases("Attention", "attention")}


def call_of(case):
    """(query, key, value, arguments) of attnjourney.attention for a node."""
    given, attributes = case.inputs, case.attributes
    q, k, v = (given[name] for name in "QKV")
    if q.dim() == 3:  # (batch, length, heads * dim)
        heads = [attributes[f"{name}_num_heads"] for name in ("q", "kv", "kv")]
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), heads))
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k, v = (torch.cat([given[f"past_{name}"], x], 2) for name, x in (("key", k), ("value", v)))
    lengths = given.get("nonpad_kv_seqlen")
    mask = given.get("attn_mask")
    if mask is not None:
        mask = mask[None] if mask.dim() == 1 else mask
        hidden = False if mask.dtype == torch.bool else -math.inf
        if mask.shape[-1] not in (1, k.shape[2]):  # a short mask hides the keys that it does not name
            mask = torch.nn.functional.pad(mask, (0, k.shape[2] - mask.shape[-1]), value=hidden)
    # ONNX counts positions from the end of the past, or from what a row's own length leaves before the query
    rows = q.shape[2]
    if past and past + rows != k.shape[2]:  # neither alignment: rows in front bring the query to its position
        q = torch.cat([q.new_zeros(*q.shape[:2], past, q.shape[3]), q], 2)
        if mask is not None and mask.shape[-2] > 1:
            mask = torch.nn.functional.pad(mask, (0, 0, past, 0), value=hidden)
    arguments = dict(
        attn_mask=mask,
        is_causal=bool(attributes.get("is_causal", 0)),
        scale=attributes.get("scale"),
        enable_gqa=True,
        causal_alignment="bottom_right" if lengths is not None or past + rows == k.shape[2] else "top_left",
        window_size=(attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)),
        key_lengths=lengths,
        softcap=attributes.get("softcap", 0.0),
    )
    return q, k, v, arguments, rows


def close(actual, expected):
    # ONNX's own bound, or two ulp of what its reference rounds: scores and weights in 16 bits
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=max(1e-3, 2 * eps), atol=max(1e-6, 2 * eps), equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_node(name):
    case = CASES[name]
    q, k, v, arguments, rows = call_of(case)
    out = attnjourney.attention(q, k, v, **arguments)[:, :, -rows:]
    expected = case.outputs[0]
    close(out.transpose(1, 2).flatten(2) if expected.dim() == 3 else out, expected)
    if "past_key" in case.inputs:
        assert torch.equal(k, case.outputs[1]) and torch.equal(v, case.outputs[2])
    mode = case.attributes.get("qk_matmul_output_mode", 0)
    if mode == 3:
        close(attnjourney.attention_weights(q, k, **arguments)[:, :, -rows:], case.outputs[-1])
    else:
        scores = len(case.outputs) > (3 if "past_key" in case.inputs else 1)
        assert scores == (name in SCORES_NOT_GIVEN) and (not scores or SCORES_NOT_GIVEN[name] == mode)


def test_every_node_is_run():
    assert len(CASES) >= 87 and set(SCORES_NOT_GIVEN) <= set(CASES)
