"""estimate against the count of bytes, which test_ring_attention.py holds to what is sent."""

import pytest
import torch

from attnjourney.distributed import AttentionConfig, Bandwidths, bytes_sent, estimate

SPEEDS = Bandwidths(flops=4e14, rows=5e10, heads=4e11)


def config(**changes):
    return AttentionConfig(**{**dict(batch=2, tokens=64, heads=8, kv_heads=4, head_dim=6, v_head_dim=5), **changes})


@pytest.mark.parametrize("mesh, scheme", [((4, 1), "ring"), ((4, 1), "all_gather"), ((1, 4), "ring"), ((1, 1), "ring")])
@pytest.mark.parametrize("changes", [{}, dict(window=7), dict(dtype=torch.float64, is_causal=False)], ids=str)
def test_bytes_are_those_of_the_rank_that_sends_most(mesh, scheme, changes):
    c = config(**changes)
    size = mesh[0] * mesh[1]
    rows = c.tokens // size
    shapes = [(2, 8, rows, 6), (2, 4, rows, 6), (2, 4, rows, 5)]
    masks = dict(is_causal=c.is_causal, window_size=(-1 if c.window is None else c.window, -1), order="zigzag")
    name = "ulysses" if mesh[1] > 1 else scheme
    found = estimate(c, mesh, SPEEDS, scheme)
    for backward, expected in ((False, found.forward_bytes), (True, found.backward_bytes)):
        counts = [bytes_sent(name, *shapes, c.dtype, r, size, **masks, backward=backward) for r in range(size)]
        if "window" in changes and mesh == (4, 1) and scheme == "ring":
            assert max(counts) <= expected
        else:
            assert max(counts) == expected


def test_time_and_memory():
    c = config(tokens=1 << 20, heads=32, kv_heads=8, head_dim=128, v_head_dim=128, batch=1)
    ring, gathered = (estimate(c, (64, 1), SPEEDS, scheme) for scheme in ("ring", "all_gather"))
    assert ring.seconds < gathered.seconds and ring.memory < gathered.memory
    assert gathered.seconds == pytest.approx(gathered.work_seconds + gathered.transfer_seconds)
    latent = estimate(config(latent=4), (4, 1), SPEEDS)
    assert latent.forward_bytes == estimate(config(), (4, 1), SPEEDS).forward_bytes * 4 // 44


@pytest.mark.parametrize("mesh, scheme", [((4, 3), "ring"), ((0, 1), "ring"), ((4, 1), "tree")])
def test_what_does_not_divide_is_refused(mesh, scheme):
    with pytest.raises(ValueError, match=r"^(mesh|scheme): expected"):
        estimate(config(), mesh, SPEEDS, scheme)
