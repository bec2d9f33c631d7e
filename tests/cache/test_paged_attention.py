"""varlen_attention with a block_table: packed rows of any lengths over paged caches, beside each sequence alone."""

import math

import pytest
import torch

import attnjourney
from attnjourney import PagedKVCache, reference
from attnjourney.reference.attention import packed_blocks
from tests.attention.test_varlen import OPTIONS, offsets, plain_varlen
from tests.support.decode_checks import dense_cache, paged
from tests.support.testing import (
    DTYPES,
    OUTPUT_FACTOR,
    ULPS,
    assert_close_to_reference,
    pairs,
    poison_memory,
    random_tensor,
    row_id,
    threads,
)

PAGED = torch.ops.attnjourney.paged_attention
Q_LENGTHS, K_LENGTHS = (1, 0, 40, 3, 70, 2), (130, 5, 40, 0, 97, 20)


def make(dtype, block_size, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, heads=(4, 2), dims=(24, 17), extra=0):
    """(query, caches whose unused rows are NaN), arguments."""
    capacity = max([*k_lengths, 1])
    caches = dense_cache(k_lengths, heads[1], capacity, *dims, dtype)
    key, value, table = paged(*caches, k_lengths, block_size)
    query = random_tensor((sum(q_lengths) + extra, heads[0], dims[0]), dtype, 7)
    ends = dict(cu_seqlens_q=offsets(q_lengths), cu_seqlens_k=offsets(k_lengths, torch.int32))
    return (query, key, value), {**ends, "block_table": table}


def packed(tensors, arguments):
    """The same call of keys that lie one after the other."""
    query, key, value = tensors
    arguments = dict(arguments)
    table = arguments.pop("block_table")
    return (query, *(packed_blocks(x, arguments["cu_seqlens_k"], table) for x in (key, value))), arguments


def assert_right(actual, tensors, arguments, label="", rows=slice(None)):
    """The tolerance rule for (out, lse) of a call, or for some rows of them."""
    __tracebackhide__ = True
    tensors, arguments = packed(tensors, arguments)
    exact = reference.varlen_attention(*(x.double() for x in tensors), **arguments, return_lse=True)
    plain, rounding = plain_varlen(tensors, arguments, [torch.zeros_like(x) for x in actual], ULPS)
    for i, (name, x) in enumerate(zip(("out", "lse"), actual)):
        assert x.dtype == plain[i].dtype
        at = rows if name == "out" else (slice(None), rows)
        ours, theirs, truth, allowed = (y[at] for y in (x, plain[i], exact[i], rounding[i]))
        assert_close_to_reference(ours, theirs, truth, OUTPUT_FACTOR, f"{name} {label}", allowed)


def check(tensors, arguments, label=""):
    __tracebackhide__ = True
    poison_memory()
    actual = attnjourney.varlen_attention(*tensors, **arguments, return_lse=True)
    assert_right(actual, tensors, arguments, label)
    return actual


