"""What ranks do for DTensor: every operator on shards and on the whole, in float64, compared."""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import attnjourney
import attnjourney.distributed.dtensor
from tests.distributed.ranks import groups

ops = torch.ops.attnjourney
_meshes = {}


def mesh_of(*sizes):
    """One mesh a shape for the life of this rank: (2,) is a half of the four."""
    if sizes not in _meshes:
        group = groups[sizes[0]] or dist.group.WORLD
        one = len(sizes) == 1
        _meshes[sizes] = DeviceMesh.from_group(group, "cpu") if one else init_device_mesh("cpu", sizes)
    return _meshes[sizes]


def idle(rank, *sizes):
    """Whether the other half of the ranks does all that this one would."""
    return rank >= math.prod(sizes)


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(batch=4, heads=4, kv_heads=4, length=6, keys=6, v_dim=5):
    return dict(
        query=numbers(0, batch, heads, length, 8),
        key=numbers(1, batch, kv_heads, keys, 8),
        value=numbers(2, batch, kv_heads, keys, v_dim),
    )


def flat(results):
    results = results if isinstance(results, (tuple, list)) else [results]
    return [x for r in results for x in (flat(r) if isinstance(r, (tuple, list)) else [r]) if x is not None]


def run(function, tensors, create_graph=False):
    """(results, gradients by name): of a sum of all results by fixed weights; second: of the first ones' squares."""
    leaves = {n: x.detach().requires_grad_(x.is_floating_point() and n not in CONSTANT) for n, x in tensors.items()}
    results = flat(function(**leaves))
    trained = {n: x for n, x in leaves.items() if x.requires_grad}
    loss = total(results)
    if loss is None or not loss.requires_grad:
        return results, {}
    gradients = torch.autograd.grad(loss, list(trained.values()), create_graph=create_graph, allow_unused=True)
    found = {n: g for n, g in zip(trained, gradients) if g is not None}
    if create_graph:
        loss = sum(whole(g).square().sum() for g in found.values())
        second = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        found |= {f"second {n}": g for n, g in zip(trained, second) if g is not None}
    return results, found


CONSTANT = ("cos", "sin", "key_cache", "value_cache")


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def total(results):
    """A weighted sum of what is finite."""
    terms = []
    for i, x in enumerate(results):
        x = whole(x)
        if x.is_floating_point():
            terms.append((x.nan_to_num(neginf=0.0) * numbers(90 + i, *x.shape)).sum())
    return sum(terms) if terms else None


def compared(function, tensors, mesh, placements, out=None, second=False, written=()):
    """What is wrong, as text; "" if nothing. placements: of the tensors; those not named stay plain tensors. out: those
    that the first result must have."""
    # clones: the operators of caches write
    expected = run(function, {n: x.clone() for n, x in tensors.items()}, second)
    copies = {n: x.clone() for n, x in tensors.items()}
    shared = {
        n: distribute_tensor(x, mesh, placements[n], src_data_rank=None) if n in placements else x
        for n, x in copies.items()
    }
    actual = run(function, shared, second)
    first = next((x for x in actual[0] if isinstance(x, DTensor)), None)
    if out is not None and (first is None or list(first.placements) != out):
        return f"placements {first.placements if first is not None else None}, expected {out}"
    if expected[1].keys() != actual[1].keys():
        return f"gradients of {list(actual[1])}, expected {list(expected[1])}"
    pairs = [(f"result {i}", e, a) for i, (e, a) in enumerate(zip(expected[0], actual[0], strict=True))]
    pairs += [(n, e, actual[1][n]) for n, e in expected[1].items()]
    for name, e, a in pairs:
        like = shared.get(name.removeprefix("second "))
        if like is not None and isinstance(a, DTensor) != isinstance(like, DTensor):
            return f"{name}: the gradient of a {type(like).__name__} is a {type(a).__name__}"
        a = whole(a)
        if a.shape != e.shape or not torch.allclose(a, e, rtol=1e-9, atol=1e-11):
            off = (a - e).abs().max() if a.shape == e.shape else tuple(a.shape)
            return f"{name}: off by {off}"
    return ""


