"""What ranks do with ring_mla, ring_linear_attention and ring_infini_attention: their shards against the whole in
float64."""

import torch
import torch.distributed as dist

import attnjourney
from attnjourney import distributed
from tests.distributed.calls import Counted
from tests.distributed.dtensor_calls import numbers
from tests.distributed.ranks import groups

MLA = dict(num_heads=4, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=3)
BATCH, SEQ, EMBED, LATENT = 2, 16, 12, 5


def weights(low_rank):
    sizes = dict(
        q_a_weight=(6, EMBED), q_a_norm_weight=(6,), q_b_weight=(48, 6 if low_rank else EMBED),
        kv_a_weight=(LATENT + 8, EMBED), kv_a_norm_weight=(LATENT,), kv_b_weight=(28, LATENT), o_weight=(10, 12),
    )  # fmt: skip
    made = {name: numbers(10 + i, *size) for i, (name, size) in enumerate(sizes.items())}
    return made if low_rank else made | dict(q_a_weight=None, q_a_norm_weight=None)


def gradients(function, tensors):
    """(output, gradients by name) of a weighted sum."""
    leaves = {n: x if x is None else x.clone().requires_grad_(n not in ("cos", "sin")) for n, x in tensors.items()}
    out = function(**leaves)
    trained = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    grads = torch.autograd.grad((out * numbers(1, *out.shape)).sum(), list(trained.values()), allow_unused=True)
    return out, {n: torch.zeros_like(trained[n]) if g is None else g for n, g in zip(trained, grads)}


def off(ours, whole, group):
    """Names of what differs; gradients are summed over the group."""
    wrong = [] if torch.allclose(ours[0], whole[0], rtol=1e-10, atol=1e-12) else ["out"]
    for name, expected in whole[1].items():
        total = ours[1][name].clone()
        dist.all_reduce(total, group=group)
        if not torch.allclose(total, expected, rtol=1e-9, atol=1e-11):
            wrong.append(name)
    return wrong


def mla(rank, size, order, scheme, is_causal, low_rank, with_rope=True, length=SEQ):
    group = groups[size]
    angles = numbers(9, length, 4)
    tables = dict(cos=angles.cos(), sin=angles.sin()) if with_rope else {}
    tensors = dict(x=numbers(2, BATCH, length, EMBED), **weights(low_rank), **tables)
    options = dict(**MLA, is_causal=is_causal)

    def ours(x, cos=None, sin=None, **others):
        x = distributed.shard(x, group, order, 1)
        if cos is not None:
            cos, sin = (distributed.shard(t, group, order, 0) for t in (cos, sin))
        out = distributed.ring_mla(x, cos=cos, sin=sin, **others, **options, group=group, order=order, scheme=scheme)
        return distributed.unshard(out, group, order, 1)

    whole = gradients(lambda **t: attnjourney.mla(**t, **options), tensors)
    return off(gradients(ours, tensors), whole, group)