@pytest.mark.parametrize(
    "row",
    pairs(
        option=[name for name in OPTIONS if name != "dropout"],
        dtype=DTYPES,
        block_size=(1, 7, 16, 64, 256),
        extra=(0, 3),
        layout=("heads", "tokens"),
    ),
    ids=row_id,
)
def test_values(row):
    (query, *caches), arguments = make(row["dtype"], row["block_size"], extra=row["extra"])
    if row["layout"] == "tokens":  # (blocks, block_size, heads, dim) in memory, as flash-attn has it
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    out, lse = check((query, *caches), {**arguments, **OPTIONS[row["option"]]}, str(row))
    end = sum(Q_LENGTHS)
    assert not out[end:].any() and (lse[:, end:] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, dims", [((9, 3), (64, 64)), ((4, 1), (300, 8)), ((2, 2), (1, 1))], ids=str)
def test_heads_and_dims(heads, dims, dtype):
    check(*make(dtype, 16, heads=heads, dims=dims))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", (5, 512))
def test_long_sequences_have_the_bits_of_packed_ones(block_size, dtype):
    """One kernel, which takes the same keys at a time."""
    options = dict(is_causal=True, causal_alignment="bottom_right", return_lse=True)
    tensors, arguments = make(dtype, block_size, (40, 70), (600, 97), dims=(32, 32))
    ours = attnjourney.varlen_attention(*tensors, **arguments, **options)
    tensors, arguments = packed(tensors, arguments)
    theirs = attnjourney.varlen_attention(*tensors, **arguments, **options)
    assert all(map(torch.equal, ours, theirs))


def test_numbers_of_each_sequence():
    tensors, arguments = make(torch.float64, 16)
    sinks, slopes = (random_tensor((len(Q_LENGTHS), 4), torch.float64, s, outliers=False) for s in (1, 2))
    options = dict(sinks=sinks, alibi_slopes=slopes, return_lse=True)
    ours = attnjourney.varlen_attention(*tensors, **arguments, **options)
    torch.testing.assert_close(ours, reference.varlen_attention(*tensors, **arguments, **options))


@pytest.mark.parametrize("q_lengths, k_lengths", [((), ()), ((0,), (0,)), ((0, 0), (3, 2)), ((2, 30), (0, 0))], ids=str)
def test_nothing_to_attend(q_lengths, k_lengths):
    out, lse = check(*make(torch.float32, 4, q_lengths, k_lengths, extra=2))
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_prefill_and_decoding_equal_one_causal_pass(dtype):
    """Prompts of 50 and 7 tokens in pieces, then a token each; in every step rows of one sequence beside another's."""
    lengths, heads, dim = (53, 11), 4, 32
    q, k, v = ([random_tensor((h, n, dim), dtype, 3 * i + s) for i, n in enumerate(lengths)] for s, h in
               enumerate((heads, 2, 2)))  # fmt: skip
    cache = PagedKVCache(2, 2, 64, dim, block_size=8, num_blocks=12, dtype=dtype)
    outs = [[], []]
    for counts in ((20, 7), (20, 1), (10, 1), (1, 1), (1, 0), (1, 1)):
        held = cache.lengths.tolist()
        new = [torch.zeros(2, 2, max(counts), dim, dtype=dtype) for _ in range(2)]
        for b, n in enumerate(counts):
            for x, given in zip(new, (k, v)):
                x[b, :, max(counts) - n :] = given[b][:, held[b] : held[b] + n]
        cache.append(*new, lengths=torch.tensor(counts))
        rows = torch.cat([q[b][:, held[b] : held[b] + n] for b, n in enumerate(counts)], 1).transpose(0, 1)
        out = attnjourney.varlen_attention(
            rows, cache.key, cache.value, offsets(counts), offsets(cache.lengths.tolist()), is_causal=True,
            causal_alignment="bottom_right", block_table=cache.block_table,
        )  # fmt: skip
        for b, part in enumerate(out.split(counts)):
            outs[b].append(part)
    for b, parts in enumerate(outs):
        wide = [x[b].double() for x in (q, k, v)]
        exact = reference.attention(*wide, is_causal=True, enable_gqa=True)
        plain = reference.attention(q[b], k[b], v[b], is_causal=True, enable_gqa=True)
        assert_close_to_reference(torch.cat(parts).transpose(0, 1), plain, exact, OUTPUT_FACTOR, f"sequence {b}")


def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other():
    (q, k, v), arguments = make(torch.float32, 16, (20, 2, 30), (20, 9, 30), dims=(16, 16))
    options = dict(is_causal=True, causal_alignment="bottom_right")
    before = attnjourney.varlen_attention(q, k, v, **arguments, **options)
    v[arguments["block_table"][0, 1], :, 2] = math.nan  # key 18 of the first sequence
    out = attnjourney.varlen_attention(q, k, v, **arguments, **options)
    assert out[18:20].isnan().all() and torch.equal(out[:18], before[:18]) and torch.equal(out[20:], before[20:])


def test_bits_do_not_depend_on_threads():
    tensors, arguments = make(torch.float32, 16, (1, 90, 3), (3000, 90, 700), dims=(64, 64))
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(attnjourney.varlen_attention(*tensors, **arguments, return_lse=True))
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other))


# ---------------------------------------------------------------------------------------------------- what is refused

