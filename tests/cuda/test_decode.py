"""Decoding and caches on a CUDA device: values against float64, every place of keys, few rows and many, graphs."""

import math

import pytest
import torch

import attnjourney
from attnjourney import KVCache, LatentCache, PagedKVCache, WindowCache
from tests.cache.test_decode_options import check, make, noise
from tests.emulator.test_caches import PAGED, Pool, assert_same, make_state, model_append, tokens
from tests.emulator.test_decode import CASES, place
from tests.support.decode_checks import assert_decoded, dense_cache
from tests.support.testing import DTYPES, random_tensor

pytestmark = pytest.mark.cuda
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (40, 24), (33, 17))
MANY = [  # rows enough for attention's own kernels
    ("dense", ("softcap", "sinks"), 150, [300, 160, 20], 4, 2),
    ("paged", ("prefix", "alibi"), 150, [300, 160], 4, 1),
    ("paged", ("mask", "sinks_per_item"), 70, [100, 71], 4, 2),
    ("dense", ("bool_mask",), 70, [100, 90], 2, 1),
    ("ring", ("window",), 18, [13, 40, 200], 8, 1),
]


def to_device(x):
    """x on the device with the strides it has."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("case", [*CASES, *MANY], ids=str)
def test_values(case, dim, dtype):
    check_values(case, dim, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [(512, 512), (264, 300)], ids=str)
@pytest.mark.parametrize("case", [c for c in (*CASES, *MANY) if c[0] != "ring" or "mask" not in str(c[1])], ids=str)
def test_wide_heads(case, dim, dtype):
    """Attention's kernels for wide heads, however few the rows."""
    check_values(case, dim, dtype)


