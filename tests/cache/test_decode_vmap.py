"""torch.func.vmap of decode and mla_decode: one call, equal to a loop over the samples."""

import pytest
import torch
from torch.func import vmap

import attnjourney
from attnjourney import KVCache
from tests.attention.test_torch_func import Names
from tests.support.decode_checks import paged
from tests.support.testing import random_tensor

double = torch.float64
SAMPLES, BATCH, HEADS, KV_HEADS, KEYS, DIM = 3, 2, 4, 2, 30, 8


def noise(*shape, seed=0):
    return random_tensor(shape, double, seed, outliers=False)


def check(function, in_dims, *arguments, calls=1):
    """function(*arguments) -> (out, lse), mapped over in_dims, against a loop; how often the kernel was called."""
    with Names() as mode:
        got = vmap(function, in_dims)(*arguments)
    assert len([n for n in mode.names if n in ("decode", "mla_decode")]) == calls
    size = next(x.shape[d] for x, d in zip(arguments, in_dims) if d is not None)
    samples = [[x if d is None else x.select(d, i) for x, d in zip(arguments, in_dims)] for i in range(size)]
    for a, *b in zip(got, *(function(*s) for s in samples), strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-12, atol=1e-12)


def decode(**options):
    return lambda q, k, v, lengths: attnjourney.decode(q, k, v, lengths, return_lse=True, **options)


QUERY = noise(BATCH, HEADS, 2, DIM, SAMPLES)
CACHES = [noise(SAMPLES, BATCH, KV_HEADS, KEYS, DIM, seed=s) for s in (1, 2)]
LENGTHS = torch.tensor([[30, 3], [7, 0], [1, 29]])


@pytest.mark.parametrize("mapped", ["all", "queries", "queries and lengths", "keys", "values"])
@pytest.mark.parametrize("place", ["dense", "ring", "paged"])
def test_places_of_keys(place, mapped):
    query = QUERY.movedim(-1, 0)
    key, value, options = *CACHES, {}
    tables = None
    if place == "paged":
        parts = [
            paged(k, v, [30, 30], 4, num_blocks=20, seed=i if mapped == "all" else 0)
            for i, (k, v) in enumerate(zip(key, value))
        ]
        key, value, tables = (torch.stack(x) for x in zip(*parts))
    if place == "ring":
        options.update(ring=True, window_size=(5, -1))
    dims = [0, 0, 0, 0]
    if mapped.startswith("queries"):
        key, value, dims = key[0], value[0], [0, None, None, 0 if "lengths" in mapped else None]
    elif mapped in ("keys", "values"):
        dims = [None, 0, None, 0] if mapped == "keys" else [None, None, 0, 0]
        query, key, value = query[0], *(x if d == 0 else x[0] for x, d in zip((key, value), dims[1:3]))
    lengths = LENGTHS if dims[3] == 0 else LENGTHS[0]
    if tables is None:
        check(decode(**options), tuple(dims), query, key, value, lengths)
        return
    table = tables if mapped == "all" else tables[0]
    run = lambda q, k, v, n, t: decode(block_table=t)(q, k, v, n)  # noqa: E731
    check(run, (*dims, 0 if mapped == "all" else None), query, key, value, lengths, table)


@pytest.mark.parametrize("shape", [(30,), (2, 30), (4, 1, 30), (2, 1, 1, 30), (1, 4, 2, 30), (2, 4, 2, 30)])
@pytest.mark.parametrize("each", [True, False])
def test_masks_and_numbers_per_head(shape, each):
    mask, sinks, slopes = (
        noise(3, *shape),
        noise(3, *shape[:1], 4)[:, 0] if len(shape) > 3 else noise(3, 2, 4),
        noise(3, 4),
    )
    run = lambda q, m, s, a: decode(attn_mask=m, sinks=s, alibi_slopes=a)(q, CACHES[0][0], CACHES[1][0], lengths)  # noqa: E731
    lengths = torch.tensor([30, 11])
    pick = (lambda x: x) if each else (lambda x: x[0])
    dim = 0 if each else None
    check(run, (4, dim, dim, dim), QUERY, pick(mask), pick(sinks), pick(slopes))


def test_many_rows_and_nested():
    query = noise(2, 3, BATCH, HEADS, 20, DIM)
    run = decode(window_size=(9, -1))
    got = vmap(vmap(run, (0, 0, 0, 0)), (0, None, None, None))(query, *CACHES, LENGTHS)
    for i in range(2):
        for j in range(3):
            expected = run(query[i, j], CACHES[0][j], CACHES[1][j], LENGTHS[j])
            for a, b in zip(got, expected):
                torch.testing.assert_close(a[i, j], b, rtol=1e-12, atol=1e-12)


@pytest.mark.smoke
def test_latents():
    latent, weight = noise(3, BATCH, KEYS, 10), noise(3, HEADS * 9, 6)
    run = lambda q, c, n, w: attnjourney.mla_decode(q, c, n, w, return_lse=True)  # noqa: E731
    check(run, (4, 0, 0, None), QUERY, latent, LENGTHS, weight[0])
    check(run, (4, None, None, None), QUERY, latent[0], LENGTHS[0], weight[0])
    check(run, (4, 0, 0, 0), QUERY, latent, LENGTHS, weight, calls=SAMPLES)


def test_a_cache_cannot_be_written_for_each_sample():
    cache, query, new = KVCache(BATCH, KV_HEADS, 9, DIM, dtype=double), QUERY.movedim(-1, 0), CACHES[0][..., :2, :]
    with pytest.raises(
        NotImplementedError, match="kv_cache_append under vmap: it writes into a cache; give it all seq"
    ):
        vmap(cache.step)(query, new, new)
    assert cache.lengths.tolist() == [0, 0]
    cache.append(new[0], new[0])
    out = vmap(cache.attend)(query)
    torch.testing.assert_close(out, torch.stack([cache.attend(q) for q in query]), rtol=1e-12, atol=1e-12)


def test_a_torch_without_what_batching_needs_is_said(monkeypatch):
    monkeypatch.delattr("torch._functorch.autograd_function.custom_function_call_vmap_helper")
    with pytest.raises(NotImplementedError, match="decode under vmap: torch .* no longer has what batching it needs"):
        vmap(decode(), (4, None, None, None))(QUERY, CACHES[0][0], CACHES[1][0], LENGTHS[0])
    decode()(QUERY[..., 0], CACHES[0][0], CACHES[1][0], LENGTHS[0])  # all else works


def test_gradients_are_refused_inside():
    query = QUERY.movedim(-1, 0)
    with pytest.raises(RuntimeError, match="query: expected a tensor that does not require grad"):
        vmap(torch.func.grad(lambda q: decode()(q, CACHES[0][0], CACHES[1][0], LENGTHS[0])[0].sum()))(query)