def mla_bytes(rank, size, scheme):
    """((bytes sent, those of latents), ...) of the forward and the backward."""
    group, place = groups[size], dist.get_rank(groups[size])
    x = distributed.shard(numbers(2, BATCH, SEQ, EMBED).float(), group, dim=1).requires_grad_()
    shapes = [(BATCH, 4, SEQ // size, 12), (BATCH, SEQ // size, LATENT), (BATCH, SEQ // size, 8)]
    narrow = {n: w.float() for n, w in weights(True).items()}
    with Counted() as forward:
        out = distributed.ring_mla(x, **narrow, **MLA, group=group, scheme=scheme)
    with Counted() as backward:
        out.sum().backward()
    expected = [
        distributed.bytes_sent(scheme, *shapes, torch.float32, place, size, is_causal=True, backward=b)
        for b in (False, True)
    ]
    return (forward.bytes - 16 * (size - 1), expected[0]), (backward.bytes, expected[1])


def rows_of(lengths, place):
    first = sum(lengths[:place])
    return slice(first, first + lengths[place])


def infini(rank, size, lengths, update, truncate, with_memory, with_rope):
    """lengths: of the shards, in the order of ranks; segments of 2 rows."""
    group = groups[size]
    mine, total = rows_of(lengths, dist.get_rank(group)), sum(lengths)
    tensors = dict(query=numbers(0, 2, 4, total, 8), key=numbers(1, 2, 2, total, 8), value=numbers(2, 2, 2, total, 5))
    tensors["beta"] = numbers(5, 4)
    if with_memory:
        tensors |= dict(matrix=numbers(3, 2, 2, 8, 5), normalizer=numbers(4, 2, 2, 8).abs())
    angles = numbers(9, total, 4) if with_rope else None
    options = dict(segment_length=2, update=update, truncate=truncate)

    def call(function, rows, query, key, value, beta, matrix=None, normalizer=None, **more):
        memory = None if matrix is None else (matrix, normalizer)
        tables = {} if angles is None else dict(cos=angles.cos()[rows], sin=angles.sin()[rows])
        parts = (x[:, :, rows] for x in (query, key, value))
        return function(*parts, beta, memory=memory, **tables, **options, **more)

    functions = attnjourney.infini_attention, distributed.ring_infini_attention
    return rows_off(call, functions, tensors, mine, group)


def rows_off(call, functions, tensors, mine, group):
    """`off` of call(function, rows, **tensors): that of one rank for all rows, that of ranks for this rank's."""
    of_one, of_ranks = functions
    whole = gradients(lambda **t: call(of_one, slice(None), **t), tensors)

    def in_place(**t):
        rows = torch.zeros_like(whole[0])
        rows[:, :, mine] = call(of_ranks, mine, **t, group=group)  # the rows of the others get no gradient here
        return rows

    found = gradients(in_place, tensors)
    out = found[0].detach().clone()
    dist.all_reduce(out, group=group)
    return off((out, found[1]), whole, group)


def infini_bytes(rank, size, update):
    """(bytes sent, those of memories), forward and backward, whatever the length."""
    group, place = groups[size], dist.get_rank(groups[size])
    q, k, v = (numbers(i, 2, 2, 32, 8).float().requires_grad_() for i in range(3))
    with Counted() as sent:
        out = distributed.ring_infini_attention(
            q, k, v, numbers(5, 2).float(), group=group, segment_length=8, update=update
        )
        out.sum().backward()
    memory = 4 * 2 * 2 * 8 * 9
    of_ring = (size - 1) * 2 if update == "linear" else (place < size - 1) + (place > 0)
    return sent.bytes, (size - 1) * 16 + of_ring * memory


def infini_in_part(rank):
    """The error of shards that end inside a segment."""
    q = numbers(0, 1, 2, 3, 8)
    try:
        distributed.ring_infini_attention(q, q, q, numbers(5, 2), segment_length=2)
        return ""
    except ValueError as error:
        return str(error)


def linear(rank, size, lengths, is_causal, feature_map, normalize, with_state, padded):
    """lengths: of the shards, in the order of ranks."""
    group = groups[size]
    mine, total = rows_of(lengths, dist.get_rank(group)), sum(lengths)
    tensors = dict(query=numbers(0, 2, 4, total, 8), key=numbers(1, 2, 2, total, 8), value=numbers(2, 2, 2, total, 5))
    if with_state:
        tensors["matrix"] = numbers(3, 2, 2, 8, 5)
        if normalize:
            tensors["normalizer"] = numbers(4, 2, 2, 8).abs()
    mask = (torch.arange(2 * total).view(2, total) % 5 == 0) if padded else None
    options = dict(is_causal=is_causal, feature_map=feature_map, normalize=normalize)

    def call(function, rows, query, key, value, matrix=None, normalizer=None, **more):
        state = None if matrix is None else (matrix, normalizer)
        own = None if mask is None else mask[:, rows]
        parts = (x[:, :, rows] for x in (query, key, value))
        return function(*parts, key_padding_mask=own, initial_state=state, **options, **more)

    functions = attnjourney.linear_attention, distributed.ring_linear_attention
    return rows_off(call, functions, tensors, mine, group)


def linear_bytes(rank, size):
    """(bytes sent, those of states), forward and backward, whatever the length."""
    group = groups[size]
    q, k, v = (numbers(i, 2, 2, 32, 8).float().requires_grad_() for i in range(3))
    with Counted() as sent:
        distributed.ring_linear_attention(q, k, v, group=group).sum().backward()
    return sent.bytes, (size - 1) * (8 + 2 * 4 * 2 * 2 * 8 * 9)


def linear_differs(rank):
    """The error of a call in which rank 1 has another head_dim."""
    q = numbers(0, 1, 2, 4, 8 + (rank == 1))
    try:
        distributed.ring_linear_attention(q, q, q)
        return ""
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
