"""attnjourney.integrations.flash_attn beside flash-attn's reference formula in float64, and as `import flash_attn`."""

import importlib.util
import inspect
import math
import sys
import types
from typing import Any

import pytest
import torch

import attnjourney
from attnjourney.integrations import flash_attn
from tests.support.flash_reference import reference
from tests.support.testing import assert_close_to_reference, random_tensor

CLOSE = dict(rtol=1e-11, atol=1e-12)


def loop(q, k, v, slopes=None, **options):
    """reference, over a batch: (B, S, H, D), (B, H, S)."""
    own = [None] * len(q) if slopes is None else slopes.expand(len(q), -1)
    results = [reference(*x, slopes=s, **options) for *x, s in zip(q, k, v, own)]
    return tuple(map(torch.stack, zip(*results)))


def tensors(rows=7, keys=11, heads=4, kv_heads=2, dim=8, dtype=torch.float64, **options):
    return [random_tensor((2, *s), dtype, i, **options) for i, s in enumerate(
        [(rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim)])]  # fmt: skip


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 1), softmax_scale=0.3),
    "causal window, softcap": dict(causal=True, window_size=(2, -1), softcap=2.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.1, 0.2, 0.4, 0.8])),
    "alibi a sequence": dict(alibi_slopes=torch.tensor([[0.1, 0.2, 0.4, 0.8], [1.0, 0.5, 0.25, 0.0]])),
}
NAMES = dict(softmax_scale="scale", window_size="window", alibi_slopes="slopes")


def referred(options):
    return {NAMES.get(name, name): x for name, x in options.items()}


def gradients(out, *inputs):
    return torch.autograd.grad((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum(), inputs)


@pytest.fixture(autouse=True)
def ours_is_called(monkeypatch):
    """Fails where a function of the module has not called an operator of this package."""
    calls = []
    for name in ("varlen_attention", "decode"):
        operator = getattr(flash_attn, name)

        def counted(*args, operator=operator, **kwargs):
            calls.append(operator)
            return operator(*args, **kwargs)

        monkeypatch.setattr(flash_attn, name, counted)
    yield calls


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows, keys", [(7, 11), (11, 7)])
def test_values_and_gradients(name, rows, keys, ours_is_called):
    options = OPTIONS[name]
    q, k, v = (x.requires_grad_() for x in tensors(rows, keys))
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected = loop(q, k, v, **referred(options))
    assert out.is_contiguous() and probabilities.numel() == 0 and len(ours_is_called) == 1
    torch.testing.assert_close((out, lse), expected, **CLOSE)
    torch.testing.assert_close(gradients(out, q, k, v), gradients(expected[0], q, k, v), **CLOSE)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options), out)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), out)


def test_packed_qkv():
    q, k, v = tensors(9, 9, 4, 4)
    expected, _ = loop(q, k, v, causal=True)
    qkv = torch.stack([q, k, v], 2)
    torch.testing.assert_close(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected, **CLOSE)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 9, causal=True)
    torch.testing.assert_close(out, expected.flatten(0, 1), **CLOSE)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "alibi a sequence"])
