"""What ranks do: a call of ring_attention on their shards, put together again; bytes counted; calls that differ."""

import io
from contextlib import redirect_stdout
from unittest import mock

import torch
import torch.distributed as dist

import attnjourney
from attnjourney import distributed
from benchmarks import ranks as benchmark_of_ranks
from tests.distributed.ranks import groups
from tests.support import options_cases
from tests.support.testing import random_tensor


def make(names, dtype, **sizes):
    """(query, key, value, arguments): lengths that four ranks of two chunks divide. large: of scores, in hundreds."""
    query, key, value, arguments = options_cases.make(
        [name for name in names if name not in ("large", "blocks")],
        dtype,
        **{**dict(q_heads=8, kv_heads=4, q_len=16, kv_len=16), **sizes},
    )
    if "key_lengths" in names:
        arguments["key_lengths"] = torch.tensor([key.size(-2) - 3, min(5, key.size(-2))])
    if "blocks" in names:
        heads, rows = query.shape[1:3]
        generator = torch.Generator().manual_seed(3)
        seen = torch.rand(heads, rows, key.size(2), generator=generator) < 0.6
        seen &= (
            torch.rand(heads, -(-rows // 16), -(-key.size(2) // 16), generator=generator)
            .repeat_interleave(16, 1)
            .repeat_interleave(16, 2)[:, :rows, : key.size(2)]
            < 0.6
        )
        arguments["attn_mask"] = attnjourney.BlockMask.from_dense(seen, 16)
    if "large" in names:
        arguments["scale"] = 60.0
    return query, key, value, arguments


def whole_call(rank, size, names, dtype, alone=False, sizes=None, by_heads=False, lengths=None, **call):
    """options_cases.run of the whole, each rank on its shard; gradients summed over ranks. alone: the fault that each
    rank sees its own keys only. by_heads: pairs of ranks share heads out, and the ring is of two such pairs.
    lengths: of contiguous shards, others than `shard` makes."""
    group = groups[size]
    rows, heads = (groups["across"], groups[2]) if by_heads else (group, None)
    more = dict(ulysses_group=heads) if by_heads else {}
    tensors, arguments = (lambda q, k, v, a: ((q, k, v), a))(*make(names, dtype, **(sizes or {})))
    order, place = call.get("order", "contiguous"), dist.get_rank(rows)

    def ours(*tensors, **arguments):
        shards = [distributed.shard(x, rows, order) for x in tensors]
        if lengths is not None:
            shards = [x.split(lengths, -2)[place] for x in tensors]
        if by_heads:
            shards = [distributed.shard(x, heads) for x in shards]
        mask = arguments.get("attn_mask")
        if isinstance(mask, torch.Tensor) and mask.shape[-2] != 1:
            mask = distributed.shard(mask, rows, order) if lengths is None else mask.split(lengths, -2)[place]
            arguments["attn_mask"] = distributed.shard(mask, heads) if by_heads else mask
        if alone:
            out, lse = attnjourney.attention(*shards, **arguments)
        else:
            out, lse = distributed.ring_attention(*shards, group=rows, **more, **arguments, **call)
        if by_heads:
            out, lse = distributed.unshard(out, heads), distributed.unshard(lse, heads, dim=-1)
        return distributed.unshard(out, rows, order), distributed.unshard(lse, rows, order, -1)

    results, gradients = options_cases.run(ours, tensors, arguments)
    for name, x in results.items():
        if name.startswith("grad_"):
            total = x.double()
            dist.all_reduce(total, group=group)
            results[name] = total.to(x.dtype)
    return results, gradients


class Counted:
    """Bytes that leave this rank through torch.distributed."""

    def __init__(self):
        self.bytes = 0

    def __enter__(self):
        def count(name, size_of):
            real = getattr(dist, name)

            def counted(*args, **kwargs):
                self.bytes += size_of(*args, **kwargs)
                return real(*args, **kwargs)

            return mock.patch.object(dist, name, counted)

        def nbytes(x):
            return x.numel() * x.element_size()

        def others(group):
            return dist.get_world_size(group) - 1

        self.patches = [
            count("batch_isend_irecv", lambda ops: sum(nbytes(o.tensor) for o in ops if o.op is dist.isend)),
            count("all_gather", lambda out, x, group: others(group) * nbytes(x)),
            count("all_to_all_single", lambda out, x, group: nbytes(x) // (others(group) + 1) * others(group)),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def bytes_of(rank, size, dtype, scheme, **masks):
    """((bytes sent, those of the formula) of the forward, the same of the backward)."""
    group = groups[size]
    tensors = [distributed.shard(x, group).requires_grad_() for x in make((), dtype)[:3]]
    shapes = [x.shape for x in tensors]
    place = (dist.get_rank(group), size)
    with Counted() as forward:
        out = distributed.ring_attention(*tensors, group=group, scheme=scheme, enable_gqa=True, **masks)
    with Counted() as backward:
        out.sum().backward()
    expected = [distributed.bytes_sent(scheme, *shapes, dtype, *place, **masks, backward=b) for b in (False, True)]
    agreement = 24 * (size - 1)
    return (forward.bytes - agreement, expected[0]), (backward.bytes, expected[1])


PACKED = torch.tensor([0, 5, 5, 6, 19, 30])


def packed(rank, size, order, scheme, by_heads, options, masks, length=32):
    """options_cases.compare's arguments for packed sequences, of which two rows belong to none."""
    rows, heads = (groups["across"], groups[2]) if by_heads else (groups[size], None)
    query, key, value, arguments = make(options, torch.float64, batch=1, q_len=length, kv_len=length)
    gqa = arguments.pop("enable_gqa", False)

    def ours(*tensors, **arguments):
        shards = [distributed.shard(x, rows, order) for x in tensors]
        shards = [distributed.shard(x, heads) for x in shards] if by_heads else shards
        out, lse = distributed.ring_attention(
            *shards, group=rows, ulysses_group=heads, order=order, scheme=scheme, cu_seqlens=PACKED, enable_gqa=gqa,
            **arguments, **masks,
        )  # fmt: skip
        if by_heads:
            out, lse = distributed.unshard(out, heads), distributed.unshard(lse, heads, dim=-1)
        return distributed.unshard(out, rows, order), distributed.unshard(lse, rows, order, -1)

    def whole(query, key, value, return_lse, **arguments):
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]
        out, lse = attnjourney.varlen_attention(*flat, PACKED, PACKED, return_lse=return_lse, **arguments, **masks)
        return out.transpose(0, 1)[None], lse[None]

    found = []
    for function in (ours, whole):
        results, _ = options_cases.run(function, (query, key, value), arguments)
        found.append(results)
    wrong = []
    for name, x in found[0].items():
        x = x.double()
        if name.startswith("grad_"):
            dist.all_reduce(x, group=None if by_heads else rows)
        if not torch.allclose(x, found[1][name].double(), rtol=1e-9, atol=1e-11):
            wrong.append(f"{name} off by {(x - found[1][name]).abs().max()}")
    return wrong


def differing(rank, odd_rank, odd):
    """A call in which one rank has other arguments than the others, then one that fits: (the error's text, result)."""
    arguments = dict(shape=(1, 4, 8, 4), dtype=torch.float32, scheme="ring", is_causal=True)
    if rank == odd_rank:
        arguments.update(odd)
    shape, dtype = arguments.pop("shape"), arguments.pop("dtype")
    try:
        with Counted() as sent:
            distributed.ring_attention(*(random_tensor(shape, dtype, i) for i in range(3)), **arguments)
        text = ""
    except (ValueError, RuntimeError, NotImplementedError) as error:
        text = f"{type(error).__name__}: {error}"
    after = distributed.ring_attention(*(random_tensor((1, 4, 8, 4), seed=i) for i in range(3)), scheme="ring")
    return text, sent.bytes, after.isfinite().all().item()


def under_autocast(rank, scheme):
    """Whether float32 inputs under autocast give what inputs of its dtype give: out, and the gradient of query."""
    shards = [distributed.shard(x, groups[2]) for x in make(("causal",), torch.float32)[:3]]
    options = dict(group=groups[2], scheme=scheme, enable_gqa=True, is_causal=True)
    narrow = [x.bfloat16().requires_grad_() for x in shards]
    expected = distributed.ring_attention(*narrow, **options)
    expected.float().sum().backward()
    wide = [x.requires_grad_() for x in shards]
    with torch.autocast("cpu", torch.bfloat16):
        out = distributed.ring_attention(*wide, **options)
    out.float().sum().backward()
    return torch.equal(out, expected) and torch.equal(wide[0].grad, narrow[0].grad.float())


def benchmark(rank, arguments):
    """What python -m benchmarks.ranks prints, on this rank."""
    with redirect_stdout(io.StringIO()) as printed:
        benchmark_of_ranks.measure(rank, benchmark_of_ranks.parse(arguments))
    return printed.getvalue()