def check_values(case, dim, dtype):
    kind, names, q_len, lengths, heads, kv_heads, *_ = case
    query, key, value, lengths, options = make(names, q_len, lengths, dtype, heads, kv_heads, *dim)
    *cache, where = place(kind, key, value, lengths)
    given = {n: to_device(x) for n, x in {**options, **where}.items()}
    result = attnjourney.decode(*map(to_device, (query, *cache, lengths)), return_lse=True, **given)
    check([x.cpu() for x in result], query, key, value, lengths, options, str(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch,length", [(1, 5000), (16, 700), (3, 33)])
def test_split_keys(batch, length, dtype):
    """As many blocks as the device has room for; the same bits every time."""
    lengths = [max(0, length - 37 * b) for b in range(batch)]
    key, value = dense_cache(lengths, 8, length + 5, 128, 128, dtype)
    query = random_tensor((batch, 32, 1, 128), dtype, 7)
    device = [to_device(x) for x in (query, key, value, torch.tensor(lengths))]
    out, lse = attnjourney.decode(*device, return_lse=True)
    keys, values = ([x[b, :, :n] for b, n in enumerate(lengths)] for x in (key, value))
    assert_decoded(out.cpu(), lse.cpu(), query, keys, values)
    for _ in range(3):
        again = attnjourney.decode(*device, return_lse=True)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("q_len", (1, 200))
def test_values_are_clamped(q_len):
    key, value = dense_cache([40, 40], 2, 40, 64, 64, torch.bfloat16)
    query = noise(2, 4, q_len, 64, dtype=torch.bfloat16, seed=3)
    run = [to_device(x) for x in (query, key, value)]
    out, lse = attnjourney.decode(*run, torch.tensor([-3, 90], device="cuda"), return_lse=True)
    whole = attnjourney.decode(*run, torch.tensor([40, 40], device="cuda"), return_lse=True)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    assert torch.equal(out[1], whole[0][1]) and torch.equal(lse[1], whole[1][1])


@pytest.mark.parametrize("ring", (False, True))
@pytest.mark.parametrize("dims", ((5, 3), (8, 16), (264, 128)))
def test_appends(ring, dims):
    state = make_state(3, 9, *dims)
    device = {name: x.cuda() for name, x in state.items()}
    for seed, (n, counts) in enumerate(((4, [4, 1, 0]), (1, None), (5, [0, 5, 9]), (3000, [3000, 3, -2]), (1, None))):
        key, value = tokens(state, n, seed)
        state = model_append(state, key, value, counts, ring)
        torch.ops.attnjourney.kv_cache_append(
            device["key_cache"], device["value_cache"], device["lengths"], key.cuda(), value.cuda(),
            counts=None if counts is None else torch.tensor(counts, device="cuda"), ring=ring,
        )  # fmt: skip
        assert_same({name: x.cpu() for name, x in device.items()}, state, f"append {n} {counts}")


def test_paged_verbs():
    ops = torch.ops.attnjourney
    state = make_state(4, 4, 8, 8, 300, 5)
    state["block_refs"][:255] = 1
    pool, device = Pool(state), {name: x.cuda() for name, x in state.items()}
    table = (device["lengths"], device["block_table"], device["block_refs"])
    for seed, (verb, *given) in enumerate(PAGED):
        numbers = None if given[-1] is None else torch.tensor(given[-1], device="cuda")
        if verb == "append":
            key, value = tokens(state, given[0], seed)
            pool.append(key, value, given[1])
            new = (key.cuda(), value.cuda())
            ops.paged_cache_append(device["key_cache"], device["value_cache"], *table, *new, counts=numbers)
        elif verb == "truncate":
            pool.truncate(given[0])
            ops.paged_cache_truncate(*table, numbers, block_size=4)
        else:
            pool.reorder(given[0])
            ops.paged_cache_reorder(*table, numbers)
        assert_same({name: x.cpu() for name, x in device.items()}, pool.state, f"{verb} {given}, step {seed}")


def make_cache(kind, device, capacity=320, dtype=torch.bfloat16):
    sizes = dict(batch=2, num_kv_heads=2, head_dim=64, dtype=dtype, device=device)
    if kind == "window":
        return WindowCache(window=50, max_append=16, **sizes)
    return {"dense": KVCache, "paged": PagedKVCache}[kind](capacity=capacity, **sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("dense", "paged", "window"))
def test_prefill_then_decode_equals_one_full_causal_pass(kind, dtype):
    window = (50, -1) if kind == "window" else (-1, -1)
    query, key, value = (random_tensor((2, h, 300, 64), dtype, i) for i, h in enumerate((4, 2, 2)))
    cache, outs = make_cache(kind, "cuda", dtype=dtype), []
    first = 0
    for n in (270, 9, *[1] * 21):
        q, k, v = (x[:, :, first : first + n].cuda() for x in (query, key, value))
        outs.append(cache.step(q, k, v))
        first += n
    assert cache.lengths.tolist() == [300, 300]
    cache.check()
    assert_decoded(torch.cat(outs, 2).cpu(), None, query, key, value, window_size=window)


@pytest.mark.parametrize("kind", ("dense", "paged", "window"))
def test_the_verbs_do_what_they_do_on_the_cpu(kind):
    caches = [make_cache(kind, device) for device in ("cpu", "cuda")]
    for seed, n in enumerate((16, 3, 1, 12)):
        key, value = (random_tensor((2, 2, n, 64), torch.bfloat16, 10 * seed + i) for i in range(2))
        for cache in caches:
            where = cache.key.device
            cache.append(key.to(where), value.to(where), torch.tensor([n, n // 2], device=where))
            if seed == 1:
                cache.reorder(torch.tensor([1, 1], device=where))
            if seed == 2:
                cache.truncate(cache.lengths - 2)
        query = random_tensor((2, 4, 1, 64), torch.bfloat16, seed + 90)
        outs = [cache.attend(query.to(cache.key.device)).cpu() for cache in caches]
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
        assert torch.equal(caches[0].lengths, caches[1].lengths.cpu())
    for cache in caches:
        cache.reset()
        assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("heads", (4, 64))
def test_a_tree_of_drafted_tokens(heads):
    """Each token as if its path were alone; nothing waits."""
    parents, lengths = torch.tensor([-1, 0, 0, 1, 2, 2]), [300, 6, 70]
    key, value = dense_cache(lengths, 4, 320, 64, 64, torch.bfloat16)
    query = noise(3, heads, 6, 64, dtype=torch.bfloat16, seed=3)
    device = [to_device(x) for x in (query, key, value, torch.tensor(lengths), parents)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = attnjourney.tree_mask(device[4], device[3], keys=320)
        out = attnjourney.decode(*device[:4], is_causal=False, attn_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for b, length in enumerate(lengths):
        text = list(range(length - 6))
        for i, path in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5])):
            keys = text + [length - 6 + j for j in path]
            own = [x[b, None, :, keys] for x in (key, value)]
            assert_decoded(out[b, None, :, i : i + 1].cpu(), None, query[b, None, :, i : i + 1], *own)


def test_latents():
    cache = LatentCache(2, 9, 24, 8, dtype=torch.float16, device="cuda")
    latent = random_tensor((2, 4, 32), torch.float16)
    cache.append(latent.cuda(), torch.tensor([4, 1], device="cuda"))
    assert torch.equal(cache.latent[0, :4].cpu(), latent[0]) and torch.equal(cache.latent[1, 0].cpu(), latent[1, 3])
    assert cache.lengths.tolist() == [4, 1]


@pytest.mark.parametrize("kind", ("dense", "paged"))
def test_what_does_not_fit_is_said_by_check(kind):
    cache = make_cache(kind, "cuda", capacity=64)
    new = torch.zeros(2, 2, 40, 64, dtype=torch.bfloat16, device="cuda")
    cache.append(new, new)
    cache.check()
    cache.append(new, new)
    with pytest.raises(
        ValueError, match="key: the cache overflowed: expected at most 64 tokens.*got 80 for batch row 0"
    ):
        cache.check()


@pytest.mark.parametrize("kind", ("dense", "paged", "window"))
def test_a_graph_of_steps(kind):
    """A captured step, played many times, is as many steps."""
    plain, captured = (make_cache(kind, "cuda") for _ in range(2))
    inputs = [random_tensor((12, 2, h, 1, 64), torch.bfloat16, i).cuda() for i, h in enumerate((4, 2, 2))]
    expected = [plain.step(*(x[i] for x in inputs)) for i in range(12)]
    step = [x[0].clone() for x in inputs]
    make_cache(kind, "cuda").step(*step)  # what the first call loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.step(*step)
    captured.reset()
    for i in range(12):
        for to, x in zip(step, inputs):
            to.copy_(x[i])
        graph.replay()
        assert torch.equal(out, expected[i]), i
    assert captured.lengths.tolist() == [12, 12]


def test_no_verb_waits():
    cache = make_cache("paged", "cuda")
    query, new = (torch.zeros(2, h, 3, 64, dtype=torch.bfloat16, device="cuda") for h in (4, 2))
    index = torch.tensor([1, 0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.step(query, new, new)
        cache.reorder(index)
        cache.truncate(cache.lengths - 1)
        cache.reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dim": 520}, "query: expected head dimensions of at most 512 on CUDA, got 520"),
        ({"mask": 50}, "attn_mask: expected a last dimension of at most the capacity, 40"),
    ],
)
def test_what_is_not_served_raises(change, message):
    x = torch.zeros(1, 1, 40, change.get("dim", 8), device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, change["mask"], dtype=torch.bool, device="cuda") if "mask" in change else None
    with pytest.raises(ValueError, match=message):
        attnjourney.decode(x[:, :, :1], x, x, torch.tensor([3], device="cuda"), attn_mask=mask)