def same(letters, **tensors):
    """The placement of each tensor: the index of each letter in its dimensions, else whole."""
    return {n: [Shard(dims.index(x)) if x in dims else Replicate() for x in letters] for n, dims in tensors.items()}


def places(rules, dims):
    """(rule, placements of what has these dimensions): a letter for each dimension of the mesh."""
    return [(rule, [Shard(dims.index(x)) for x in rule]) for rule in rules if set(rule) <= set(dims)]


def attention_cases(rules):
    dims = dict(query="BHL.", key="BH..", value="BH..")
    sinks, slopes = numbers(3, 4), numbers(4, 4).abs()
    mask = numbers(5, 1, 4, 1, 6)

    def call(query, key, value, attn_mask=None, **options):
        return attnjourney.attention(query, key, value, attn_mask, return_lse=True, **options)

    causal = partial(call, is_causal=True, window_size=(3, -1), softcap=4.0)
    grouped = partial(call, is_causal=True, enable_gqa=True)
    dropped = partial(call, dropout_p=0.5, dropout_seed=torch.tensor(5), is_causal=True)
    for rule, out in places(rules, "BHL"):
        yield f"dropout {rule}", dropped, qkv(), same(rule, **dims), dict(out=out, second=rule != "L")
        yield f"plain {rule}", call, qkv(), same(rule, **dims), dict(out=out, second=rule != "L")
        yield f"mask {rule}", call, dict(**qkv(), attn_mask=mask), same(rule, **dims, attn_mask=".H.."), dict(out=out)
        yield f"plain mask {rule}", call, dict(**qkv(), attn_mask=mask), same(rule, **dims), dict(out=out)
        row_mask = numbers(6, 4, 1, 6, 6)
        extra = dict(attn_mask=row_mask, sinks=sinks)
        yield f"mask of rows {rule}", call, dict(**qkv(), **extra), same(rule, **dims), dict(out=out)
        lengths = dict(key_lengths=torch.tensor([6, 0, 3, 1]))
        yield f"lengths {rule}", call, dict(**qkv(), **lengths), same(rule, **dims), dict(out=out)
        one = qkv(kv_heads=1)
        placed = same(rule, query="BHL.", key="B...", value="B...")
        yield f"one key head {rule}", call, one, placed, dict(out=out)
    for rule, out in places(rules, "BH"):
        yield f"causal {rule}", causal, qkv(), same(rule, **dims), dict(out=out)
        extra = dict(sinks=sinks, alibi_slopes=slopes)
        yield f"per head {rule}", call, dict(**qkv(), **extra), same(rule, **dims), dict(out=out, second=True)
        yield f"per head shared {rule}", call, dict(**qkv(), **extra), same(rule, **dims, sinks="H"), dict(out=out)
        items = dict(sinks=numbers(7, 4, 4), alibi_slopes=numbers(8, 4, 4).abs())
        yield f"per item {rule}", call, dict(**qkv(), **items), same(rule, **dims), dict(out=out)
        eight = qkv(heads=8, kv_heads=4)
        bits = partial(dropped, enable_gqa=True)
        yield f"grouped dropout {rule}", bits, eight, same(rule, **dims), dict(out=out)
        yield f"grouped {rule}", grouped, eight, same(rule, **dims), dict(out=out)
        two = qkv(heads=8, kv_heads=2)
        placed = same(rule, query="BH..", key="B...", value="B...")
        yield f"few key heads, dropout {rule}", bits, two, placed, dict(out=out)
        yield f"few key heads {rule}", grouped, two, same(rule, query="BH..", key="B...", value="B..."), dict(out=out)
        yield f"key heads gathered {rule}", grouped, qkv(heads=6, kv_heads=3), same(rule, **dims), {}
        mask = attnjourney.BlockMask.from_function(lambda b, h, i, j: (i + j + h) % 3 > 0, 1, 4, 6, 6, 16)
        blocks = partial(attnjourney.attention, attn_mask=mask, return_lse=True)
        yield f"blocks {rule}", blocks, qkv(), same(rule, **dims), dict(out=out)
        jvp = partial(tangent, is_causal=True)
        tangents = {f"{n}_tangent": numbers(20 + i, *x.shape) for i, (n, x) in enumerate(qkv().items())}
        placed = same(rule, **dims, **{f"{n}_tangent": d for n, d in dims.items()})
        yield f"tangent {rule}", jvp, dict(**qkv(), **tangents), placed, dict(out=out)
    if rules != ONE:
        return
    for name in ("causal", "ALiBi"):
        rows = causal if name == "causal" else partial(causal, alibi_slopes=slopes)
        yield f"rows of {name}", rows, qkv(length=7), same("L", **dims), dict(out=[Shard(2)])
    last = partial(call, is_causal=True, causal_alignment="bottom_right")
    yield "rows from the last one", last, qkv(), same("L", **dims), dict(out=[Replicate()])
    uneven = qkv(batch=3, heads=3, kv_heads=3)
    for rule, dim in (("B", 0), ("H", 1), ("L", 2)):
        yield f"dropout on uneven {rule}", dropped, uneven, same(rule, **dims), dict(out=[Shard(dim)])
    yield "uneven batch", causal, qkv(batch=3), same("B", **dims), dict(out=[Shard(0)])
    yield "empty shards", causal, qkv(batch=1), same("B", **dims), {}
    yield "uneven heads", call, qkv(heads=3, kv_heads=3), same("H", **dims), dict(out=[Shard(1)])
    five = {n: x.unflatten(0, (2, 2)) for n, x in qkv().items()}
    for rule, out in (("H", [Shard(2)]), ("B", [Shard(0)])):
        placed = same(rule, query="B.H..", key="B.H..", value="B.H..")
        yield f"five dimensions {rule}", dropped, five, placed, dict(out=out)


