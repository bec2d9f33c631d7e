"""Caches of bytes (int8, float8_e4m3fn) with a scale for each token and head: what is stored, and attention over it."""

import math

import pytest
import torch

import attnjourney
from attnjourney import KVCache, LatentCache, PagedKVCache, WindowCache, nn, reference
from tests.cache.test_decode_options import OPTIONS, check, make, noise
from tests.cache.test_mla_decode import absorbed, inputs
from tests.support.decode_checks import paged
from tests.support.testing import FLOOR_ULPS, OUTPUT_FACTOR, assert_close_to_reference, pairs, random_tensor

DECODE = torch.ops.attnjourney.decode
BYTES = (torch.int8, torch.float8_e4m3fn)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
bits = torch.uint8  # of bytes, which torch compares


def rows(**axes):
    return [tuple(row[name] for name in axes) for row in pairs(**axes)]


def quantized(key, value, dtype):
    """decode's key, value, key_scale and value_scale of rows that may be NaN."""
    (key, key_scale), (value, value_scale) = (reference.quantize(x, dtype) for x in (key, value))
    return key, value, dict(key_scale=key_scale, value_scale=value_scale)


# ---------------------------------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("kind, dtype", rows(kind=BYTES, dtype=DTYPES))
def test_what_append_stores(kind, dtype):
    """To the bit: outliers, a row of zeros, the smallest and the largest numbers, NaN and inf."""
    key, value = random_tensor((2, 3, 9, 41), dtype, 1), random_tensor((2, 3, 9, 16), dtype, 2)
    info = torch.finfo(dtype)
    key[0, 0, 1], key[0, 1, 2, 5], key[1, 2, 3, 7], key[0, 0, 4, 40] = 0.0, math.nan, math.inf, -math.inf
    key[1, 0, 5], key[1, 1, 6, 3], key[1, 1, 6, 4] = info.tiny, info.max, info.min
    value[0, 0, 0], value[0, 2, 1, 3] = info.smallest_normal / 2, math.nan
    for cache in (
        KVCache(2, 3, 12, 41, 16, dtype=kind),
        PagedKVCache(2, 3, 12, 41, 16, block_size=12, dtype=kind),
        WindowCache(2, 3, 2, 41, 16, max_append=10, dtype=kind),
    ):
        cache.append(key, value)
        outer = [0, 1] if cache.key.shape[0] == 2 else slice(None)
        for x, held, scale in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
            expected, factor = reference.quantize(x, kind)
            assert torch.equal(held[outer][:, :, :9].view(bits), expected.view(bits)), type(cache)
            torch.testing.assert_close(scale[outer][:, :, :9], factor, rtol=0, atol=0, equal_nan=True)


def test_bytes_of_a_cache():
    whole = KVCache(2, 4, 100, 128, dtype=torch.bfloat16)
    assert whole.nbytes == 2 * 2 * 4 * 100 * 128 * 2
    sizes = dict(batch=2, num_kv_heads=4, capacity=100, head_dim=128, dtype=torch.int8)
    for cache in (KVCache(**sizes), PagedKVCache(**sizes, block_size=10)):
        assert cache.nbytes == whole.nbytes * (128 + 4) // 256
    assert LatentCache(2, 100, 512, 64, dtype=torch.float8_e4m3fn).nbytes == 2 * 100 * (576 + 4)
    layer = nn.GroupedQueryAttention(64, 8, 2)
    held = KVCache(1, 2, 1, 8, dtype=torch.int8).nbytes
    assert attnjourney.account(layer, 9, dtype=torch.int8).cache_bytes_per_token == held == 2 * 2 * (8 + 4)


# ------------------------------------------------------------------------------------------------ attention over it


@pytest.mark.parametrize("kind, dtype, q_len", rows(kind=BYTES, dtype=DTYPES, q_len=(1, 3, 20)))
def test_values(kind, dtype, q_len):
    """One query head for a key head, and eight; dimensions that are no multiple of a vector; NaN beyond the lengths."""
    for heads, kv_heads, dim in ((2, 2, 64), (8, 1, 64), (6, 2, 19)):
        query, key, value, lengths, _ = make([], q_len, [150, 0, 37], dtype, heads, kv_heads, dim)
        key, value, scales = quantized(key, value, kind)
        actual = DECODE(query, key, value, lengths, **scales)
        check(actual, query, key, value, lengths, scales, f"{heads}/{kv_heads} {dim}")


