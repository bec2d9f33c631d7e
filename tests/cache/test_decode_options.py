"""The options of attention over a cache: decode and mla_decode, few query rows and many, every place of keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnjourney
from attnjourney import KVCache, WindowCache, reference
from tests.support.decode_checks import dense_cache, paged
from tests.support.testing import DTYPES, FLOOR_ULPS, OUTPUT_FACTOR, assert_close_to_reference, random_tensor, threads

DECODE = torch.ops.attnjourney.decode


def noise(*shape, dtype=torch.float64, seed=11):
    return random_tensor(shape, dtype, seed, outliers=False)


# name -> the arguments it brings, for query (B, H, L, E) and the longest length S
OPTIONS = {
    "softcap": lambda q, s: dict(softcap=1.5),
    "sinks": lambda q, s: dict(sinks=noise(q.shape[1], dtype=q.dtype)),
    "sinks_per_item": lambda q, s: dict(sinks=noise(*q.shape[:2]).float() * 3),
    "alibi": lambda q, s: dict(alibi_slopes=noise(q.shape[1], dtype=q.dtype).abs() / 8),
    "alibi_per_item": lambda q, s: dict(alibi_slopes=noise(*q.shape[:2], dtype=q.dtype) / 8),
    "mask": lambda q, s: dict(attn_mask=noise(*q.shape[:3], s, dtype=q.dtype)),
    "mask_float32": lambda q, s: dict(attn_mask=noise(q.shape[2], s).float()),
    "row_mask": lambda q, s: dict(attn_mask=noise(len(q), 1, 1, s).where(noise(len(q), 1, 1, s) > -1, -math.inf)),
    "column_mask": lambda q, s: dict(attn_mask=noise(q.shape[1], q.shape[2], 1, dtype=q.dtype)),
    "bool_mask": lambda q, s: dict(attn_mask=noise(q.shape[1], 1, s) > -0.5),
    "prefix": lambda q, s: dict(prefix_length=5, window_size=(4, -1)),
    "long_prefix": lambda q, s: dict(prefix_length=1000, is_causal=False, window_size=(2, 1)),
    "window": lambda q, s: dict(window_size=(20, -1)),
}
GROUPS = [{"mask", "mask_float32", "row_mask", "column_mask", "bool_mask"}, {"alibi", "alibi_per_item"}]
GROUPS += [{"prefix", "long_prefix", "window"}, {"sinks", "sinks_per_item"}]


def make(names, q_len, lengths, dtype, heads=4, kv_heads=2, dim=24, v_dim=17, extra=3):
    query = noise(len(lengths), heads, q_len, dim, dtype=dtype, seed=1)
    key, value = dense_cache(lengths, kv_heads, max(1, *lengths) + extra, dim, v_dim, dtype)
    options = {}
    for name in names:
        options.update(OPTIONS[name](query, max(lengths)))
    if dtype != torch.float64 and "row_mask" in names:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    return query, key / 3, value, torch.tensor(lengths), options


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def check(actual, query, key, value, lengths, options, label):
    """The tolerance rule for out and lse; key and value dense."""
    __tracebackhide__ = True
    plain = reference.decode(query, key, value, lengths, return_lse=True, **options)
    inputs = [wide(x) for x in (query, key, value)]
    exact = reference.decode(*inputs, lengths, return_lse=True, **{n: wide(x) for n, x in options.items()})
    for name, x, p, e in zip(("out", "lse"), actual, plain, exact):
        size = torch.where(e.isfinite(), e, 0.0).abs().max() if e.numel() else 0
        ulps = (16 if x.dtype == torch.float64 else 2) * FLOOR_ULPS
        rounding = torch.full_like(e, ulps * torch.finfo(x.dtype).eps * max(1.0, float(size)))
        assert_close_to_reference(x, p, e, OUTPUT_FACTOR, f"{name} {label}", rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", (1, 3, 20))
@pytest.mark.parametrize("name", OPTIONS)
def test_values(name, q_len, dtype):
    query, key, value, lengths, options = make([name], q_len, [150, 0, 37], dtype)
    check(DECODE(query, key, value, lengths, **options), query, key, value, lengths, options, name)


@settings(derandomize=True, deadline=None, database=None, max_examples=80)
@given(st.data())
def test_combinations(data):
    names = data.draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=4))
    names = sorted(n for n in names if all(n not in g or n == min(g & names) for g in GROUPS))
    dtype, q_len = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 2, 7, 16, 17, 40]))
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (9, 1), (6, 2)]))
    query, key, value, lengths, options = make(names, q_len, lengths, dtype, heads, kv_heads)
    label = f"{names} {dtype} {q_len} {lengths.tolist()}"
    check(DECODE(query, key, value, lengths, **options), query, key, value, lengths, options, label)
    blocks = paged(key, value, lengths.tolist(), 8)
    out = DECODE(query, *blocks[:2], lengths, block_table=blocks[2], **options)
    check(out, query, key, value, lengths, options, f"paged {label}")


@pytest.mark.parametrize("q_len", (1, 20))
def test_a_mask_as_wide_as_the_capacity(q_len):
    query, key, value, lengths, _ = make([], q_len, [40, 9], torch.float32)
    mask = torch.zeros(2, 1, 1, key.shape[2])
    mask[0, ..., 3] = -math.inf
    mask[..., 40:] = math.nan  # no key there
    out = DECODE(query, key, value, lengths, attn_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(out, DECODE(query, key, value, lengths, attn_mask=mask[..., :40])))


@pytest.mark.parametrize("q_len", (2, 20))
@pytest.mark.parametrize("what", ("key", "value"))
@pytest.mark.parametrize("junk", (math.nan, math.inf))
def test_a_nan_that_the_mask_hides_does_not_show(q_len, what, junk):
    query, key, value, lengths, _ = make([], q_len, [60], torch.float32)
    mask = torch.ones(q_len, 60, dtype=torch.bool)
    mask[:-1, 31] = False
    expected = DECODE(query, key, value, lengths, attn_mask=mask)[0]
    (key if what == "key" else value)[:, :, 31] = junk
    out = DECODE(query, key, value, lengths, attn_mask=mask)[0]
    torch.testing.assert_close(out[:, :, :-1], expected[:, :, :-1], rtol=1e-6, atol=1e-6)
    assert not out[:, :, -1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("floating", (False, True))
def test_blocks_of_keys_that_a_mask_hides_whole(dtype, floating):
    """Of 20 heads on one key head the first 9 see the keys from 700 on, the others those from 300 to 500; before 300
    there is nothing but NaN."""
    query, key, value, lengths, _ = make([], 1, [1000], dtype, heads=20, kv_heads=1)
    mask = torch.zeros(20, 1, 1000, dtype=torch.bool)
    mask[:9, :, 700:], mask[9:, :, 300:500] = True, True
    options = dict(attn_mask=torch.where(mask, 0.5, -math.inf).to(dtype) if floating else mask)
    clean = DECODE(query, key, value, lengths, **options)
    check(clean, query, key, value, lengths, options, "blocks")
    key[:, :, :300], value[:, :, :300] = math.nan, math.inf
    torch.testing.assert_close(DECODE(query, key, value, lengths, **options), clean)
    value[:, :, 600] = math.nan  # nobody sees it either
    torch.testing.assert_close(DECODE(query, key, value, lengths, **options), clean)
    value[:, :, 800] = math.nan
    out = DECODE(query, key, value, lengths, **options)[0]
    assert out[:, :9].isnan().all()
    torch.testing.assert_close(out[:, 9:], clean[0][:, 9:])


@pytest.mark.parametrize("q_len", (1, 20))
def test_rows_that_see_nothing(q_len):
    query, key, value, lengths, _ = make([], q_len, [30, 0], torch.float32)
    hidden = torch.zeros(1, 30, dtype=torch.bool)
    for mask in (hidden, torch.full((1, 30), -math.inf)):
        out, lse = DECODE(query, key, value, lengths, attn_mask=mask)
        assert (out == 0).all() and (lse == -math.inf).all()
    sinks = torch.tensor([0.5, -3.0, 40.0, -math.inf])
    out, lse = DECODE(query, key, value, lengths, attn_mask=hidden, sinks=sinks)
    assert (out == 0).all() and torch.equal(lse, sinks[None, :, None].expand_as(lse))


@pytest.mark.parametrize("sink", (-1e4, 1e4, 300.0))
@pytest.mark.parametrize("q_len", (1, 20))
def test_sinks_far_from_the_scores(q_len, sink):
    query, key, value, lengths, _ = make([], q_len, [30], torch.float32)
    options = dict(sinks=torch.full((4,), sink))
    check(DECODE(query, key, value, lengths, **options), query, key, value, lengths, options, sink)


def test_ring_and_threads():
    """A ring of 40, 100 tokens seen; the same bits for any number of threads."""
    for q_len in (1, 20):
        query, key, value, lengths, options = make(["sinks", "alibi", "softcap"], q_len, [100, 33], torch.float32)
        options.update(window_size=(17, -1), attn_mask=noise(2, 1, q_len, 100).float())
        rings = [x.new_full((*x.shape[:2], 40, x.shape[3]), math.nan) for x in (key, value)]
        for b, n in enumerate(lengths.tolist()):
            at = torch.arange(max(0, n - 40), n)
            for ring, x in zip(rings, (key, value)):
                ring[b][:, at % 40] = x[b][:, at]
        results = []
        for count in (1, 2):
            with threads(count):
                results.append(DECODE(query, *rings, lengths, ring=True, **options))
        assert all(torch.equal(a, b) for a, b in zip(*results))
        check(results[0], query, key, value, lengths, options, "ring")


@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "column_mask"])
@pytest.mark.parametrize("q_len", (2, 20, 70))
def test_latents(name, q_len):
    """Absorbed for few rows, expanded for many (here from 46)."""
    lengths, heads = [75, 0, 20], 3
    query, latent = noise(3, heads, q_len, 20), noise(3, 80, 36, seed=2)
    for b, n in enumerate(lengths):
        latent[b, n:] = math.nan
    weight, options = noise(heads * 28, 28, seed=3) / 5, OPTIONS[name](query, 75)
    lengths = torch.tensor(lengths)
    ours = attnjourney.mla_decode(query, latent, lengths, weight, return_lse=True, **options)
    theirs = reference.mla_decode(query, latent.nan_to_num(), lengths, weight, return_lse=True, **options)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_of_latents_take_the_expanded_form(dtype):
    """Not the absorbed one: its result for one head alone is bit for bit attention over that head's keys."""
    query, latent = noise(1, 2, 90, 20, dtype=dtype), noise(1, 90, 36, dtype=dtype, seed=2)
    weight = (noise(2 * 28, 28, seed=3) / 5).to(dtype)
    out = attnjourney.mla_decode(query, latent, torch.tensor([90]), weight)
    kv = (latent[..., :28] @ weight.T).unflatten(-1, (2, 28)).transpose(1, 2)
    key = torch.cat([kv[..., :12], latent[:, None, :, 28:].expand(-1, 2, -1, -1)], -1)
    expected = attnjourney.attention(query, key, kv[..., 12:], is_causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_the_heads_of_latents_in_pieces():
    """More keys and values than are made at a time: 5 heads of 84 numbers and 40,000 keys go by two."""
    query, latent = noise(1, 5, 60, 44).float(), noise(1, 40000, 132, seed=2).float()
    weight = (noise(5 * 80, 128, seed=3) / 11).float()
    sinks, slopes = noise(5).float() + 5, noise(1, 5).float().abs() / 1000
    options = dict(sinks=sinks, alibi_slopes=slopes, attn_mask=noise(5, 60, 40000).float())
    ours = attnjourney.mla_decode(query, latent, torch.tensor([40000]), weight, **options)
    theirs = reference.mla_decode(query, latent, torch.tensor([40000]), weight, **options)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_window_cache_longer_than_its_ring():
    """A prompt longer than the ring, then a mask and ALiBi counted from the sequence's first key."""
    cache = WindowCache(2, 2, 9, 8, max_append=4, dtype=torch.float64)
    key, value, query = noise(2, 2, 50, 8), noise(2, 2, 50, 8, seed=2), noise(2, 4, 50, 8, seed=3)
    slopes, mask = noise(4).abs(), noise(2, 4, 50, 50, seed=4)
    expected = attnjourney.attention(
        query, key, value, mask, is_causal=True, enable_gqa=True, window_size=(9, -1), alibi_slopes=slopes
    )
    outs = []
    for a, b in ((0, 30), (30, 33), (33, 50)):
        cache.append(key[:, :, a:b], value[:, :, a:b])
        outs.append(cache.attend(query[:, :, a:b], attn_mask=mask[:, :, a:b, :b], alibi_slopes=slopes))
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="attn_mask: expected a last dimension of 1 or of the longest length, 50, got"):
        cache.attend(query[:, :, 33:], attn_mask=mask[:, :, 33:, :49])
    with pytest.raises(ValueError, match="prefix_length: expected 0 beside a ring"):
        cache.attend(query[:, :, 33:], prefix_length=2)