def tangent(query, key, value, query_tangent, key_tangent, value_tangent, **options):
    with torch.no_grad():
        out, lse, stats = ops.attention_forward(query, key, value, None, **options)
        tangents = dict(query_tangent=query_tangent, key_tangent=key_tangent, value_tangent=value_tangent)
        return ops.attention_jvp(query, key, value, None, out, lse, stats, **tangents, **options)


def packed_cases(rules):
    if rules != ONE:
        return
    ends = torch.tensor([0, 3, 3, 10])
    tensors = dict(query=numbers(0, 10, 4, 8), key=numbers(1, 10, 4, 8), value=numbers(2, 10, 4, 5))
    call = partial(attnjourney.varlen_attention, cu_seqlens_q=ends, cu_seqlens_k=ends, is_causal=True, return_lse=True)
    placed = same("H", query=".H.", key=".H.", value=".H.")
    yield "packed", call, dict(**tensors, sinks=numbers(3, 4)), placed, dict(out=[Shard(1)])
    tensors["query"] = numbers(0, 10, 8, 8)
    call = partial(call, dropout_p=0.5, dropout_seed=torch.tensor(5))
    yield "packed grouped", call, tensors, placed, dict(out=[Shard(1)])
    call = partial(
        attnjourney.varlen_attention, cu_seqlens_q=ends, cu_seqlens_k=torch.tensor([0, 5, 5, 14]), return_lse=True,
        block_table=torch.tensor([[2, 0, -1], [-1, -1, -1], [1, 4, 3]], dtype=torch.int32),
    )  # fmt: skip
    tensors = dict(query=numbers(0, 10, 8, 8), key=numbers(1, 5, 4, 4, 8), value=numbers(2, 5, 4, 4, 5))
    placed = same("H", query=".H.", key=".H..", value=".H..")
    yield "paged", torch.no_grad()(call), tensors, placed, dict(out=[Shard(1)])


