"""Random shapes, layouts and combinations of options: forward and every gradient by the rule, always the same ones."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnjourney import reference
from tests.attention.test_fuzz import FIXED, ULPS, coin, strided, valid_call
from tests.support.plain import expand_heads
from tests.support.testing import check_attention, random_tensor, threads

edges = st.sampled_from([-1, -1, 0, 1, 2, 5, 17, 40, 100])


@st.composite
def optional(draw, strategy, default=None, rarely=2):
    return draw(strategy) if draw(st.integers(0, rarely)) == 0 else default


@st.composite
def call_with_options(draw):
    """(query, key, value, mask, options) that must be accepted, in any layout."""
    q, k, v, mask, options = draw(valid_call())
    *batch, heads, q_len, _ = ([1] * 4 + list(expand_heads(q, k, v, options["enable_gqa"])[0].shape))[
        -max(4, q.dim()) :
    ]
    items, kv_len = math.prod(batch), k.size(-2)
    options["causal_alignment"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    options["window_size"] = draw(optional(st.tuples(edges, edges), (-1, -1)))
    options["prefix_length"] = draw(optional(st.sampled_from([1, 3, 16, 70, 200]), 0))
    for name, most in (("key_lengths", kv_len), ("query_lengths", q_len)):
        lengths = draw(optional(st.lists(st.integers(0, most), min_size=items, max_size=items), rarely=3))
        if lengths is not None:
            options[name] = torch.tensor(lengths, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    options["softcap"] = draw(optional(st.sampled_from([0.5, 2.0, 30.0]), 0.0))
    number = st.sampled_from([torch.float32, q.dtype])
    if draw(st.integers(0, 2)) == 0:
        options["sinks"] = draw(strided((heads,), draw(number), 6))
        if heads and draw(st.integers(0, 3)) == 0:
            options["sinks"] = options["sinks"].clone()
            options["sinks"][0] = draw(st.sampled_from([-math.inf, -300.0, 80.0]))
    if draw(st.integers(0, 2)) == 0:
        shape = (items, heads) if draw(coin) else (heads,)
        options["alibi_slopes"] = draw(strided(shape, draw(number), 7)) / 8
    if draw(st.integers(0, 3)) == 0:
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
    return q, k, v, mask, options


@settings(FIXED, max_examples=150)
@given(call_with_options(), coin, st.integers(1, 3))
def test_values_and_gradients(call, with_lse, count):
    q, k, v, mask, options = call
    shape = expand_heads(q, k, v, options["enable_gqa"])[0].shape[:-1]
    grad_out = random_tensor((*shape, v.size(-1)), q.dtype, 8)
    grad_lse = None
    if with_lse:
        grad_lse = random_tensor(shape, torch.float64 if q.dtype == torch.float64 else torch.float32, 9)
    if "dropout_p" in options:
        *batch, heads, q_len = ([1] * 3 + list(shape))[-max(3, len(shape)) :]
        sizes = (math.prod(batch), heads, q_len, k.size(-2))
        keep = reference.dropout_keep_mask(5, *sizes, options["dropout_p"]).view(*shape, k.size(-2))
        options = dict(options, keep=keep, dropout_seed=5)
    with threads(count):
        check_attention(q, k, v, mask, grad_out=grad_out, grad_lse=grad_lse, ulps=ULPS, **options)
