"""Inputs on which decoding and caches have gone wrong elsewhere, named after what they show."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnjourney
from attnjourney import KVCache, LatentCache, PagedKVCache, WindowCache, alibi_slopes, nn, reference
from tests.support.decode_checks import assert_decoded, check_decode
from tests.support.testing import DTYPES, random_tensor, threads

DECODE = torch.ops.attnjourney.decode
double = torch.float64


def noise(*shape, dtype=double, seed=0):
    return random_tensor(shape, dtype, seed, outliers=False)


# ---------------------------------------------------------------------------------------------------- which keys


@pytest.mark.parametrize("kind", ("dense", "paged", "ring"))
def test_a_window_of_three_and_the_token_itself_is_four_keys(kind):
    """Values are one-hot, scores equal: each row's output says which keys it saw."""
    sizes = dict(batch=1, num_kv_heads=1, head_dim=4, v_head_dim=10, dtype=double)
    makers = {
        "dense": lambda: KVCache(capacity=10, **sizes),
        "paged": lambda: PagedKVCache(capacity=10, block_size=3, **sizes),
        "ring": lambda: WindowCache(window=3, max_append=2, **sizes),
    }
    cache, window = makers[kind](), None if kind == "ring" else (3, -1)
    value = torch.eye(10, dtype=double)
    for t in range(10):
        out = cache.step(
            torch.ones(1, 1, 1, 4, dtype=double),
            torch.ones(1, 1, 1, 4, dtype=double),
            value[None, None, t : t + 1],
            window_size=window,
        )
        seen = [j for j in range(10) if max(0, t - 3) <= j <= t]
        assert out[0, 0, 0].nonzero()[:, 0].tolist() == seen
        torch.testing.assert_close(out[0, 0, 0, seen], torch.full((len(seen),), 1 / len(seen), dtype=double))


@pytest.mark.parametrize("q_len", (1, 20))
def test_a_mask_per_sequence_where_batch_equals_key_heads(q_len):
    query, key, value = noise(2, 4, q_len, 8), noise(2, 2, 30, 8, seed=1), noise(2, 2, 30, 8, seed=2)
    mask = noise(2, 1, q_len, 30, seed=3) > -0.5
    out = DECODE(query, key, value, torch.tensor([30, 30]), attn_mask=mask, is_causal=False)[0]
    whole = [x.repeat_interleave(2, 1) for x in (key, value)]
    expected = reference.attention(query, *whole, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("cap", (1.0, 5.0))
@pytest.mark.parametrize("q_len", (2, 20))
def test_nothing_of_a_hidden_key_comes_through_a_softcap(q_len, cap, dtype):
    query, key, value = (random_tensor((1, 2, n, 16), dtype, i) for i, n in enumerate((q_len, 40, 40)))
    mask = torch.rand(q_len, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0], mask[:, 7] = True, False
    poisoned, lengths = value.clone(), torch.tensor([40])
    poisoned[:, :, 7] = 1e4
    options = dict(softcap=cap, attn_mask=mask)
    assert torch.equal(
        DECODE(query, key, poisoned, lengths, **options)[0], DECODE(query, key, value, lengths, **options)[0]
    )
    after = value.clone()
    after[:, :, 38:] = 1e4  # the last two tokens, hidden from all rows before them
    causal = DECODE(query, key, after, lengths, softcap=cap)[0][:, :, :-2]
    assert torch.equal(causal, DECODE(query, key, value, lengths, softcap=cap)[0][:, :, :-2])


@pytest.mark.parametrize("length", (63, 64, 65, 127, 129))
@pytest.mark.parametrize("q_len", (1, 20))
def test_a_small_softcap_and_a_partial_block_of_keys(q_len, length):
    query, key, value = (random_tensor((1, 2, n, 16), torch.float32, i) for i, n in enumerate((q_len, length, length)))
    options = dict(softcap=1.0, is_causal=False)
    out = DECODE(query, key, value, torch.tensor([length]), **options)[0]
    exact = reference.decode(*(x.double() for x in (query, key, value)), torch.tensor([length]), **options)
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)