def linear_cases(rules):
    dims = dict(query="BH..", key="BH..", value="BH..")
    for rule, out in places(rules, "BH"):
        call = partial(attnjourney.linear_attention, return_state=True)
        tensors = dict(**qkv(), key_padding_mask=torch.arange(24).view(4, 6) % 5 == 0)
        yield f"linear {rule}", call, tensors, same(rule, **dims), dict(out=out)

        def from_state(query, key, value, state, normalizer):
            return attnjourney.linear_attention(query, key, value, initial_state=(state, normalizer), return_state=True)

        states = dict(state=numbers(3, 4, 4, 8, 5), normalizer=numbers(4, 4, 4, 8).abs())
        placed = same(rule, **dims, state="BH..", normalizer="BH.")
        yield f"linear state {rule}", from_state, dict(**qkv(heads=8), **states), placed, dict(out=out)
        call = partial(attnjourney.linear_attention, normalize=False, is_causal=False)
        yield f"linear sum {rule}", call, qkv(), same(rule, **dims), dict(out=out)


def layer_cases(rules):
    angles = numbers(9, 6, 4)
    tables = dict(cos=angles.cos(), sin=angles.sin())
    for rule, out in places(rules, "BHL"):
        x = dict(x=numbers(0, 4, 4, 6, 8), **tables)
        yield f"rope {rule}", ops.rope, x, same(rule, x="BHL."), dict(out=out)
    x = numbers(0, 4, 6, 16)

    def gqa(x, q, k, v, o, q_bias, k_bias, v_bias, o_bias, cos, sin, kv_heads=4):
        return ops.gqa(x, 8, kv_heads, q, k, v, o, q_bias, k_bias, v_bias, o_bias, cos=cos, sin=sin)

    for kv_heads, label in ((4, "gqa"), (2, "gqa few key heads")):
        sizes = dict(q=(64, 16), k=(kv_heads * 8, 16), v=(kv_heads * 8, 16), o=(16, 64))
        weights = {n: numbers(10 + i, *s) for i, (n, s) in enumerate(sizes.items())}
        biases = {f"{n}_bias": numbers(20 + i, s[0]) for i, (n, s) in enumerate(sizes.items())}
        tensors, call = dict(x=x, **weights, **biases, **tables), partial(gqa, kv_heads=kv_heads)
        dims = dict(q="H.", k="H.", v="H.", o=".H", q_bias="H", k_bias="H", v_bias="H", x="B..", o_bias=".")
        for rule, out in places(rules, "B.H"):
            out = [Partial() if p == Shard(2) else p for p in out]
            out = out if kv_heads == 4 else None
            yield f"{label} {rule}", call, tensors, same(rule, **dims), dict(out=out)
    sizes = dict(
        q_a_weight=(6, 16), q_a_norm_weight=(6,), q_b_weight=(4 * 12, 6), kv_a_weight=(5 + 8, 16),
        kv_a_norm_weight=(5,), kv_b_weight=(4 * 7, 5), o_weight=(16, 12),
    )  # fmt: skip
    weights = {n: numbers(10 + i, *s) for i, (n, s) in enumerate(sizes.items())}
    call = partial(ops.mla, num_heads=4, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=3)
    dims = dict(q_b_weight="H.", kv_b_weight="H.", o_weight=".H", x="B..", kv_a_weight="..")
    for rule, out in places(rules, "B.H"):
        out = [Partial() if p == Shard(2) else p for p in out]
        yield f"mla {rule}", call, dict(x=x, **weights, **tables), same(rule, **dims), dict(out=out)
    if rules != ONE:
        return
    packed = dict(qkv=numbers(3, 48, 16), qkv_bias=numbers(4, 48), out=numbers(5, 16, 16), out_bias=numbers(6, 16))

    def gpt(x, qkv, qkv_bias, out, out_bias):
        return attnjourney.gpt_attention(x, 4, qkv, qkv_bias, out, out_bias)

    def mha(x, memory, mask, qkv, qkv_bias, out, out_bias):
        return attnjourney.mha(x, memory, memory, 4, qkv, qkv_bias, out, out_bias, attn_mask=mask)

    yield "gpt B", gpt, dict(x=x, **packed), same("B", x="B.."), dict(out=[Shard(0)])
    extra = dict(memory=numbers(7, 4, 5, 16), mask=numbers(8, 16, 6, 5))
    yield "mha B", mha, dict(x=x, **extra, **packed), same("B", x="B..", memory="B.."), dict(out=[Shard(0)])