def test_sequences_of_different_lengths(name):
    options = OPTIONS[name]
    q, k, v = (random_tensor((n, h, 8), torch.float64, i) for i, (n, h) in enumerate([(12, 4), (19, 2), (19, 2)]))
    ends_q, ends_k = [0, 5, 5, 12], [0, 8, 8, 19]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k))
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 11, return_attn_probs=True, **options)
    parts = [
        reference(q[a:b], k[c:d], v[c:d], **referred(options))
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
    ]
    torch.testing.assert_close(out, torch.cat([p[0] for p in parts]), **CLOSE)
    torch.testing.assert_close(lse, torch.cat([p[1] for p in parts], -1), **CLOSE)
    kv = torch.stack([k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 7, 11, **options), out)
    size, order = 4, [5, 0, 3, 2, 1, 4]  # blocks of a common pool
    pools = [x.new_full((6, size, 2, 8), math.nan) for x in (k, v)]
    table = torch.tensor([[0, 1, -1], [-1, -1, -1], [2, 3, 4]], dtype=torch.int32)
    for b, (c, d) in enumerate(zip(ends_k, ends_k[1:])):
        for j in range(c, d):
            block = order[table[b, (j - c) // size]]
            pools[0][block, (j - c) % size], pools[1][block, (j - c) % size] = k[j], v[j]
    table = torch.where(table >= 0, torch.tensor(order)[table], -1)
    paged = flash_attn.flash_attn_varlen_func(q, *pools, cu_q, cu_k, 7, 11, block_table=table, **options)
    torch.testing.assert_close(paged, out, **CLOSE)
    leaves = [x.nan_to_num().requires_grad_() for x in pools]  # for gradients they are gathered
    out = flash_attn.flash_attn_varlen_func(q, *leaves, cu_q, cu_k, 7, 11, block_table=table, **options)
    packed = [x.clone().requires_grad_() for x in (k, v)]
    wanted = gradients(flash_attn.flash_attn_varlen_func(q, *packed, cu_q, cu_k, 7, 11, **options), *packed)
    grads = flash_attn.gather_blocks(*gradients(out, *leaves), cu_k, table)
    torch.testing.assert_close(grads, wanted, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = tensors(70, 90, dtype=dtype)
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    plain, exact = (loop(*(x.to(to) for x in (q, k, v)), causal=True)[0] for to in (dtype, torch.float64))
    assert out.dtype == dtype
    assert_close_to_reference(out, plain, exact)


def test_dropout_has_gradients_of_its_own_bits():
    q, k, v = (x.requires_grad_() for x in tensors())
    torch.manual_seed(0)
    out = flash_attn.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(0)
    again = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5, deterministic=True)
    assert torch.equal(out, again) and not torch.allclose(out, flash_attn.flash_attn_func(q, k, v))
    torch.testing.assert_close(gradients(out, v), gradients(again, v))


# ------------------------------------------------------------------------------------------------------------- caches


def rotate(x, cos, sin, positions, interleaved):
    """(B, S, H, D) at positions (B, S), as flash-attn's apply_rotary_emb_torch."""
    cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("kind", ["dense", "indexed", "paged"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(causal=False), dict(causal=True, window_size=(3, 0))])
@pytest.mark.parametrize("rotary", [None, True, False])
@pytest.mark.parametrize("leftpad", [False, True])
def test_cache(kind, options, rotary, leftpad, ours_is_called):
    held, added, capacity, dim = torch.tensor([5, 9], dtype=torch.int32), 3, 16, 8
    old = [random_tensor((2, capacity, 2, dim), torch.float64, i) for i in range(2)]
    q = random_tensor((2, added, 4, dim), torch.float64, 2)
    new = [random_tensor((2, added, 2, dim), torch.float64, i) for i in (3, 4)]
    pad = torch.tensor([2, 4], dtype=torch.int32) if leftpad else torch.zeros(2, dtype=torch.int32)
    cos, sin = (f(torch.arange(32)[:, None] / torch.tensor([1.0, 10.0, 50.0])).double() for f in (torch.cos, torch.sin))

    turned_q, turned_k = q, new[0]
    if rotary is not None:
        first = (held - pad)[:, None].long()
        at = first + torch.arange(added)
        follows = options["causal"] or "window_size" in options
        turned_q = rotate(q, cos, sin, at if follows else first.expand(2, added), rotary)
        turned_k = rotate(new[0], cos, sin, at, rotary)
    expected = [
        reference(
            turned_q[b], *(torch.cat([o[b, : held[b]], n[b]]) for o, n in zip(old, (turned_k, new[1]))),
            causal=options["causal"], window=options.get("window_size", (-1, -1)), first_key=int(pad[b]),
        )
        for b in range(2)
    ]  # fmt: skip

    more, caches = {}, [x.clone() for x in old]
    if kind == "indexed":
        caches = [x.new_zeros(5, *x.shape[1:]) for x in old]
        more["cache_batch_idx"] = torch.tensor([3, 1], dtype=torch.int32)
        for cache, x in zip(caches, old):
            cache[[3, 1]] = x
    elif kind == "paged":
        order = torch.tensor([[5, 1, 7, 2], [0, 6, 3, 4]], dtype=torch.int32)
        more["block_table"] = order
        caches = [x.new_zeros(8, 4, *x.shape[2:]) for x in old]
        for cache, x in zip(caches, old):
            cache[order.long()] = x.unflatten(1, (4, 4))
    if rotary is not None:
        more.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary)
    if leftpad:
        more["cache_leftpad"] = pad
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=held, return_softmax_lse=True, **options, **more
    )
    assert len(ours_is_called) == 1
    torch.testing.assert_close(out, torch.stack([e[0] for e in expected]), **CLOSE)
    torch.testing.assert_close(lse, torch.stack([e[1] for e in expected]), **CLOSE)
    back = caches if kind == "dense" else [c[[3, 1]] for c in caches] if kind == "indexed" else [
        c[more["block_table"].long()].flatten(1, 2) for c in caches]  # fmt: skip
    for b in range(2):
        for cache, x in zip(back, (turned_k, new[1])):
            torch.testing.assert_close(cache[b, held[b] : held[b] + added], x[b], **CLOSE)


def test_a_cache_that_is_only_read():
    q, k, v = tensors(2, 11)
    torch.testing.assert_close(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True), loop(q, k, v, causal=True)[0])
    expected = loop(q, k[:, :6], v[:, :6])[0]
    torch.testing.assert_close(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=6), expected)


@pytest.mark.parametrize(
    "call, pattern",
    [
        (lambda q, k, v: flash_attn.flash_attn_func(q[0], k, v), "q: expected 4 dimensions"),
        (lambda q, k, v: flash_attn.flash_attn_qkvpacked_func(q), "qkv: expected 5 dimensions"),
        (lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, k, v), "k: expected at most 11 keys"),
        (lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, k, cache_seqlens=0), "v: expected a tensor"),
        (lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, rotary_cos=q), "rotary_cos"),
        (
            lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, cache_batch_idx=q, block_table=q),
            "cache_batch_idx: expected None",
        ),
        (lambda q, k, v: flash_attn.flash_attn_func(q, k[..., :4], v), "key: expected"),
    ],
)
def test_wrong_arguments(call, pattern):
    with pytest.raises(ValueError, match=pattern):
        call(*tensors())


