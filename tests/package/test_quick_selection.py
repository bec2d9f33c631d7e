"""The quick tests: what they must call is all there is, and what they do not call is named."""

import ast

import pytest
import torch

import attnjourney
from tests.conftest import TESTS
from tests.support import quick


def test_everything_there_is_is_required():
    required = quick.required()
    assert set(quick.operators()) - quick.UNREACHED <= required
    assert {"attention_backward_jvp", "kv_cache_append", "linear_attention_backward", "rope_"} <= required
    assert {f"attention with {name}" for name in ("attn_mask", "softcap", "sinks", "window_size")} <= required
    assert {"PagedKVCache", "MultiheadAttention", "InfiniAttention"} <= required


@pytest.mark.parametrize("without", ["attention_jvp", "decode in float16", "attention with sinks", "KVCache"])
def test_what_is_missing_is_named(without):
    assert quick.missing(quick.required() - {without}) == [without]


def test_calls_are_seen_with_their_dtype_and_options():
    seen = set()
    x = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    with quick.recorded(seen):
        attnjourney.attention(x, x, x, softcap=2.0, sinks=torch.zeros(2, dtype=torch.bfloat16)).sum().backward()
        attnjourney.KVCache(1, 2, 8, 4)
    assert {"attention", "attention_backward", "attention in bfloat16", "attention with softcap", "KVCache"} <= seen
    assert "attention with sinks" in seen
    assert not {"decode", "attention in float32", "attention with scale", "WindowCache"} & seen


def test_the_list_names_tests():
    for file, tests in quick.QUICK.items():
        tree = ast.parse((TESTS / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(tests) <= there, f"{file} has no {set(tests) - there}"