@pytest.mark.parametrize("name, kind, dtype, q_len", rows(name=OPTIONS, kind=BYTES, dtype=DTYPES, q_len=(1, 5, 20)))
def test_options_and_blocks(name, kind, dtype, q_len):
    query, key, value, lengths, options = make([name], q_len, [150, 0, 37], dtype)
    blocks = paged(key, value, lengths.tolist(), 16 if q_len == 20 else 1)
    key, value, scales = quantized(key, value, kind)
    check(DECODE(query, key, value, lengths, **options, **scales), query, key, value, lengths, options | scales, name)
    key, value, scales = quantized(*blocks[:2], kind)
    options |= scales | {"block_table": blocks[2]}
    check(DECODE(query, key, value, lengths, **options), query, key, value, lengths, options, f"{name} in blocks")


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_every_byte(kind):
    """A key of one byte, found by its score; a value of it. The NaN of e4m3 shows."""
    code = torch.arange(256, dtype=torch.uint8).view(kind)
    number = code.float()
    if kind == torch.int8:
        code, number = code[number > -128], number[number > -128]
    row = torch.zeros(len(code), 1, 1, 40)
    row[..., 21] = 1.0  # picks one number of the key
    key = code.view(bits).view(-1, 1, 1, 1).expand(-1, 1, 1, 40).contiguous().view(kind)
    scale = torch.full((len(code), 1, 1), 0.5)
    one = torch.ones(len(code), dtype=torch.int64)
    out, lse = attnjourney.decode(row, key, key, one, key_scale=scale, value_scale=scale, scale=1.0, return_lse=True)
    expected = torch.where(number.isnan(), math.nan, number / 2)
    torch.testing.assert_close(lse.flatten(), expected, rtol=1e-6, atol=1e-9, equal_nan=True)
    finite = expected.isfinite()
    assert torch.equal(out[finite].flatten(), expected[finite].repeat_interleave(40))
    assert out[~finite].isnan().all()


@pytest.mark.parametrize("q_len", (1, 20))
@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_nan_shows_where_it_is_seen_and_nowhere_else(kind, q_len):
    query, key, value, lengths, _ = make([], q_len, [40], torch.float32, 8, 1, 16)
    seen = torch.ones(q_len, 40, dtype=torch.bool)
    seen[:, 7] = False
    clean_key, clean_value, scales = quantized(key, value, kind)
    expected = DECODE(query, clean_key, clean_value, lengths, attn_mask=seen, **scales)
    key[:, :, 7], value[:, :, 7] = math.nan, math.nan
    key, value, spoilt = quantized(key, value, kind)
    out = DECODE(query, key, value, lengths, attn_mask=seen, **spoilt)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])
    assert DECODE(query, key, value, lengths, is_causal=False, **spoilt)[0].isnan().all()
    scales["value_scale"] = spoilt["value_scale"]
    only_value = DECODE(query, clean_key, value, lengths, is_causal=False, **scales)
    assert only_value[0].isnan().all() and not only_value[1].isnan().any()
    # even where a key's weight times its scale is 0
    scales["value_scale"] = torch.where(spoilt["value_scale"].isnan(), math.nan, 0.0)
    assert DECODE(query, clean_key, value, lengths, is_causal=False, **scales)[0].isnan().all()


# ---------------------------------------------------------------------------------------------------- the verbs


CACHES = {
    "dense": lambda kind: KVCache(3, 2, 40, 24, 16, dtype=kind),
    "ring": lambda kind: WindowCache(3, 2, 9, 24, 16, max_append=4, dtype=kind),
    "paged": lambda kind: PagedKVCache(3, 2, 40, 24, 16, block_size=4, num_blocks=24, dtype=kind),
}