# ----------------------------------------------------------------------------------- rings, code written for flash-attn


def test_gradients_from_pieces_of_the_keys():
    """What ring attention does: forward piece by piece, merged; backward of each piece with the merged out and lse."""
    q, k, v = (x.requires_grad_() for x in tensors(7, 12))
    expected = loop(q, k, v)[0]
    dout = random_tensor(expected.shape, torch.float64, 5)
    wanted = torch.autograd.grad((expected * dout).sum(), (q, k, v))
    pieces = [slice(0, 5), slice(5, 12)]
    halves = [flash_attn._flash_attn_forward(q, k[:, s], v[:, s], 0.0, None, False)[:2] for s in pieces]
    (a, lse_a), (b, lse_b) = ((out.transpose(1, 2), lse) for out, lse in halves)
    out, lse = attnjourney.merge_states(a, lse_a, b, lse_b)
    out = out.transpose(1, 2)
    torch.testing.assert_close(out, expected, **CLOSE)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for s in pieces:
        part = torch.empty_like(q), torch.empty_like(k[:, s]), torch.empty_like(v[:, s])
        with torch.no_grad():  # as in a backward
            sums = flash_attn._flash_attn_backward(
                dout, q, k[:, s], v[:, s], out, lse, *part, 0.0, None, False, -1, -1, 0.0, None
            )
        dq, dk[:, s], dv[:, s] = dq + part[0], part[1], part[2]
    torch.testing.assert_close((dq, dk, dv), wanted, **CLOSE)
    torch.testing.assert_close(sums, (dout * out).sum(-1).transpose(1, 2), **CLOSE)


def test_code_written_for_flash_attn_finds_it():
    assert "flash_attn" not in sys.modules
    flash_attn.install()
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import _flash_attn_forward

        assert flash_attn_func is flash_attn.flash_attn_func
        assert _flash_attn_forward is flash_attn._flash_attn_forward
        assert list(inspect.signature(flash_attn_varlen_func).parameters)[3:8] == [
            "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p"
        ]  # fmt: skip
    finally:
        flash_attn.uninstall()
    assert "flash_attn" not in sys.modules


RINGS = {
    "ring": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "varlen": "ring_flash_attn_varlen_func",
}


def ring_rank(rank, store, results):
    import torch.distributed as dist

    torch.set_num_threads(1)
    flash_attn.install()
    adapters: Any = types.ModuleType("ring_flash_attn.adapters")  # its own is for an earlier transformers
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    whole = tensors(12, 12, 4, 4, dtype=torch.bfloat16)  # its buffers and dq are for this dtype alone
    for name in RINGS:
        order = list(range(12))
        if name == "zigzag":  # each rank has a piece from the beginning and one from the end
            order = [*range(0, 3), *range(9, 12), *range(3, 6), *range(6, 9)]
        mine = order[rank * 6 : rank * 6 + 6]
        q, k, v = (x[:, mine].clone().requires_grad_() for x in whole)
        function = getattr(ring_flash_attn, RINGS[name])
        if name == "varlen":
            cu = torch.tensor([0, 6, 12], dtype=torch.int32)
            out = function(*(x.flatten(0, 1) for x in (q, k, v)), cu, 6, causal=True).unflatten(0, (2, 6))
        else:
            out = function(q, k, v, causal=True)
        grad_out = torch.linspace(-1, 1, 12).to(out.dtype)[mine][None, :, None, None].expand_as(out).contiguous()
        grads = torch.autograd.grad(out, (q, k, v), grad_out)
        torch.save((mine, out.detach(), *grads), f"{results}/{name}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.clients
def test_ring_flash_attn_on_two_ranks(tmp_path):
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("not installed: ring_flash_attn")
    torch.multiprocessing.spawn(ring_rank, (tmp_path / "store", tmp_path), nprocs=2)
    plain, exact = [], []
    for dtype, results in ((torch.bfloat16, plain), (torch.float64, exact)):
        inputs = [x.to(dtype).requires_grad_() for x in tensors(12, 12, 4, 4, dtype=torch.bfloat16)]
        out = loop(*inputs, causal=True)[0]
        grad_out = torch.linspace(-1, 1, 12).to(torch.bfloat16).to(dtype)[None, :, None, None].expand_as(out)
        results += [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]
    for name in RINGS:
        for rank in range(2):
            mine, *results = torch.load(tmp_path / f"{name}{rank}.pt")
            for got, rounded, want in zip(results, plain, exact, strict=True):
                assert_close_to_reference(got, rounded[:, mine], want[:, mine], factor=3, name=f"{name}, rank {rank}")
