"""Every layer over every cache: a prompt in chunks, then steps, equals one full pass over all tokens."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnjourney import KVCache, LatentCache, PagedKVCache, WindowCache, nn, reference
from attnjourney.nn import causal_self_attention, grouped_query_attention, multihead_latent_attention
from tests.support.layer_checks import assert_agree
from tests.support.testing import DTYPES, assert_close_to_reference, random_tensor

WIDTH, WINDOW = 16, 5
RANKS = dict(kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
YARN = dict(method="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.3)


def gqa(**options):
    return lambda dtype: nn.GroupedQueryAttention(WIDTH, 4, 2, dtype=dtype, **options)


LAYERS = {
    "gpt": lambda dtype: nn.CausalSelfAttention(WIDTH, 4, dtype=dtype),
    "mha": lambda dtype: nn.MultiheadAttention(WIDTH, 4, batch_first=True, dtype=dtype),
    "gqa": gqa(),
    "gqa rope": gqa(rope=100.0, bias=True, qk_norm=True),
    "gqa partial rope": gqa(rope=dict(rotary_dim=2)),
    "gqa dynamic": gqa(rope=dict(method="dynamic", factor=2.0, max_position_embeddings=8, seq_len=40)),
    "gqa window": gqa(rope=100.0, window_size=(WINDOW, -1)),
    "gqa all": gqa(rope=100.0, window_size=(WINDOW, 0), softcap=2.0, sinks=True, head_dim=6),
    "mla": lambda dtype: nn.MultiheadLatentAttention(WIDTH, 3, q_lora_rank=5, **RANKS, rope=100.0, dtype=dtype),
    "mla yarn": lambda dtype: nn.MultiheadLatentAttention(WIDTH, 3, q_lora_rank=None, **RANKS, rope=YARN, dtype=dtype),
}


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    layer = LAYERS[name](dtype).eval().requires_grad_(False)
    if getattr(layer, "sinks", None) is not None:
        layer.sinks.normal_()
    return layer


def sequence(batch, seq, dtype=torch.float64, seed=0):
    return random_tensor((batch, seq, WIDTH), dtype, seed=seed, outliers=False)


def caches(layer, batch, capacity, dtype):
    """By kind, every cache that this layer can run over."""
    if isinstance(layer, nn.MultiheadLatentAttention):
        found = {"latent": LatentCache(batch, capacity, RANKS["kv_lora_rank"], RANKS["qk_rope_head_dim"], dtype=dtype)}
    else:
        heads = getattr(layer, "num_kv_heads", layer.num_heads)
        sizes = dict(batch=batch, num_kv_heads=heads, head_dim=getattr(layer, "head_dim", WIDTH // 4), dtype=dtype)
        found = {
            "dense": KVCache(capacity=capacity, **sizes),
            "paged": PagedKVCache(capacity=capacity, block_size=4, **sizes),
        }
        if getattr(layer, "window_size", (-1, -1))[0] >= 0:
            found["ring"] = WindowCache(window=WINDOW, max_append=3, **sizes)
    for cache in found.values():
        for x in (cache.key, cache.value):
            if x is not None:
                x.fill_(math.nan)
    return found


def call(layer, x, padding=None, cache=None, **options):
    if isinstance(layer, nn.MultiheadAttention):
        options.update(need_weights=False, is_causal=True)
        return layer(x, x, x, padding, cache=cache, **options)[0]
    return layer(x, key_padding_mask=padding, cache=cache, **options)


def full_pass(layer, x):
    """All tokens at once in plain PyTorch, without a cache."""
    if isinstance(layer, nn.MultiheadAttention):
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        theirs = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True, dtype=x.dtype)
        theirs.load_state_dict(layer.state_dict())
        return theirs.requires_grad_(False)(x, x, x, attn_mask=past, need_weights=False)[0]
    with pytest.MonkeyPatch.context() as patch:
        for module in (causal_self_attention, grouped_query_attention, multihead_latent_attention):
            patch.setattr(module, "attention", reference.attention)
        return layer(x, key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))


def in_chunks(layer, x, cache, chunks, **options):
    outs, first = [], 0
    for n in chunks:
        outs.append(call(layer, x[:, first : first + n], cache=cache, **options))
        first += n
    assert first == x.shape[1]
    return torch.cat(outs, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_prefill_then_decode_equals_one_full_pass(name, dtype):
    layer, length = make(name, dtype), 33
    x = sequence(2, length, dtype)
    exact, plain = full_pass(copy.deepcopy(layer).double(), x.double()), full_pass(layer, x)
    for chunks in ([28, 1, 1, 3], [7] * 4 + [5], [1] * length):
        for kind, cache in caches(layer, 2, length, dtype).items():
            out = in_chunks(layer, x, cache, chunks)
            label = f"{name} {kind} {chunks[:2]}"
            if dtype == torch.float64:
                assert_agree(out, exact, label)
            else:
                assert_close_to_reference(out, plain, exact, name=label)
            assert cache.lengths.tolist() == [length] * 2


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.data())
def test_any_chunks_of_ragged_rows(data):
    """Chunks with padding anywhere, rollbacks and reorders: every row equals its own full pass."""
    draw = data.draw
    layer, batch = make(draw(st.sampled_from(sorted(LAYERS)))), draw(st.integers(1, 3))
    kinds = caches(layer, batch, 64, torch.float64)
    kind = draw(st.sampled_from(sorted(kinds)))
    cache, rows = kinds[kind], [sequence(1, 0)[0] for _ in range(batch)]
    for step in range(draw(st.integers(1, 5))):
        n = draw(st.integers(1, 12))
        x = sequence(batch, n, seed=step)
        padding = None
        if draw(st.booleans()):
            bits = draw(st.lists(st.booleans(), min_size=batch * n, max_size=batch * n))
            padding = torch.tensor(bits).view(batch, n)
            x = x.masked_fill(padding.unsqueeze(-1), math.nan)  # must not be read
        out = call(layer, x, padding, cache)
        for b in range(batch):
            real = torch.arange(n) if padding is None else (~padding[b]).nonzero()[:, 0]
            rows[b] = torch.cat([rows[b], x[b, real]])
            if len(real):
                expected = full_pass(layer, rows[b][None])[0, -len(real) :]
                assert_agree(out[b, real], expected, f"row {b} of step {step}, {kind}")
        assert cache.lengths.tolist() == [len(r) for r in rows]
        if draw(st.booleans()) and kind != "ring":
            keep = [draw(st.integers(max(0, len(r) - 3), len(r))) for r in rows]
            cache.truncate(torch.tensor(keep))
            rows = [r[:k] for r, k in zip(rows, keep)]
        if draw(st.booleans()):
            index = draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
            cache.reorder(torch.tensor(index))
            rows = [rows[i] for i in index]


@pytest.mark.parametrize("name", ["gqa rope", "mla", "gpt"])
def test_left_padded_rows_equal_single_runs(name):
    """Prompts of 30 and 25 tokens in one batch, one step each."""
    layer, prompt, after = make(name), sequence(2, 30), sequence(2, 1, seed=1)
    padding = torch.arange(30) < torch.tensor([[0], [5]])
    cache = next(iter(caches(layer, 2, 40, torch.float64).values()))
    first, second = call(layer, prompt, padding, cache), call(layer, after, None, cache)
    for b, pad in enumerate((0, 5)):
        single = next(iter(caches(layer, 1, 40, torch.float64).values()))
        assert_agree(first[b, pad:], call(layer, prompt[b : b + 1, pad:], None, single)[0], "prompt")
        assert_agree(second[b], call(layer, after[b : b + 1], None, single)[0], "step")


def test_speculative_decoding():
    """Four drafted tokens at once, of which one and three are accepted; then the next ones."""
    layer, x = make("gqa rope"), sequence(2, 20)
    for cache in caches(layer, 2, 40, torch.float64).values():
        call(layer, x[:, :8], None, cache)
        draft = sequence(2, 4, seed=5)
        call(layer, draft, None, cache)
        cache.truncate(torch.tensor([9, 11]))
        out = call(layer, x[:, 8:10], None, cache)
        for b, kept in enumerate((1, 3)):
            tokens = torch.cat([x[b, :8], draft[b, :kept], x[b, 8:10]])[None]
            assert_agree(out[b], full_pass(layer, tokens)[0, -2:], f"row {b}")


def test_positions_can_be_given():
    layer, x = make("gqa rope"), sequence(2, 6)
    at = torch.tensor([[3, 4, 9, 10, 11, 20], [0, 1, 2, 3, 4, 5]])
    cache = caches(layer, 2, 8, torch.float64)["dense"]
    out = torch.cat([layer(x[:, a:b], position_ids=at[:, a:b], cache=cache) for a, b in ((0, 4), (4, 6))], 1)
    assert_agree(out, layer(x, position_ids=at), "out")


def test_given_positions_go_with_their_tokens_past_the_padding():
    layer, x = make("gqa rope"), sequence(1, 6)
    at, padding = torch.tensor([3, 4, 9, 10, 11, 20]), torch.tensor([[False, True, False, False, True, True]])
    out = layer(x, position_ids=at, key_padding_mask=padding, cache=caches(layer, 1, 8, torch.float64)["dense"])
    real = (~padding[0]).nonzero()[:, 0]
    assert_agree(out[:, real], layer(x[:, real], position_ids=at[real]), "out")


# ---- cross-attention


def test_cross_attention_of_gqa():
    torch.manual_seed(0)
    layer = nn.GroupedQueryAttention(
        WIDTH, 4, 2, kv_dim=10, is_causal=False, rope=100.0, softcap=2.0, dtype=torch.float64
    )
    layer.requires_grad_(False)
    x, memory = sequence(2, 6), random_tensor((2, 9, 10), torch.float64, outliers=False)
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    expected = layer(x, memory, key_padding_mask=padding)
    cache = KVCache(2, 2, 9, 4, dtype=torch.float64)
    out = [layer(x[:, :2], memory[:, :5], key_padding_mask=padding[:, :5], cache=cache, position_ids=torch.arange(2))]
    out[0] = layer(x[:, :2], memory[:, 5:], key_padding_mask=padding[:, 5:], cache=cache, position_ids=torch.arange(2))
    out += [layer(x[:, i : i + 1], cache=cache, position_ids=torch.tensor([i])) for i in range(2, 6)]
    assert_agree(torch.cat(out, 1), expected, "out")
    assert cache.lengths.tolist() == [9, 4]
    with pytest.raises(ValueError, match="position_ids: expected those of x beside a cache in cross-attention"):
        layer(x, cache=cache)
    with pytest.raises(ValueError, match="key_padding_mask: expected None without key_value"):
        layer(x, key_padding_mask=padding, cache=cache, position_ids=torch.arange(6))
    layer.is_causal = True
    with pytest.raises(ValueError, match="cache: expected a layer with is_causal=False"):
        layer(x, memory, cache=cache)


@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(batch_first, further):
    """Self-attention with a mask, weights, right padding; cross-attention; further keys; one sample."""
    torch.manual_seed(0)
    options = dict(add_bias_kv=further, add_zero_attn=further, batch_first=batch_first, dtype=torch.float64)
    layer = nn.MultiheadAttention(WIDTH, 4, **options).requires_grad_(False)

    def to(x):
        return x if batch_first or x.dim() == 2 else x.transpose(0, 1)

    x, mask = sequence(2, 7), sequence(2 * 4, 7, seed=3)[..., :7]
    expected, weights = layer(to(x), to(x), to(x), attn_mask=mask, is_causal=True, average_attn_weights=False)
    cache, outs = KVCache(2, 4, 9, 4, dtype=torch.float64), []
    for a, b in ((0, 4), (4, 7)):
        y = to(x[:, a:b])
        out, w = layer(y, y, y, attn_mask=mask[:, a:b, :b], is_causal=True, need_weights=not further,
                       average_attn_weights=False, cache=cache)  # fmt: skip
        outs.append(to(out))
        if not further:
            assert_agree(w, weights[:, :, a:b, :b], "weights")
    assert_agree(torch.cat(outs, 1), to(expected), "out")

    query, padding = sequence(2, 3, seed=4), torch.arange(7) >= torch.tensor([[7], [4]])
    expected, weights = layer(to(query), to(x), to(x), padding)
    cache.reset()
    first = layer(to(query), to(x), to(x), padding, cache=cache, need_weights=False)[0]
    assert_agree(first, expected, "cross")
    again, w = layer(to(query), None, None, cache=cache, need_weights=not further)
    assert_agree(again, expected, "cross again")
    assert further or (w - weights).abs().max() < 1e-12

    single = KVCache(1, 4, 9, 4, dtype=torch.float64)
    one = layer(x[0], x[0], x[0], padding[1], cache=single, need_weights=False)[0]
    y = x[:1, :4]
    assert_agree(one[:4], to(layer(to(y), to(y), to(y), need_weights=False)[0])[0], "one sample")


def test_right_padding_sorts_the_mask_and_the_weights_too():
    layer, x = make("mha"), sequence(2, 6)
    padding = torch.tensor([[False] * 6, [False, True, False, False, True, True]])
    mask = torch.where(sequence(1, 6)[0, :, :6] > 0.5, -1.0, 0.0).double()
    cache = KVCache(2, 4, 8, 4, dtype=torch.float64)
    out, weights = layer(x, x, x, padding, attn_mask=mask, cache=cache)
    real = (~padding[1]).nonzero()[:, 0]
    y = x[1:, real]
    expected, expected_weights = layer(y, y, y, attn_mask=mask[real][:, :3])
    assert_agree(out[1, real], expected[0], "out")
    assert_agree(weights[1, real][:, :3], expected_weights[0], "weights")


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
def test_weights_under_a_mask_as_wide_as_the_cache(boolean, each):
    """Columns past the longest length belong to no key: what they hold changes nothing, and the weights stop before."""
    layer, x, capacity = make("mha"), sequence(2, 7), 12
    mask = random_tensor((2 * 4, 7, capacity) if each else (7, capacity), torch.float64, 3, outliers=False)
    mask = mask > 0.8 if boolean else mask  # True = blocked
    cache = KVCache(2, 4, capacity, 4, dtype=torch.float64)
    for first, last in ((0, 4), (4, 7)):
        rows = mask[..., first:last, :].clone()
        rows[..., last:] = True if boolean else math.nan
        y = x[:, first:last]
        out, weights = layer(y, y, y, attn_mask=rows, is_causal=True, average_attn_weights=False, cache=cache)
        seen, own = x[:, :last], mask[..., :last, :last]
        expected, expected_weights = layer(seen, seen, seen, attn_mask=own, is_causal=True, average_attn_weights=False)
        assert weights.shape == (2, 4, last - first, last)
        assert_agree(weights, expected_weights[:, :, first:], "weights")
        assert_agree(out, expected[:, first:], "out")


# ---- bad input


def state(cache):
    names = ("lengths", "block_table", "block_refs", "longest")
    kept = [getattr(cache, name).clone() for name in names if getattr(cache, name, None) is not None]
    for x in (cache.key, cache.value):
        if x is not None and cache.key.shape[0] == cache.lengths.shape[0]:
            kept += [x[b, :, :n].clone() for b, n in enumerate(cache.lengths.tolist()) if n <= x.shape[2]]
    return kept


@pytest.mark.parametrize("name", LAYERS)
def test_bad_input_leaves_the_cache_as_it_was(name):
    layer, x = make(name), sequence(2, 3)
    other = KVCache(2, 1, 8, 3, dtype=torch.float64) if "mla" in name else LatentCache(2, 8, 4, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="cache: expected a (LatentCache|KeyValueCache), got"):
        call(layer, x, cache=other)
    for kind, cache in caches(layer, 2, 8, torch.float64).items():
        check_bad_input(layer, cache, kind)


def check_bad_input(layer, cache, kind):
    x, padding = sequence(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    call(layer, x, cache=cache)
    before = state(cache)
    bad = {
        "cache: expected one of the batch size of the input, 3, got 2": lambda: call(
            layer, sequence(3, 3), cache=cache
        ),
        "key_padding_mask: expected dtype torch.bool beside a cache": lambda: call(layer, x, padding.double(), cache),
        "key_padding_mask: expected shape": lambda: call(layer, x, padding[:, :2], cache),
        "(x|query): expected shape": lambda: call(layer, x[..., :8], cache=cache),
    }
    if kind != "ring":
        bad["key: the cache overflows: expected at most 5 new tokens"] = lambda: call(
            layer, sequence(2, 6), cache=cache
        )
    for message, run in bad.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            run()
        assert all(torch.equal(a, b) for a, b in zip(state(cache), before)), f"{kind} {message}"
    layer.requires_grad_()
    with pytest.raises(RuntimeError, match="expected a tensor that does not require grad.*no_grad"):
        call(layer, x, cache=cache)
    layer.requires_grad_(False)
    assert all(torch.equal(a, b) for a, b in zip(state(cache), before)), kind


def test_options_that_do_not_go_with_a_cache():
    layer, x = make("gqa window"), sequence(1, 4)
    narrow = WindowCache(1, 2, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="window_size: expected a left part from 0 to the cache's window, 3, got 5"):
        layer(x, cache=narrow)
    assert narrow.lengths.tolist() == [0]
    dropout = nn.CausalSelfAttention(WIDTH, 4, dropout=0.1, dtype=torch.float64).requires_grad_(False)
    cache = KVCache(1, 4, 8, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="cache: expected a layer in evaluation or without dropout beside one, got"):
        dropout(x, cache=cache)
    dropout.eval()(x, cache=cache)
    growing = gqa(rope=dict(method="dynamic", factor=2.0, max_position_embeddings=8))(torch.float64)
    with pytest.raises(ValueError, match="rope: expected a seq_len beside method 'dynamic' and a cache"):
        growing(x, cache=KVCache(1, 2, 8, 4, dtype=torch.float64))
    mha, padding = make("mha"), torch.zeros(1, 4, dtype=torch.bool)
    cache.reset()
    for message, run in {
        "need_weights: expected False beside a PagedKVCache": lambda: mha(
            x, x, x, cache=PagedKVCache(1, 4, 8, 4, dtype=torch.float64)
        ),
        "is_causal: expected False in cross-attention over a cache": lambda: mha(
            x, x[:, :2], x[:, :2], is_causal=True, cache=cache
        ),
        "key_padding_mask: expected None where key or value is None": lambda: mha(x, None, None, padding, cache=cache),
        "key: expected a tensor without a cache, got None": lambda: mha(x, None, None),
        r"attn_mask: expected shape \(4, S\) or": lambda: mha(x, x, x, attn_mask=torch.zeros(3, 4), cache=cache),
        "attn_mask: expected a last dimension of 1 or of the longest length, 4": lambda: mha(
            x, x, x, attn_mask=torch.zeros(4, 5), cache=cache
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            run()
        assert cache.lengths.tolist() == [0], message


@pytest.mark.parametrize("name", LAYERS)
def test_compile(name):
    layer, x = make(name), sequence(2, 7)
    padding = torch.arange(4) < torch.tensor([[0], [1]])
    for kind in caches(layer, 2, 8, torch.float64):
        torch._dynamo.reset()
        results = []
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            cache = caches(layer, 2, 8, torch.float64)[kind]
            results.append([run(layer, x[:, :4], padding, cache), run(layer, x[:, 4:5], None, cache), cache.lengths])
        assert_agree(results[1][0][:, 1:], results[0][0][:, 1:], kind)
        assert_agree(results[1][1], results[0][1], kind)
        assert torch.equal(results[1][2], results[0][2])