@pytest.mark.parametrize("where, kind, dtype", rows(where=CACHES, kind=BYTES, dtype=DTYPES))
def test_scales_go_where_their_tokens_go(where, kind, dtype):
    """A prompt of uneven lengths (longer than the ring), beams that share blocks and part, a rollback."""
    cache, seed = CACHES[where](kind), iter(range(100))
    history = [[] for _ in range(3)]  # of each sequence: (key, value) of its tokens, (heads, dim)

    def step(count, counts=None):
        query, key, value = (
            noise(3, h, count, d, dtype=dtype, seed=next(seed)) for h, d in ((4, 24), (2, 24), (2, 16))
        )
        key, value = key * torch.linspace(0.1, 9, count, dtype=dtype)[:, None], value * 3  # scales that differ
        out, lse = cache.step(query, key, value, counts, return_lse=True)
        for b in range(3):
            n = count if counts is None else int(counts[b])
            history[b] += [(key[b, :, t], value[b, :, t]) for t in range(count - n, count)]
        longest = max(map(len, history))
        held = [torch.zeros(3, 2, longest, d, dtype=dtype) for d in (24, 16)]
        for b, tokens in enumerate(history):
            for i, x in enumerate(held):
                x[b, :, : len(tokens)] = torch.stack([t[i] for t in tokens], 1)
        key, value, options = quantized(*held, kind)
        if where == "ring":
            options["window_size"] = (9, -1)
        check((out, lse), query, key, value, cache.lengths, options, f"{where} {count}")

    step(20, torch.tensor([20, 11, 17]))
    cache.reorder(torch.tensor([2, 2, 1]))
    history = [list(history[i]) for i in (2, 2, 1)]
    step(1)
    step(2)
    cache.truncate(cache.lengths - 2)
    history = [tokens[:-2] for tokens in history]
    step(3)
    step(1)


def check_latents(kind, dtype, q_len, device="cpu", **sizes):
    """Absorbed, and with many rows expanded."""
    query, latent, lengths, weight = inputs([50, 40, 0], q_len=q_len, dtype=dtype, **sizes)
    latent, scale = reference.quantize(latent, kind)
    given = [x.to(device) for x in (query, latent, lengths, weight)]
    more = {"latent_scale": scale.to(device)}
    actual = attnjourney.mla_decode(*given, **more).cpu()
    wide = [x.double() for x in (query, reference.dequantize(latent, scale, torch.float64).nan_to_num(), weight)]
    exact = reference.mla_decode(wide[0], wide[1], lengths, wide[2])
    narrow = reference.dequantize(latent, scale, dtype).nan_to_num()
    plain = (absorbed if q_len < 40 else reference.mla_decode)(query, narrow, lengths, weight)
    rounding = torch.full_like(exact, 2 * FLOOR_ULPS * torch.finfo(dtype).eps * float(exact.abs().max()))
    assert_close_to_reference(actual, plain, exact, OUTPUT_FACTOR, "latents", rounding)
    table = torch.arange(3, dtype=torch.int32)[:, None]  # a block for each sequence
    blocks = attnjourney.mla_decode(*given, **more, block_table=table.to(device)).cpu()
    assert_close_to_reference(blocks, plain, exact, OUTPUT_FACTOR, "latents in blocks", rounding)


@pytest.mark.parametrize("kind, dtype, q_len", rows(kind=BYTES, dtype=DTYPES, q_len=(1, 3, 40)))
def test_latents(kind, dtype, q_len):
    check_latents(kind, dtype, q_len)


def test_a_latent_cache_steps():
    query, latent, lengths, weight = inputs([30, 30], q_len=1, dtype=torch.float32, extra=0)
    for kind in BYTES:
        cache = LatentCache(2, 40, 32, 8, dtype=kind)
        cache.append(latent[:, :29])
        out = cache.step(query, latent[:, 29:], weight)
        stored, scale = reference.quantize(latent, kind)
        assert torch.equal(out, attnjourney.mla_decode(query, stored, lengths, weight, latent_scale=scale))
        assert torch.equal(cache.latent_scale[:, :30], scale)
        cache.truncate(12)
        cache.reorder(torch.tensor([1, 0]))
        out = cache.attend(query, weight)
        stored, scale = stored.view(bits).flip(0).view(kind), scale.flip(0)
        expected = attnjourney.mla_decode(query, stored, cache.lengths, weight, latent_scale=scale)
        assert torch.equal(out, expected)


def test_a_layer_over_bytes():
    """MultiheadAttention's weights are those of the keys that are held."""
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    cache, x = KVCache(2, 4, 12, 8, dtype=torch.int8), noise(2, 6, 32, dtype=torch.float32)
    with torch.no_grad():
        out, weights = layer(x, x, x, cache=cache, is_causal=True)
    assert out.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6))


# ---------------------------------------------------------------------------------------------------- PyTorch