@torch.no_grad()
def generate(query, key_cache, value_cache, lengths, key, value):
    ops.kv_cache_append(key_cache, value_cache, lengths, key, value)
    out = attnjourney.decode(query, key_cache, value_cache, lengths)
    return out, key_cache, lengths


@torch.no_grad()
def generate_bytes(query, key_cache, value_cache, key_scale, value_scale, lengths, key, value):
    scales = dict(key_scale=key_scale, value_scale=value_scale)
    ops.kv_cache_append(key_cache, value_cache, lengths, key, value, **scales)
    return attnjourney.decode(query, key_cache, value_cache, lengths, **scales)


@torch.no_grad()
def generate_latent(query, latent, lengths, weight):
    return attnjourney.mla_decode(query, latent, lengths, weight, return_lse=True)


def cache_cases(rules):
    tensors = dict(
        query=numbers(0, 4, 8, 2, 8), key_cache=numbers(1, 4, 4, 9, 8), value_cache=numbers(2, 4, 4, 9, 5),
        lengths=torch.tensor([3, 0, 7, 5]), key=numbers(3, 4, 4, 2, 8), value=numbers(4, 4, 4, 2, 5),
    )  # fmt: skip
    dims = dict(query="BH..", key_cache="BH..", value_cache="BH..", lengths="B", key="BH..", value="BH..")
    held = {n: attnjourney.reference.quantize(tensors[f"{n}_cache"], torch.int8) for n in ("key", "value")}
    in_bytes = {n: x.float() if x.is_floating_point() else x for n, x in tensors.items()}
    in_bytes |= {f"{n}_cache": x for n, (x, _) in held.items()}
    in_bytes |= {f"{n}_scale": scale for n, (_, scale) in held.items()}
    latent = dict(
        query=numbers(0, 4, 4, 2, 7), latent=numbers(1, 4, 9, 8), lengths=torch.tensor([3, 2, 7, 5]),
        weight=numbers(2, 4 * 8, 5),
    )  # fmt: skip
    for rule, out in places(rules, "BH"):
        yield f"cache {rule}", generate, tensors, same(rule, **dims), dict(out=out)
        placed = same(rule, **dims, key_scale="BH.", value_scale="BH.")
        yield f"cache of bytes {rule}", generate_bytes, in_bytes, placed, dict(out=out)
        placed = same(rule, query="BH..", latent="B..", lengths="B", weight="H.")
        yield f"latent {rule}", generate_latent, latent, placed, dict(out=out)


ONE = ("B", "H", "L")
FAMILIES = dict(
    attention=attention_cases, packed=packed_cases, linear=linear_cases, layers=layer_cases, caches=cache_cases
)


def check(rank, family, sizes, rules):
    """{case: what is wrong} on this rank, over a mesh of these sizes; rules: a letter for each of its dimensions."""
    wrong = {}
    if idle(rank, *sizes):
        return wrong
    for name, function, tensors, placements, expected in FAMILIES[family](rules):
        try:
            text = compared(function, tensors, mesh_of(*sizes), placements, **expected)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        if text:
            wrong[name] = text
    return wrong