BAD = {
    "attn_mask: expected a shape that broadcasts to .2, 4, 1, 7.": dict(attn_mask=torch.zeros(3, 4, 1, 7)),
    "attn_mask: expected a last dimension of 1 or of the longest length, 7, or of the capacity, 10": dict(
        attn_mask=torch.zeros(1, 8)
    ),
    "attn_mask: expected at least 1 dimension": dict(attn_mask=torch.zeros(())),
    "attn_mask: expected dtype": dict(attn_mask=torch.zeros(1, 7, dtype=torch.int64)),
    "sinks: expected shape": dict(sinks=torch.zeros(3)),
    "sinks: expected dtype": dict(sinks=torch.zeros(4).double()),
    "alibi_slopes: expected shape": dict(alibi_slopes=torch.zeros(3, 4)),
    "softcap: expected a finite number from 0, got -1": dict(softcap=-1.0),
    "prefix_length: expected a number from 0, got -2": dict(prefix_length=-2),
    "prefix_length: expected 0 beside a ring": dict(prefix_length=2, ring=True, window_size=(3, -1)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    good = dict(query=torch.zeros(2, 4, 1, 8), key=torch.zeros(2, 2, 10, 8), value=torch.zeros(2, 2, 10, 6))
    good["lengths"] = torch.tensor([7, 4])
    error = RuntimeError if "dtype" in message else ValueError
    with pytest.raises(error, match=message):
        DECODE(**good, **BAD[message])
    with pytest.raises(error, match=message):
        latents = dict(query=torch.zeros(2, 4, 1, 8), latent=torch.zeros(2, 10, 9), lengths=good["lengths"])
        if "ring" in message:
            raise ValueError(message)  # latents have none
        torch.ops.attnjourney.mla_decode(**latents, kv_b_weight=torch.zeros(40, 6), **BAD[message])
    DECODE(**good)


def test_opcheck_compile_and_meta():
    query, key, value, lengths, options = make(["sinks", "alibi", "softcap", "mask"], 3, [30, 9], torch.float32)
    torch.library.opcheck(DECODE.default, (query, key, value, lengths), options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, attn_mask):
        return attnjourney.decode(query, key, value, lengths, **{**options, "attn_mask": attn_mask})

    assert torch.equal(step(query, options["attn_mask"]), DECODE(query, key, value, lengths, **options)[0])
    with pytest.raises(ValueError, match="sinks: expected shape"):
        DECODE(
            query.to("meta"), key.to("meta"), value.to("meta"), lengths.to("meta"), sinks=torch.zeros(3, device="meta")
        )


def test_autocast_follows_the_cache():
    """The cache is never cast: what meets it is."""
    query, key, value = noise(1, 4, 2, 8).float(), noise(1, 2, 2, 8, seed=2).float(), noise(1, 2, 2, 8, seed=3).float()
    for dtype in (torch.bfloat16, torch.float32):
        cache = KVCache(1, 2, 8, 8, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache.append(key, value)
            out = cache.attend(query, attn_mask=torch.zeros(2, 2))
        assert out.dtype == dtype
        assert torch.equal(out, cache.attend(query.to(dtype), attn_mask=torch.zeros(2, 2, dtype=dtype)))