def test_opcheck_autocast_and_vmap():
    query, key, value, lengths, _ = make([], 2, [9, 5], torch.float32)
    fresh = [x.nan_to_num()[:, :, :2].contiguous() for x in (key, value)]
    key, value, scales = quantized(key.nan_to_num(), value.nan_to_num(), torch.int8)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(DECODE.default, (query, key, value, lengths), scales, test_utils=checks)
    written = (key.clone(), value.clone(), lengths.clone(), *fresh)
    torch.library.opcheck(torch.ops.attnjourney.kv_cache_append.default, written, scales, test_utils=checks)
    with torch.autocast("cpu", torch.bfloat16):
        assert DECODE(query, key, value, lengths, **scales)[0].dtype == torch.bfloat16
    samples = torch.stack([query, query * 2])
    each = torch.vmap(lambda q: attnjourney.decode(q, key, value, lengths, **scales))(samples)
    assert torch.equal(each, torch.stack([attnjourney.decode(q, key, value, lengths, **scales) for q in samples]))
    many = [torch.stack([x, x.flip(0)]) for x in (key, value, *scales.values())]
    run = lambda k, v, s, t: attnjourney.decode(query, k, v, lengths, key_scale=s, value_scale=t)  # noqa: E731
    assert torch.equal(torch.vmap(run)(*many), torch.stack([run(*x) for x in zip(*many)]))


X, BYTE = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8, dtype=torch.int8)
LENGTHS, NEW, SCALE = torch.tensor([3]), X[:, :, :1], torch.ones(1, 2, 4)
BOTH = dict(key_scale=SCALE, value_scale=SCALE)
APART = dict(key_scale=SCALE, value_scale=SCALE.clone())
KINDS = "expected dtype torch.int8 or torch.float8_e4m3fn"
append = torch.ops.attnjourney.kv_cache_append
APPEND = (BYTE, BYTE.clone(), LENGTHS, NEW, NEW)
LATENT = (torch.zeros(1, 2, 1, 4), BYTE[:, 0], LENGTHS, torch.zeros(2 * 9, 8))
BAD = [
    (attnjourney.decode, (X, BYTE, BYTE, LENGTHS), {}, ValueError, "key_scale: expected a tensor beside key of "),
    (attnjourney.decode, (X, BYTE, BYTE, LENGTHS), {"key_scale": SCALE}, ValueError, "value_scale: expected a tensor"),
    (attnjourney.decode, (X, X, X, LENGTHS), BOTH, RuntimeError, f"key: {KINDS} beside key_scale, got torch.float32"),
    (
        attnjourney.decode, (X, BYTE, BYTE.view(torch.float8_e4m3fn), LENGTHS), BOTH, RuntimeError,
        "value: expected the dtype of key, torch.int8, got torch.float8_e4m3fn",
    ),
    (
        attnjourney.decode, (X.double(), BYTE, BYTE, LENGTHS), BOTH, RuntimeError,
        "query: expected dtype torch.float32, torch.bfloat16 or torch.float16 beside key_scale, got torch.float64",
    ),
    (
        attnjourney.decode, (X, BYTE, BYTE, LENGTHS), BOTH | {"key_scale": SCALE.double()}, RuntimeError,
        "key_scale: expected dtype torch.float32, got torch.float64",
    ),
    (
        attnjourney.decode, (X, BYTE, BYTE, LENGTHS), BOTH | {"value_scale": SCALE[:, :1]}, ValueError,
        r"value_scale: expected the shape of value but for its last dimension .*, got shape \(1, 1, 4\)",
    ),
    (append, APPEND, {}, ValueError, "key_scale: expected a tensor beside key_cache of torch.int8, got None"),
    (append, (X, X.clone(), LENGTHS, NEW, NEW), APART, RuntimeError, f"key_cache: {KINDS} beside key_scale"),
    (
        append, (*APPEND[:3], NEW.double(), NEW.double()), APART, RuntimeError,
        "key: expected dtype torch.float32, .* beside key_cache of torch.int8, got torch.float64",
    ),
    (append, APPEND, BOTH, RuntimeError, "value_scale: unsupported operation: expected memory apart from key_scale"),
    (attnjourney.mla_decode, LATENT, {}, ValueError, "latent_scale: expected a tensor beside latent of torch.int8"),
    (
        attnjourney.mla_decode, LATENT, {"latent_scale": SCALE}, ValueError,
        "latent_scale: expected the shape of latent but for its last dimension",
    ),
]  # fmt: skip


@pytest.mark.parametrize("call, args, options, error, message", BAD, ids=range(len(BAD)))
def test_bad_input(call, args, options, error, message):
    with pytest.raises(error, match=message):
        call(*args, **options)
