"""Caches of bytes on a CUDA device: what is stored beside the CPU's bits, and attention over it against float64."""

import pytest
import torch

import attnjourney
from attnjourney import KVCache, PagedKVCache, WindowCache
from tests.cache.test_decode_options import OPTIONS, check, make, noise
from tests.cache.test_quantized_cache import BYTES, DTYPES, check_latents, quantized, rows
from tests.cuda.test_decode import to_device
from tests.sparse.test_sparse_latents import BYTES as CHOSEN
from tests.sparse.test_sparse_latents import check_bytes
from tests.support.decode_checks import paged
from tests.support.testing import random_tensor, row_id

pytestmark = pytest.mark.cuda
CACHES = {
    "dense": lambda **how: KVCache(3, 2, 200, 48, 32, **how),
    "ring": lambda **how: WindowCache(3, 2, 20, 48, 32, max_append=8, **how),
    "paged": lambda **how: PagedKVCache(3, 2, 200, 48, 32, block_size=4, num_blocks=160, **how),
}


@pytest.mark.parametrize(
    "name, kind, dtype, q_len, dims",
    rows(
        name=OPTIONS, kind=BYTES, dtype=DTYPES, q_len=(1, 5, 20, 150), dims=((64, 48), (128, 128), (256, 80), (33, 17))
    ),
)
def test_values(name, kind, dtype, q_len, dims):
    query, key, value, lengths, options = make([name], q_len, [450, 0, 337], dtype, 8, 2, *dims)
    blocks = paged(key, value, lengths.tolist(), 16)
    for caches, where in (((key, value), {}), (blocks[:2], {"block_table": blocks[2]})):
        *caches, scales = quantized(*caches, kind)
        given = {n: to_device(x) for n, x in {**options, **scales, **where}.items()}
        out = attnjourney.decode(*map(to_device, (query, *caches, lengths)), return_lse=True, **given)
        check([x.cpu() for x in out], query, *caches, lengths, options | scales | where, f"{name} {list(where)}")


@pytest.mark.parametrize("where, kind, dtype", rows(where=CACHES, kind=BYTES, dtype=DTYPES))
def test_the_verbs_do_what_they_do_on_the_cpu(where, kind, dtype):
    caches = [CACHES[where](dtype=kind, device=device) for device in ("cpu", "cuda")]
    for seed, n in enumerate((8, 3, 1, 6, 150) if where != "ring" else (8, 3, 1, 6)):
        key, value = (random_tensor((3, 2, n, d), dtype, 10 * seed + i) for i, d in enumerate((48, 32)))
        for cache in caches:
            to = cache.key.device
            cache.append(key.to(to), value.to(to), torch.tensor([n, n // 2, n], device=to))
            if seed == 1:
                cache.reorder(torch.tensor([1, 1, 0], device=to))
            if seed == 2:
                cache.truncate(cache.lengths - 2)
        query = noise(3, 4, n, 48, dtype=dtype, seed=seed + 90)
        outs = [cache.attend(query.to(cache.key.device)).cpu() for cache in caches]
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
        ours, theirs = caches
        assert torch.equal(ours.lengths, theirs.lengths.cpu())
        if where == "dense":
            for b, length in enumerate(ours.lengths.tolist()):
                for name in ("key", "value", "key_scale", "value_scale"):
                    x, y = (getattr(c, name)[b, :, :length].cpu() for c in caches)
                    raw = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (x, y))
                    assert torch.equal(*raw), name


@pytest.mark.parametrize("kind, dtype, q_len", rows(kind=BYTES, dtype=DTYPES, q_len=(1, 3, 40)))
def test_latents(kind, dtype, q_len):
    check_latents(kind, dtype, q_len, "cuda")


@pytest.mark.parametrize("row", CHOSEN, ids=row_id)
def test_latents_that_indices_name(row):
    check_bytes(**row, device="cuda")