def test_linear_biases_favour_near_keys_at_the_cache_offset():
    """Equal scores, 8 heads: the first slope is 1/2, weights fall with the distance from the row's own position."""
    length, slopes = 9, alibi_slopes(8)
    key, value = torch.zeros(1, 8, length, 4, dtype=double), torch.eye(length, dtype=double).expand(1, 8, -1, -1)
    for q_len in (1, 3, 20):
        query = torch.ones(1, 8, q_len, 4, dtype=double)
        weights = DECODE(query, key, value.contiguous(), torch.tensor([length]), alibi_slopes=slopes.double())[0]
        distance = torch.arange(length - 1, -1, -1, dtype=double)
        expected = (-slopes.double()[:, None] * distance).softmax(-1)
        torch.testing.assert_close(weights[0, :, -1], expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weights[0, 0, -1, :-1] * math.exp(0.5), weights[0, 0, -1, 1:])


# ---------------------------------------------------------------------------------------------------- sinks


def largest(dtype):
    return torch.finfo(double if dtype == double else torch.float32).max


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", (1, 20))
@pytest.mark.parametrize("length", (0, 40, 5000))
def test_a_sink_near_the_largest_number_takes_all_weight(length, q_len, dtype):
    query, key, value = (random_tensor((1, 2, n, 8), dtype, i) for i, n in enumerate((q_len, max(1, length), length)))
    value = value if length else key
    for share in (0.9, 1.0):
        sinks = torch.full((2,), largest(dtype) * share, dtype=double if dtype == double else torch.float32)
        out, lse = DECODE(query, key, value, torch.tensor([length]), sinks=sinks)
        assert (out == 0).all() and torch.equal(lse, sinks[None, :, None].expand_as(lse))
        latent = DECODE_LATENT(query, noise(1, max(1, length), 10, dtype=dtype), length, sinks)
        assert (latent[0] == 0).all() and torch.equal(latent[1], lse)
    lowest = DECODE(query, key, value, torch.tensor([length]), sinks=-sinks)
    without = DECODE(query, key, value, torch.tensor([length]))
    assert torch.equal(lowest[0], without[0])
    seen = without[1].isfinite()
    assert torch.equal(lowest[1][seen], without[1][seen])


def DECODE_LATENT(query, latent, length, sinks):
    """Two heads, nope 4 + rope 4, latents of 6 + 4 numbers."""
    weight = noise(2 * (4 + 5), 6, dtype=query.dtype, seed=4)
    return torch.ops.attnjourney.mla_decode(query, latent, torch.tensor([length]), weight, sinks=sinks)


