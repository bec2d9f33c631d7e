"""torch.ops.attnjourney.decode: values by the tolerance rule, ragged lengths, windows, paged and ring caches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnjourney
from tests.support.decode_checks import assert_decoded, check_decode, dense_cache, paged, visible
from tests.support.testing import DTYPES, LAYOUTS, pairs, poison_memory, random_tensor, row_id, threads

DECODE = torch.ops.attnjourney.decode

CASES = pairs(
    dtype=DTYPES,
    heads=[(1, 1), (2, 1), (6, 2), (5, 1), (8, 1), (9, 1)],
    q_len=[1, 2, 3, 8, 16, 17],
    dim=[(64, 64), (128, 128), (80, 40), (33, 17), (8, 8), (24, 100), (256, 64)],
    lengths=[[1], [97, 5, 40], [300, 0]],
    options=[
        {},
        {"is_causal": False},
        {"window_size": (20, -1)},
        {"window_size": (3, 2), "is_causal": False, "scale": 0.3},
    ],
)


@pytest.mark.parametrize("row", CASES, ids=row_id)
def test_values(row):
    (heads, kv_heads), (dim, v_dim) = row["heads"], row["dim"]
    check_decode(
        row["q_len"], row["lengths"], heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim, dtype=row["dtype"],
        capacity=max(row["lengths"]) + 9, **row["options"],
    )  # fmt: skip


def test_more_rows_than_one_item_takes():
    """140 heads on one key head: two blocks of rows; 16 rows for each of 9 heads: 144."""
    for dtype in DTYPES:
        check_decode(1, [300, 7], heads=140, kv_heads=1, dim=24, dtype=dtype)
    check_decode(16, [70], heads=9, kv_heads=1)


@pytest.mark.parametrize("length", (512, 513, 601, 1026, 4096, 5001))
def test_one_row_past_a_chunk_of_keys_equals_the_last_row_of_full_causal(length):
    """The causal limit where the key axis is split."""
    q, k, v = (random_tensor((1, 2, length, 16), torch.float64, i) for i in range(3))
    full = attnjourney.attention(q, k, v, is_causal=True)[:, :, -1:]
    out = DECODE(q[:, :, -1:], k, v, torch.tensor([length]))[0]
    torch.testing.assert_close(out, full, atol=1e-12, rtol=1e-12)
    check_decode(1, [length], dim=16)


def test_every_small_number_of_rows_and_keys():
    for q_len in range(1, 9):
        lengths = [*range(q_len % 4 + 1, 36, 4), 63, 64, 65, 130]
        check_decode(q_len, lengths, heads=2, kv_heads=1, dim=96 if q_len % 2 else 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("junk", (1e4, math.nan, math.inf))
def test_junk_behind_the_cursor_is_not_read(dtype, junk):
    for capacity in (32, 64):
        for length in (5, 16, 31):
            key, value = dense_cache([length], 2, capacity, 32, 32, dtype, junk=junk)
            query = random_tensor((1, 4, 2, 32), dtype, 7)
            out = DECODE(query, key, value, torch.tensor([length]))
            cropped = DECODE(query, key[:, :, :length], value[:, :, :length], torch.tensor([length]))
            assert torch.equal(out[0], cropped[0]) and torch.equal(out[1], cropped[1])


@pytest.mark.parametrize("q_len", (3, 20))
@pytest.mark.parametrize("what", ("key", "value"))
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(q_len, what):
    length = 70
    key, value = dense_cache([length], 1, length, 32, 32, torch.float32)
    (key if what == "key" else value)[0, 0, -2] = math.nan  # seen by the last two rows
    for window, hidden in (((-1, -1), q_len - 2), ((0, -1), q_len - 2)):
        out = DECODE(random_tensor((1, 2, q_len, 32), seed=3), key, value, torch.tensor([length]), window_size=window)[
            0
        ]
        assert out[0, :, :hidden].isfinite().all() and out[0, :, hidden].isnan().all()
        assert out[0, :, -1].isnan().all() == (window[0] != 0)


def test_rows_that_see_nothing():
    """More query rows than keys: the first rows stand before the sequence."""
    for q_len in (5, 40):
        out, lse = check_decode(q_len, [3, 0], capacity=8)
        assert (out[0, :, : q_len - 3] == 0).all() and (lse[0, :, : q_len - 3] == -math.inf).all()
        assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_row_that_sees_one_key_returns_its_value(dtype):
    key, value = dense_cache([40], 1, 40, 64, 64, dtype)
    out = DECODE(random_tensor((1, 3, 1, 64), dtype), key, value, torch.tensor([40]), window_size=(0, -1))[0]
    assert torch.equal(out, value[:, :, -1:].expand_as(out))


@pytest.mark.parametrize("winner", (123, 290))
@pytest.mark.parametrize("scores", (3e4, -3e4))
def test_large_scores(scores, winner):
    """Scores far from 0, and keys whose weight underflows: no NaN, and the largest score wins."""
    key, value = torch.zeros(1, 1, 300, 8), random_tensor((1, 1, 300, 8))
    key[..., 0] = scores
    key[0, 0, winner, 0] = scores + 1e3
    out, lse = DECODE(torch.eye(8)[:1].view(1, 1, 1, 8), key, value, torch.tensor([300]), scale=1.0)
    torch.testing.assert_close(out[0, 0, 0], value[0, 0, winner], rtol=3e-7, atol=0)
    torch.testing.assert_close(lse.item(), scores + 1e3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    query, key, value = (random_tensor((2, 2, n, 32), seed=i, layout=layout) for i, n in enumerate((2, 90, 90)))
    lengths = torch.tensor([90, 33])
    if key.stride(-1) != 1:  # a copy of a whole cache must not happen behind one's back
        with pytest.raises(ValueError, match="key: expected a dense last dimension"):
            DECODE(query, key, value, lengths)
        key, value = key.contiguous(), value.contiguous()
    dense = DECODE(query.contiguous(), key.contiguous(), value.contiguous(), lengths)
    for a, b in zip(DECODE(query, key, value, lengths), dense):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", (1, 5, 16, 300))
@pytest.mark.parametrize("q_len", (1, 4, 30))
def test_paged(q_len, block_size, dtype):
    lengths = [77, 0, 299]
    key, value = dense_cache(lengths, 2, 300, 32, 16, dtype)
    key_blocks, value_blocks, table = paged(key, value, lengths, block_size)
    query = random_tensor((3, 4, q_len, 32), dtype, 7)
    keys, values = ([x[b, :, :n] for b, n in enumerate(lengths)] for x in (key, value))
    for options in ({}, {"window_size": (40, -1)}):
        out, lse = DECODE(query, key_blocks, value_blocks, torch.tensor(lengths), block_table=table, **options)
        assert_decoded(out, lse, query, keys, values, label=f"[block size {block_size}]", **options)


@pytest.mark.parametrize("q_len", (1, 3, 20))
def test_ring(q_len):
    capacity, lengths, window = 40, [13, 40, 100], (17, -1)
    key, value = dense_cache(lengths, 2, 100, 32, 32, torch.float32)
    rings = [x.new_full((3, 2, capacity, 32), math.nan) for x in (key, value)]
    for b, n in enumerate(lengths):
        for j in range(max(0, n - capacity), n):
            for ring, x in zip(rings, (key, value)):
                ring[b, :, j % capacity] = x[b, :, j]
    query = random_tensor((3, 4, q_len, 32), seed=7)
    out, lse = DECODE(query, *rings, torch.tensor(lengths), ring=True, window_size=window)
    keys, values = ([x[b, :, :n] for b, n in enumerate(lengths)] for x in (key, value))
    assert_decoded(out, lse, query, keys, values, window_size=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_number_of_threads(dtype):
    key, value = dense_cache([9000, 100], 1, 9000, 16, 16, dtype)
    for q_len in (1, 3, 40):
        query, lengths = random_tensor((2, 3, q_len, 16), dtype, 7), torch.tensor([9000, 100])
        results = []
        for count in (1, 2, 5):
            with threads(count):
                results.append(DECODE(query, key, value, lengths))
        assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0]))


def test_every_element_is_written():
    for _ in range(20):
        poison_memory(1)
        check_decode(1, [2, 5, 0], heads=9, kv_heads=3, dim=64)


def test_lse_of_two_parts_merges_to_the_whole():
    query, key, value = (
        random_tensor((1, 2, 1, 128)),
        random_tensor((1, 2, 16, 128), seed=1),
        random_tensor((1, 2, 16, 128), seed=2),
    )
    whole, _ = DECODE(query, key, value, torch.tensor([16]))
    parts = [
        DECODE(query, key[:, :, a:b], value[:, :, a:b], torch.tensor([b - a])) for a, b in ((0, 6), (6, 16), (16, 16))
    ]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = sum(w.unsqueeze(-1) * out for w, (out, _) in zip(weights, parts))
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(st.data())
def test_any_call(data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    left, right = draw(st.integers(-1, 30)), draw(st.integers(-1, 5))
    check_decode(
        draw(st.integers(1, 20)), lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=draw(st.integers(1, 70)),
        v_dim=draw(st.integers(1, 70)), dtype=draw(st.sampled_from(DTYPES)), is_causal=draw(st.booleans()),
        window_size=(left, right), capacity=max([1, *lengths]) + draw(st.integers(0, 3)),
    )  # fmt: skip


def test_zero_sizes():
    for batch, heads, rows in ((0, 2, 1), (2, 0, 1), (2, 2, 0)):
        q, k = torch.zeros(batch, heads, rows, 8), torch.zeros(batch, heads, 4, 8)
        out, lse = DECODE(q, k, k, torch.zeros(batch, dtype=torch.int64))
        assert out.shape == q.shape and lse.shape == q.shape[:3]


def test_the_reference_sees_what_the_mask_of_the_tests_says():
    q, k, v = (random_tensor((1, 2, n, 8), torch.float64, i) for i, n in enumerate((3, 9, 9)))
    for options in ({}, {"window_size": (2, -1)}, {"window_size": (2, 1), "is_causal": False}):
        ours = attnjourney.reference.decode(q, k, v, torch.tensor([9]), **options)
        plain = attnjourney.reference.attention(q, k, v, visible(3, 9, **options))
        torch.testing.assert_close(ours, plain)


GOOD = dict(
    query=torch.zeros(2, 4, 1, 8), key=torch.zeros(2, 2, 10, 8), value=torch.zeros(2, 2, 10, 6),
    lengths=torch.tensor([3, 4]),
)  # fmt: skip
TABLE = torch.zeros(2, 1, dtype=torch.int32)
BAD = {
    "query: expected 4": dict(query=torch.zeros(4, 1, 8)),
    "key: expected a head count": dict(query=torch.zeros(2, 3, 1, 8)),
    "key: expected the head_dim": dict(query=torch.zeros(2, 4, 1, 7)),
    "key: expected the batch size": dict(query=torch.zeros(3, 4, 1, 8)),
    "value: expected the shape of key": dict(value=torch.zeros(2, 2, 9, 6)),
    "key: expected the dtype": dict(key=torch.zeros(2, 2, 10, 8).double()),
    "query: expected dtype": dict(query=torch.zeros(2, 4, 1, 8, dtype=torch.int32)),
    "lengths: expected shape": dict(lengths=torch.tensor([3])),
    "lengths: expected dtype": dict(lengths=torch.tensor([3, 4], dtype=torch.int32)),
    "lengths: expected numbers from 0 to the cache's capacity, 10, got 11 for batch row 1": dict(
        lengths=torch.tensor([3, 11])
    ),
    "lengths: expected numbers from 0 .* got -1": dict(lengths=torch.tensor([-1, 3])),
    "block_table: expected shape": dict(block_table=TABLE[:1]),
    "block_table: expected dtype": dict(block_table=TABLE.long()),
    "block_table: expected blocks from 0 to 1, got 2 at": dict(block_table=TABLE + 2),
    "block_table: expected blocks from 0 to 1, got -1 at": dict(block_table=TABLE - 1),
    "lengths: .* capacity, 10, got 12": dict(block_table=TABLE, lengths=torch.tensor([12, 0])),
    "scale: expected a finite": dict(scale=math.nan),
    "window_size: expected two numbers of at least -1": dict(window_size=(-2, 0)),
    "window_size: expected left": dict(ring=True),
    "ring: expected False": dict(ring=True, block_table=TABLE, window_size=(1, 0)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    arguments = {**GOOD, **BAD[message]}
    with pytest.raises(RuntimeError if "dtype" in message else ValueError, match=message):
        DECODE(**arguments)
    DECODE(**GOOD)


def test_grad_is_refused_only_while_recording():
    query = GOOD["query"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="query: expected a tensor that does not require grad"):
        DECODE(**{**GOOD, "query": query})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not DECODE(**{**GOOD, "query": query})[0].requires_grad


@pytest.mark.parametrize(
    "extra", ({}, {"block_table": torch.tensor([[1], [0]], dtype=torch.int32)}), ids=("dense", "paged")
)
def test_opcheck(extra):
    torch.library.opcheck(DECODE.default, (), {**GOOD, **extra})


def test_compile_and_dynamic_shapes():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(query, key, value, lengths):
        return attnjourney.decode(query * 2, key, value, lengths, window_size=(5, -1)) + 1

    for batch, rows, capacity in ((1, 1, 9), (2, 3, 20), (3, 2, 11)):
        query, lengths = random_tensor((batch, 4, rows, 8)), torch.arange(batch) + 7
        key, value = random_tensor((batch, 2, capacity, 8), seed=1), random_tensor((batch, 2, capacity, 8), seed=2)
        expected = attnjourney.decode(query * 2, key, value, lengths, window_size=(5, -1)) + 1
        assert torch.equal(step(query, key, value, lengths), expected)


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        DECODE(**GOOD)
    assert counter.get_total_flops() == 2 * 2 * 4 * 10 * (8 + 6)