GOOD = dict(
    query=torch.zeros(5, 4, 8), key=torch.zeros(3, 2, 4, 8), value=torch.zeros(3, 2, 4, 6),
    cu_seqlens_q=torch.tensor([0, 1, 5]), cu_seqlens_k=torch.tensor([0, 6, 10], dtype=torch.int32),
    block_table=torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
)  # fmt: skip
TABLE = GOOD["block_table"]
BAD = {
    "query: expected 3": dict(query=torch.zeros(1, 5, 4, 8)),
    "query: expected dtype": dict(query=torch.zeros(5, 4, 8, dtype=torch.int32)),
    "key: expected 4 dimensions": dict(key=torch.zeros(12, 2, 8)),
    "key: expected a head count": dict(query=torch.zeros(5, 3, 8)),
    "key: expected the head_dim": dict(query=torch.zeros(5, 4, 7)),
    "key: expected the dtype": dict(key=torch.zeros(3, 2, 4, 8).double()),
    "key: expected a dense last": dict(key=torch.zeros(3, 2, 8, 4).transpose(2, 3)),
    "key: expected a block size": dict(key=torch.zeros(3, 2, 0, 8), value=torch.zeros(3, 2, 0, 6)),
    "value: expected the shape of key": dict(value=torch.zeros(3, 2, 5, 6)),
    "cu_seqlens_q: expected dtype": dict(cu_seqlens_q=torch.tensor([0.0, 1, 5])),
    "cu_seqlens_q: .*end at 5": dict(cu_seqlens_q=torch.tensor([0, 1, 6])),
    "cu_seqlens_k: expected the shape of cu_seqlens_q": dict(cu_seqlens_k=torch.tensor([0, 6])),
    "cu_seqlens_k: .*never fall": dict(cu_seqlens_k=torch.tensor([0, 6, 5])),
    "cu_seqlens_k: expected sequences of at most the cache's capacity, 8, got 9 for batch row 1": dict(
        cu_seqlens_k=torch.tensor([0, 6, 15])
    ),
    "block_table: expected shape": dict(block_table=TABLE[:1]),
    "block_table: expected dtype torch.int32": dict(block_table=TABLE.long()),
    "block_table: expected a contiguous": dict(block_table=TABLE.T),
    "block_table: expected blocks from 0 to 2, got -1 at \\(1, 1\\)": dict(cu_seqlens_k=torch.tensor([0, 6, 11])),
    "block_table: expected blocks from 0 to 2, got 3 at \\(0, 0\\)": dict(block_table=TABLE + 1),
    "window_size: expected two": dict(window_size=(-2, 0)),
    "scale: expected a finite": dict(scale=math.nan),
    "softcap: expected a finite": dict(softcap=-1.0),
    "prefix_length: expected": dict(prefix_length=-1),
    "sinks: expected shape": dict(sinks=torch.zeros(3)),
    "dropout_p: expected 0 beside a block_table, got 0.5": dict(dropout_p=0.5),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(RuntimeError if "dtype" in message else ValueError, match=message):
        attnjourney.varlen_attention(**{**GOOD, **BAD[message]})
    attnjourney.varlen_attention(**GOOD)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_gradients_are_refused_while_they_are_recorded(name):
    arguments = {**GOOD, name: GOOD[name].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match=f"{name}: expected a tensor that does not require grad, .* no backward"):
        attnjourney.varlen_attention(**arguments)
    with torch.no_grad():
        assert not attnjourney.varlen_attention(**arguments).requires_grad


# ------------------------------------------------------------------------------------------------------ beside PyTorch


def test_opcheck():
    torch.library.opcheck(PAGED.default, (), {**GOOD, "sinks": torch.zeros(4)})


def test_compiles_with_dynamic_totals():
    torch._dynamo.reset()
    compiled = torch.compile(attnjourney.varlen_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for q_lengths, k_lengths in (((3, 5), (9, 5)), ((7, 2), (30, 2))):
        tensors, arguments = make(torch.float32, 4, q_lengths, k_lengths)
        expected = attnjourney.varlen_attention(*tensors, **arguments)
        assert torch.equal(compiled(*tensors, **arguments), expected)


def test_flops_and_autocast():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        attnjourney.varlen_attention(**GOOD)
    assert counter.get_total_flops() == 2 * 5 * 4 * 8 * (8 + 6)
    with torch.autocast("cpu", torch.bfloat16):  # query takes the dtype of the caches, which are never cast
        assert attnjourney.varlen_attention(**GOOD).dtype == torch.float32


def test_vmap_equals_a_loop():
    (q, k, v), arguments = make(torch.float64, 8, (3, 1), (9, 4))
    queries = torch.stack([q, 2 * q])
    run = lambda x: attnjourney.varlen_attention(x, k, v, **arguments)  # noqa: E731
    assert torch.equal(torch.func.vmap(run)(queries), torch.stack([run(x) for x in queries]))


def test_capture():
    tensors, arguments = make(torch.float64, 8, (3, 1), (9, 4))
    with attnjourney.capture(None) as seen:
        attnjourney.varlen_attention(*tensors, **arguments, is_causal=True)
    tensors, arguments = packed(tensors, arguments)
    with attnjourney.capture(None) as wanted:
        attnjourney.varlen_attention(*tensors, **arguments, is_causal=True)
    assert seen[0].operator == "paged_attention" and seen[0].weights.shape == (2, 4, 3, 9)
    torch.testing.assert_close(seen[0].weights, wanted[0].weights)