@pytest.mark.parametrize("q_len", (1, 20))
def test_the_denominator_of_a_sink(q_len):
    """100 among ordinary scores; 0.5 without keys; -inf is no sink."""
    query, key, value = noise(1, 2, q_len, 8), noise(1, 2, 30, 8, seed=1), noise(1, 2, 30, 8, seed=2)
    full, none = torch.tensor([30]), torch.tensor([0])
    sinks = torch.full((2,), 100.0, dtype=double)
    lse = DECODE(query, key, value, full, sinks=sinks)[1]
    torch.testing.assert_close(lse, torch.full_like(lse, 100.0), rtol=1e-14, atol=0)
    out, lse = DECODE(query, key, value, none, sinks=sinks / 200)
    assert (out == 0).all() and (lse == 0.5).all()
    pairs = zip(DECODE(query, key, value, full, sinks=-sinks / 0), DECODE(query, key, value, full))
    assert all(torch.equal(a, b) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------- shapes, layouts


def test_one_query_of_a_group_with_narrower_values():
    """The result takes its last dimension from the values, its scale from the queries."""
    query, key, value = noise(8, 4, 1, 32), noise(8, 1, 36, 32, seed=1), noise(8, 1, 36, 24, seed=2)
    out = DECODE(query, key, value, torch.full((8,), 36))[0]
    assert out.shape == (8, 4, 1, 24)
    weights = (query @ key.transpose(-1, -2) / 32**0.5).softmax(-1)
    torch.testing.assert_close(out, weights @ value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_keys_of_one_head_expanded_over_all_at_every_residue(dtype):
    """Stride 0 over the heads, head_dim 512, numbers of 100 beside small ones."""
    for length in range(30, 68):
        key, value = (random_tensor((1, 1, length, 512), dtype, s) for s in (1, 2))
        value[..., ::37] *= 100
        query = random_tensor((1, 4, 1, 512), dtype)
        expanded = key.expand(-1, 4, -1, -1), value.expand(-1, 4, -1, -1)
        mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
        out, lse = DECODE(query, *expanded, torch.tensor([length]), attn_mask=mask)
        copies = [x.contiguous() for x in expanded]
        pairs = zip((out, lse), DECODE(query, *copies, torch.tensor([length]), attn_mask=mask))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert_decoded(out, lse, query, key, value, label=f"[{length} keys]")


def test_no_key_heads():
    for heads in (4, 0):
        query, key = torch.zeros(2, heads, 1, 16), torch.zeros(2, 0, 8, 16)
        if heads:
            with pytest.raises(ValueError, match="key: expected a head count that divides query's, 4, got 0"):
                DECODE(query, key, key, torch.tensor([1, 2]))
        else:
            assert DECODE(query, key, key, torch.tensor([1, 2]))[0].shape == (2, 0, 1, 16)


def test_values_wider_and_narrower_than_keys():
    for v_dim in (8, 16, 24, 40, 48, 72, 80, 88, 96, 104, 112, 120):
        check_decode(1, [70, 3], heads=4, kv_heads=2, dim=128, v_dim=v_dim, dtype=DTYPES[v_dim // 8 % 4])
    check_decode(2, [70, 3], heads=4, kv_heads=1, dim=192, v_dim=128)


# ---------------------------------------------------------------------------------------------------- threads and grad


def test_callers_on_several_threads_and_a_thread_count_that_changes():
    cases = []
    for seed, length in enumerate((40, 700, 2500, 5000)):
        key, value = (random_tensor((1, 2, length, 16), seed=seed + i) for i in range(2))
        cases.append((random_tensor((1, 4, 1, 16), seed=9), key, value, torch.tensor([length])))
    expected = [DECODE(*case) for case in cases]

    def caller(n):
        results = []
        for i in range(24):
            results.append((i + n) % 4)
            out, lse = DECODE(*cases[results[-1]])
            if not (torch.equal(out, expected[results[-1]][0]) and torch.equal(lse, expected[results[-1]][1])):
                return f"case {results[-1]} differs on caller {n}"
        return ""

    for count in (1, 3, 2):
        with threads(count), ThreadPoolExecutor(4) as pool:
            assert not any(pool.map(caller, range(4)))


def test_a_prompt_that_trains_is_refused_by_a_cache_and_never_detached():
    """In eager mode, under torch.func and in a layer: an error, and the cache as it was."""
    query, key, value = noise(1, 2, 3, 8), noise(1, 2, 3, 8, seed=1), noise(1, 2, 3, 8, seed=2)
    for given in ((key.requires_grad_(), value), (key.detach(), value.clone().requires_grad_())):
        cache = KVCache(1, 2, 8, 8, dtype=double)
        with pytest.raises(RuntimeError, match="expected a tensor that does not require grad, .*no backward"):
            cache.append(*given)
        assert cache.lengths.tolist() == [0]
    key = key.detach()

    def loss(key):
        cache = KVCache(1, 2, 8, 8, dtype=double)
        cache.append(key, value)
        return cache.attend(query).sum()

    for transform in (torch.func.grad(loss), torch.func.jacrev(loss), lambda k: torch.func.jvp(loss, (k,), (k,))):
        with pytest.raises((RuntimeError, NotImplementedError), match="kv_cache_append"):
            transform(key)
    with torch.no_grad():
        assert loss(key).isfinite()
    layer = nn.GroupedQueryAttention(8, 2, 2, head_dim=8, dtype=double)
    cache = KVCache(1, 2, 8, 8, dtype=double)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(noise(1, 3, 8), cache=cache)
    assert cache.lengths.tolist() == [0]


# ---------------------------------------------------------------------------------------------------- latents


@pytest.mark.parametrize("mscale, expected", ((0.707, 1.5896), (1.0, 1.8739)))
def test_the_yarn_factor_on_the_scale_of_latents(mscale, expected):
    """qk 128 + 64, v 128, factor 40: the absorbed form over several keys, expanded by hand, with mscale's square."""
    rope = dict(method="yarn", factor=40.0, original_max_position_embeddings=4096)
    rope.update(mscale=mscale, mscale_all_dim=mscale)
    ranks = dict(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    torch.manual_seed(0)
    layer = nn.MultiheadLatentAttention(16, 2, **ranks, rope=rope, dtype=double).requires_grad_(False)
    x, cache = noise(1, 5, 16), LatentCache(1, 8, 8, 64, dtype=double)
    got = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:4], cache=cache), layer(x[:, 4:], cache=cache)], 1)

    frequencies, factor = attnjourney.rope_frequencies("yarn", 64, **{k: v for k, v in rope.items() if k != "method"})
    assert factor == 1.0
    q = layer.q_proj(x).unflatten(-1, (2, 192)).transpose(1, 2)
    down = layer.kv_a_proj_with_mqa(x)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(down[..., :8])).unflatten(-1, (2, 256)).transpose(1, 2)
    angle = torch.arange(5, dtype=double)[:, None] * frequencies

    def turn(t):  # pairs of neighbours, as DeepSeek's weights have them
        pairs = torch.view_as_complex(t.unflatten(-1, (32, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    query = torch.cat([q[..., :128], turn(q[..., 128:])], -1)
    key = torch.cat([kv[..., :128], turn(down[:, None, :, 8:]).expand(-1, 2, -1, -1)], -1)
    square = (0.1 * mscale * math.log(40) + 1) ** 2
    assert square == pytest.approx(expected, abs=5e-5)
    scores = query @ key.transpose(-1, -2) * 192**-0.5 * square
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ kv[..., 128:]
    torch.testing.assert_close(got, layer.o_proj(out.transpose(1, 2).flatten(2)), rtol=1e-11, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- a step that fails


STEPS = {
    "dense": lambda: KVCache(2, 2, 40, 8, dtype=double),
    "paged": lambda: PagedKVCache(2, 2, 40, 8, block_size=4, dtype=double),
    "ring": lambda: WindowCache(2, 2, 6, 8, max_append=4, dtype=double),
    "latent": lambda: LatentCache(2, 40, 6, 4, dtype=double),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("prompt", (3, 15))
def test_a_step_that_fails_in_any_way_leaves_no_trace(kind, prompt):
    """Bad shapes, bad options, an unknown option: what follows is as if it had never been tried."""
    weight = noise(2 * 9, 6, seed=5)

    def step(cache, n, seed, **options):
        new = [noise(2, n, 10, seed=seed)] if kind == "latent" else [noise(2, 2, n, 8, seed=seed + i) for i in (0, 1)]
        new += [weight] if kind == "latent" else []
        return cache.step(options.pop("query", noise(2, 2, n, 8, seed=seed + 2)), *new, **options)

    tried, untouched = STEPS[kind](), STEPS[kind]()
    for cache in (tried, untouched):
        step(cache, prompt, 0)
    for options, error in (
        (dict(no_such_option=1), TypeError),
        (dict(scale="1"), Exception),
        (dict(query=noise(2, 2, 2, 4)), ValueError),
        (dict(query=noise(2, 2, 2, 8).float()), RuntimeError),
        (dict(attn_mask=torch.zeros(2, 3, dtype=double)), ValueError),
        (dict(lengths=torch.tensor([2, 3])), ValueError),
    ):
        with pytest.raises(error):
            step(tried, 2, 7, **options)
        assert torch.equal(tried.lengths, untouched.lengths), options
        assert kind != "ring" or torch.equal(tried.longest, untouched.longest)
    again = noise(2, 2, prompt, 8, seed=2), *([weight] if kind == "latent" else [])
    assert torch.equal(tried.attend(*again), untouched.attend(*again))
    for n in (1, 12, 2):
        assert torch.equal(step(tried, n, 20), step(untouched, n, 20))


@pytest.mark.parametrize("kind", ("dense", "ring"))
def test_a_window_of_nothing_but_the_token_itself(kind):
    cache = KVCache(1, 2, 40, 8) if kind == "dense" else WindowCache(1, 2, 6, 8, max_append=4)
    for n in (3, 12, 2):
        query, key, value = (random_tensor((1, 2, n, 8), seed=i) for i in range(3))
        torch.testing.assert_close(cache.step(query, key, value, window_size=(0, -1)), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("appended", (100, 30, 18))
def test_a_ring_rolled_back_as_far_as_it_goes_keeps_the_window_of_the_next_token(appended):
    """A window of 9 and room for 8 more: back by 8, the next token sees the very first key that the ring has kept."""
    key, value, query = noise(1, 1, 101, 4), noise(1, 1, 101, 4, seed=1), noise(1, 1, 1, 4, seed=2)
    for pieces in ([appended], [appended - 5, 5], [1] * appended):
        ring, first = WindowCache(2, 1, 9, 4, max_append=8, dtype=double), 0
        for n in pieces:
            new = (x[:, :, first : first + n].expand(2, -1, -1, -1) for x in (key, value))
            ring.append(*new, lengths=torch.tensor([n, 0]))
            first += n
        with pytest.raises(ValueError, match=f"new_lengths: expected at least {appended - 8} .* got {appended - 9}"):
            ring.truncate(torch.tensor([appended - 9, 0]))
        ring.truncate(torch.tensor([appended - 8, 0]))
        ring.reorder(torch.tensor([1, 0]))
        assert ring.longest.tolist() == [0, appended]
        new = noise(1, 1, 1, 4, seed=5)
        out = ring.step(*(x.expand(2, -1, -1, -1) for x in (query, new, new)))[1:]
        keys, values = (torch.cat([x[:, :, appended - 17 : appended - 8], new], 2) for x in (key, value))
        torch.testing.assert_close(out, reference.attention(query, keys, values), rtol=1e-12, atol=1e-13)


def test_how_far_a_ring_rolls_back_and_what_it_answers_after():
    """All tokens while they fill the ring; then from the greatest length ever, whatever was appended since; and rows of
    a long prompt only until the next append."""
    new = [noise(1, 1, 30, 4, seed=s) for s in (0, 1)]

    def ring(n):
        cache = WindowCache(1, 1, 9, 4, max_append=8, dtype=double)
        cache.append(*(x[:, :, :n] for x in new))
        return cache

    full = ring(17)
    full.truncate(0)
    assert full.lengths.tolist() == [0]
    long = ring(30)
    assert long.attend(new[0]).shape == (1, 1, 30, 4)
    long.truncate(22)
    long.append(*(x[:, :, :1] for x in new))
    for length in (15, 21):
        with pytest.raises(ValueError, match=f"new_lengths: expected at least 22 .* got {length}"):
            long.truncate(length)
    for verb in (
        lambda cache: cache.append(*(x[:, :, :1] for x in new)),
        lambda cache: cache.truncate(30),
        lambda cache: cache.reorder(torch.tensor([0])),
        lambda cache: cache.reset(),
    ):
        other = ring(30)
        verb(other)
        with pytest.raises(ValueError, match="window_size: expected left . query rows of at most the ring's 17 keys"):
            other.attend(new[0])
    other.append(*(x[:, :, :3] for x in new))  # after the reset
    other.truncate(0)
