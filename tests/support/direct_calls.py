"""A right call of every operator of torch.ops.attnjourney by name, in small random sizes: what tests spoil, lay out in
another way, or repeat. A new operator needs an entry of INPUTS; what its backward and jvp take follows from schemas."""

import random

import torch

import attnjourney  # noqa: F401
from tests.support.quick import operators

SUFFIXES = ("_backward_jvp", "_backward", "_jvp", "_forward", "_with_lse")
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UNREACHED = {"_deterministic_algorithms", "_cpu_info"}  # take nothing that could be spoilt


def family_of(name):
    return next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)


def arguments_of(name):
    return getattr(torch.ops.attnjourney, name).default._schema.arguments


class Maker:
    """Random numbers of one call, the same for the same seed."""

    def __init__(self, seed, dtype=None):
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype or self.chance.choice(FLOATING)
        self.sum_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32

    def pick(self, *values):
        return self.chance.choice(values)

    def normal(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def positive(self, *shape, dtype=None):
        return self.normal(*shape, dtype=dtype).abs() + 0.5

    def mask(self, *shape):
        return torch.rand(shape, generator=self.generator) < 0.8

    def whole(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high + 1, shape, generator=self.generator, dtype=dtype)

    def length(self):
        return self.pick(0, 1, 2, 5, 9, 17, 33, 70)

    def window(self):
        return [self.pick(-1, 0, 3), self.pick(-1, 0, 2)]


def attention_options(m, batch, heads, packed=False):
    options = {
        "is_causal": m.pick(False, True),
        "scale": m.pick(None, 0.5, -0.3),
        "causal_alignment": m.pick(0, 1),
        "window_size": m.window(),
        "prefix_length": m.pick(0, 3),
        "softcap": m.pick(0.0, 2.0),
        "sinks": m.pick(None, m.normal(heads)),
        "alibi_slopes": m.pick(None, m.positive(batch, heads, dtype=torch.float32) / 8),
        "origin": m.pick([0, 0, 0, 0], [0, 0, 1, heads + 2]),
        "dropout_p": m.pick(0.0, 0.0, 0.25),
        "dropout_seed": torch.tensor(m.pick(0, 5, -(1 << 62))),
    }
    if not packed and not options["causal_alignment"]:
        options["origin"][:2] = m.pick([0, 0], [5, 3])
    return options if packed else {**options, "enable_gqa": True}


def attention(m):
    batch, heads, group, q_len, kv_len = m.pick(0, 1, 2), m.pick(1, 2), m.pick(1, 3), m.length(), m.length()
    dim, v_dim = m.pick(1, 8, 17), m.pick(1, 8, 12)
    call = {
        "query": m.normal(batch, heads * group, q_len, dim),
        "key": m.normal(batch, heads, kv_len, dim),
        "value": m.normal(batch, heads, kv_len, v_dim),
        "key_lengths": m.pick(None, m.whole(0, kv_len, batch)),
        "query_lengths": m.pick(None, m.whole(0, q_len, batch, dtype=torch.int32)),
        **attention_options(m, batch, heads * group),
    }
    shape = m.pick((q_len, kv_len), (batch, 1, q_len, kv_len), (heads * group, q_len, 1))
    call["attn_mask"] = m.pick(None, m.mask(*shape), m.normal(*shape), m.normal(*shape, dtype=torch.float32))
    return call


def varlen_attention(m):
    heads, group, sequences = m.pick(1, 2), m.pick(1, 2), m.pick(0, 1, 3)
    q_lens, kv_lens = m.whole(0, 40, sequences), m.whole(0, 40, sequences)
    dim, v_dim, index = m.pick(1, 8), m.pick(1, 12), m.pick(torch.int32, torch.int64)
    ends = [torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)]).to(index) for n in (q_lens, kv_lens)]
    return {
        "query": m.normal(int(q_lens.sum()), heads * group, dim),
        "key": m.normal(int(kv_lens.sum()), heads, dim),
        "value": m.normal(int(kv_lens.sum()), heads, v_dim),
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        **attention_options(m, sequences, heads * group, packed=True),
    }


def block_attention(m):
    call = attention(m)
    del call["attn_mask"]
    (batch, heads, q_len, _), kv_len = call["query"].shape, call["key"].size(2)
    seen = m.mask(m.pick(1, batch), m.pick(1, heads), q_len, kv_len)
    mask = attnjourney.BlockMask.from_dense(seen & m.mask(q_len, kv_len), 16)
    return {**call, **{f"block_{n}": t for n, t in zip(("offsets", "index", "partial", "elements"), mask.tensors)}}


def _weights(m, call):
    heads, q_len = call["query"].shape[1:3]
    del call["value"], call["dropout_p"], call["dropout_seed"]
    call["lse"] = m.positive(*call["query"].shape[:3], dtype=m.sum_dtype) * 9
    call["stats"] = None
    call["rows"] = m.whole(0, q_len - 1, m.pick(0, 1, 3) if q_len else 0) if q_len else m.whole(0, 0, 0)
    call["heads"] = m.whole(0, heads - 1, m.pick(0, 1, 2))
    return call


def explain(m):
    call = m.pick(attention, block_attention)(m)
    del call["dropout_seed"]
    return call


def decode_options(m, batch, heads, q_len, keys):
    shape = m.pick((keys,), (batch, 1, 1, keys), (heads, q_len, 1))
    return {
        "is_causal": m.pick(False, True),
        "window_size": m.window(),
        "scale": m.pick(None, 0.5),
        "attn_mask": m.pick(None, m.mask(*shape), m.normal(*shape)),
        "prefix_length": m.pick(0, 3),
        "softcap": m.pick(0.0, 2.0),
        "sinks": m.pick(None, m.normal(heads)),
        "alibi_slopes": m.pick(None, m.positive(batch, heads) / 8),
    }


def block_table(m, batch, width, blocks):
    """Entries that may be shared, as after a reorder."""
    return m.whole(0, blocks - 1, batch, width, dtype=torch.int32)


def paged_attention(m):
    call = varlen_attention(m)
    sequences, heads, size, width = len(call["cu_seqlens_q"]) - 1, call["key"].size(1), m.pick(1, 8, 16), m.pick(1, 3)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), m.whole(0, size * width, sequences).cumsum(0)])
    caches = {name: m.normal(5, heads, size, call[name].size(2)) for name in ("key", "value")}
    del call["dropout_p"], call["origin"], call["dropout_seed"]
    table = block_table(m, sequences, width, 5)
    return {**call, **caches, "cu_seqlens_k": ends.to(call["cu_seqlens_q"].dtype), "block_table": table}


def attention_fp8(m):
    batch, heads, group, dim, v_dim = m.pick(0, 1, 2), m.pick(1, 2), m.pick(1, 3), m.pick(1, 8, 17), m.pick(1, 12)
    q_len, kv_len = m.pick(1, 9, 140), m.length()
    shapes = {"query": (heads * group, q_len, dim), "key": (heads, kv_len, dim), "value": (heads, kv_len, v_dim)}
    call, scales = {}, {}
    for name, shape in shapes.items():
        x = m.normal(batch, *shape, dtype=torch.float32)
        call[name], scales[f"{name}_scale"] = attnjourney.quantize_fp8(x, m.pick("block", "head", "tensor"))
    return {
        **call,
        **scales,
        "is_causal": m.pick(False, True),
        "scale": m.pick(None, 0.5, -0.3),
        "enable_gqa": True,
        "causal_alignment": m.pick(0, 1),
        "window_size": m.window(),
        "prefix_length": m.pick(0, 3),
        "key_lengths": m.pick(None, m.whole(0, kv_len, batch)),
        "softcap": m.pick(0.0, 2.0),
        "sinks": m.pick(None, m.normal(heads * group, dtype=torch.float32)),
        "out_dtype": m.pick(0, 1, 2),
    }


def in_bytes(m, call, caches):
    """The call, its caches ({name: name of its scale}) sometimes of bytes."""
    call |= dict.fromkeys(caches.values())
    kind = m.pick(None, None, torch.int8, torch.float8_e4m3fn)
    if kind is not None and m.dtype != torch.float64:
        for name, scale in caches.items():
            if call[name] is not None:
                call[name], call[scale] = attnjourney.reference.quantize(call[name], kind)
    return call


SCALES = {"key": "key_scale", "value": "value_scale"}
CACHE_SCALES = {"key_cache": "key_scale", "value_cache": "value_scale"}


def decode(m):
    batch, heads, group, dim, v_dim = m.pick(0, 1, 2), m.pick(1, 2), m.pick(1, 3), m.pick(1, 8, 17), m.pick(1, 12)
    q_len, kind = m.pick(0, 1, 1, 2, 20), m.pick("dense", "paged", "ring")
    outer, slots, capacity, options = batch, m.pick(24, 70), 0, {}
    if kind == "paged":
        outer, slots, width = 5, m.pick(1, 8, 16), m.pick(1, 4)
        options["block_table"] = block_table(m, batch, width, outer)
        capacity = slots * width
    capacity = capacity or slots
    lengths = m.whole(0, 100 if kind == "ring" else capacity, batch)
    options |= decode_options(m, batch, heads * group, q_len, capacity)
    if kind == "ring":
        window = [m.pick(0, 3), 0]
        options |= {"ring": True, "window_size": window, "prefix_length": 0, "attn_mask": None}
    call = {
        "query": m.normal(batch, heads * group, q_len, dim),
        "key": m.normal(outer, heads, slots, dim),
        "value": m.normal(outer, heads, slots, v_dim),
        "lengths": lengths,
        **options,
    }
    return in_bytes(m, call, SCALES)


def mla_decode(m):
    batch, heads, q_len, nope, rope = m.pick(0, 1, 2), m.pick(1, 3), m.pick(0, 1, 2, 40), m.pick(1, 8), m.pick(0, 4)
    kv_lora, v, outer, slots, options = m.pick(4, 16), m.pick(1, 8), batch, 24, {}
    capacity = slots
    if m.pick(False, True):
        outer, slots, capacity = 5, 8, 16
        options["block_table"] = block_table(m, batch, 2, outer)
    call = {
        "query": m.normal(batch, heads, q_len, nope + rope),
        "latent": m.normal(outer, slots, kv_lora + rope),
        "lengths": m.whole(0, capacity, batch),
        "kv_b_weight": m.normal(heads * (nope + v), kv_lora),
        **options,
        **decode_options(m, batch, heads, q_len, capacity),
    }
    return in_bytes(m, call, {"latent": "latent_scale"})


def _new(m, batch, heads, dim, v_dim):
    n = m.pick(0, 1, 3)
    counts = m.pick(None, m.whole(0, n, batch))
    return {"key": m.normal(batch, heads, n, dim), "value": m.normal(batch, heads, n, v_dim), "counts": counts}


def kv_cache_append(m):
    batch, heads, dim, v_dim, ring = m.pick(0, 1, 2), m.pick(1, 2), m.pick(1, 8), m.pick(1, 5), m.pick(False, True)
    call = {
        "key_cache": m.normal(batch, heads, 9, dim),
        "value_cache": m.normal(batch, heads, 9, v_dim),
        "lengths": m.whole(0, 30 if ring else 6, batch),
        "ring": ring,
        **_new(m, batch, heads, dim, v_dim),
    }
    if m.pick(False, False, True):
        call["value_cache"] = call["value"] = None
    return in_bytes(m, call, CACHE_SCALES)


def kv_cache_truncate(m):
    batch = m.pick(0, 1, 3)
    lengths = m.whole(4, 9, batch)
    return {"lengths": lengths, "new_lengths": m.whole(2, 4, batch), "lowest": m.pick(None, m.whole(0, 2, batch))}


def kv_cache_reorder(m):
    call, batch = kv_cache_append(m), 0
    batch = len(call["lengths"])
    index = m.whole(0, batch - 1, batch) if batch else m.whole(0, 0, 0)
    kept = ("key_cache", "value_cache", "lengths", *CACHE_SCALES.values())
    return {name: call[name] for name in kept} | {"batch_index": index}


def _tables(m, batch, size=4, width=3):
    lengths = m.whole(0, size * width - 3, batch)
    table = torch.full((batch, width), -1, dtype=torch.int32)
    refs = torch.zeros(batch * width + 3, dtype=torch.int32)
    blocks = iter(torch.randperm(len(refs), generator=m.generator).tolist())
    for b in range(batch):
        for j in range(-(-int(lengths[b]) // size)):
            table[b, j] = block = next(blocks)
            refs[block] += 1
    if batch > 1 and m.pick(False, True):  # as a reorder leaves them: two sequences share all blocks
        refs[table[1][table[1] >= 0].long()] -= 1
        table[1], lengths[1] = table[0], lengths[0]
        refs[table[1][table[1] >= 0].long()] += 1
    return {"lengths": lengths, "block_table": table, "block_refs": refs}


def paged_cache_append(m):
    batch, heads, dim, v_dim = m.pick(0, 1, 2), m.pick(1, 2), m.pick(1, 8), m.pick(1, 5)
    tables = _tables(m, batch)
    blocks = len(tables["block_refs"])
    caches = {"key_cache": m.normal(blocks, heads, 4, dim), "value_cache": m.normal(blocks, heads, 4, v_dim)}
    return in_bytes(m, {**caches, **tables, **_new(m, batch, heads, dim, v_dim)}, CACHE_SCALES)


def paged_cache_truncate(m):
    tables = _tables(m, m.pick(0, 1, 3))
    shorter = tables["lengths"] - tables["lengths"].clamp(max=m.pick(0, 2, 5))
    return {**tables, "new_lengths": shorter, "block_size": 4}


def paged_cache_reorder(m):
    batch = m.pick(1, 3)
    return {**_tables(m, batch), "batch_index": m.whole(0, batch - 1, batch)}


def linear_attention(m):
    batch, heads, group, length = m.pick(0, 1, 2), m.pick(1, 2), m.pick(1, 3), m.pick(0, 1, 5, 70, 200)
    dim, v_dim, causal, normalize = m.pick(1, 8, 17), m.pick(1, 12), m.pick(False, True), m.pick(False, True)
    kv_len = length if causal else m.pick(0, 1, 9, 150)
    state = m.pick(None, m.positive(batch, heads, dim, v_dim, dtype=m.sum_dtype))
    normalizer = m.positive(batch, heads, dim, dtype=m.sum_dtype) if normalize and state is not None else None
    return {
        "query": m.normal(batch, heads * group, length, dim),
        "key": m.normal(batch, heads, kv_len, dim),
        "value": m.normal(batch, heads, kv_len, v_dim),
        "key_padding_mask": m.pick(None, m.mask(batch, kv_len)),
        "initial_state": state,
        "initial_normalizer": normalizer,
        "feature_map": m.pick(0, 1, 2),
        "is_causal": causal,
        "scale": m.pick(1.0, -0.5),
        "normalize": normalize,
        "eps": m.pick(0.0, 1e-6),
    }


def gated_linear_attention(m):
    packed, length = m.pick(False, True), m.pick(0, 1, 3, 70, 200)
    batch, heads = 1 if packed else m.pick(0, 1, 2), m.pick(1, 2)
    q_heads, kv_heads, v_heads = m.pick((1, 1, 1), (3, 1, 1), (1, 1, 2))
    dim, v_dim, update, channels = m.pick(1, 8, 17), m.pick(1, 12, 40), m.pick(0, 1, 2, 3, 4), m.pick(False, True)
    ends = sorted(m.whole(0, length, 2).tolist()) if length else [0, 0]
    rows, sequences = (batch, heads * v_heads, length), 3 if packed else batch
    gate = m.positive(*rows, dim) if update == 4 or channels else m.positive(*rows)
    return {
        "query": m.normal(batch, heads * q_heads, length, dim),
        "key": m.normal(batch, heads * kv_heads, length, dim) / max(1, dim) ** 0.5,
        "value": m.normal(batch, heads * v_heads, length, v_dim),
        "gate": -gate.to(m.pick(m.dtype, m.sum_dtype)) if update in (1, 3, 4) else None,
        "beta": m.normal(*rows, dtype=m.pick(m.dtype, m.sum_dtype)).sigmoid() if update in (2, 3, 4) else None,
        "initial_state": m.pick(None, m.normal(sequences, heads * v_heads, dim, v_dim, dtype=m.sum_dtype)),
        "cu_seqlens": torch.tensor([0, *ends, length]) if packed else None,
        "update": update,
        "scale": m.pick(1.0, -0.5),
        "qk_l2norm": m.pick(False, True),
    }


def sparse_attention(m):
    batch, group, kv_heads, rows, keys = m.pick(0, 1, 2), m.pick(1, 4, 20), m.pick(1, 2), m.length(), m.length()
    dim, v_dim, block, k = m.pick(1, 8, 17), m.pick(1, 12, 40), m.pick(1, 1, 3, 50), m.pick(0, 1, 7, 40)
    shape = m.pick((batch, -(-rows // block), k), (batch, kv_heads, -(-rows // block), k))
    heads = kv_heads * group
    return {
        "query": m.normal(batch, heads, rows, dim),
        "key": m.normal(batch, kv_heads, keys, dim),
        "value": m.normal(batch, kv_heads, keys, v_dim),
        "indices": m.whole(-2, keys - 1, *shape, dtype=m.pick(torch.int32, torch.int64)),
        "scale": m.pick(None, 0.5, -0.3),
        "enable_gqa": True,
        "is_causal": m.pick(False, True),
        "causal_alignment": m.pick(0, 1),
        "key_lengths": m.pick(None, m.whole(0, keys, batch)),
        "softcap": m.pick(0.0, 1.5),
        "sinks": m.pick(None, m.normal(heads), m.normal(batch, heads, dtype=m.sum_dtype)),
        "query_block_size": block,
    }


def lightning_indexer(m):
    batch, heads, rows, keys, dim = m.pick(0, 1, 2), m.pick(1, 3, 9), m.length(), m.length(), m.pick(1, 8, 17)
    return {
        "query": m.normal(batch, heads, rows, dim),
        "key": m.normal(batch, keys, dim),
        "weights": m.normal(batch, heads, rows, dtype=m.pick(m.dtype, m.sum_dtype)),
        "topk": m.pick(1, 5, 40),
        "is_causal": m.pick(False, True),
        "causal_alignment": m.pick(0, 1),
        "key_lengths": m.pick(None, m.whole(0, keys, batch)),
        "scale": m.pick(1.0, -0.5),
    }


def lightning_indexer_loss(m):
    index = lightning_indexer(m)
    batch, _, rows, _ = index["query"].shape
    keys, dim, kv_heads, group = index["key"].shape[1], m.pick(1, 8, 17), m.pick(1, 2), m.pick(1, 4)
    return {
        "index_query": index["query"],
        "index_key": index["key"],
        "weights": index["weights"],
        "query": m.normal(batch, kv_heads * group, rows, dim),
        "key": m.normal(batch, kv_heads, keys, dim),
        "indices": m.whole(-2, keys - 1, batch, rows, m.pick(0, 1, 7), dtype=m.pick(torch.int32, torch.int64)),
        "index_scale": m.pick(1.0, -0.5),
        "scale": m.pick(None, 0.3),
        "enable_gqa": True,
    }


def _angles(m, batch, seq, half):
    shape = m.pick((seq, half), (batch, seq, half))
    return {name: m.normal(*shape, dtype=m.pick(torch.float32, m.dtype)) for name in ("cos", "sin")}


def rope(m):
    batch, seq, dim = m.pick(0, 1, 2), m.pick(0, 1, 5), m.pick(2, 8, 9)
    x = m.normal(batch, m.pick(1, 3), seq, dim)
    return {"x": x, **_angles(m, batch, seq, m.pick(0, 1, dim // 2)), "interleaved": m.pick(False, True)}


def mha(m):
    batch, q_len, heads = m.pick(0, 1, 2), m.pick(0, 1, 9, 40), m.pick(1, 3)
    embed = heads * m.pick(1, 8)
    kv_len = m.pick(0, 1, 7)
    given = m.pick("", "key", "value", "key value")
    kv_len = kv_len if given == "key value" else q_len
    masks = [(q_len, kv_len), (batch * heads, q_len, kv_len)], [(batch, kv_len)]
    return {
        "query": m.normal(batch, q_len, embed),
        "key": m.normal(batch, kv_len, embed) if "key" in given else None,
        "value": m.normal(batch, kv_len, embed) if "value" in given else None,
        "num_heads": heads,
        "in_proj_weight": m.normal(3 * embed, embed),
        "in_proj_bias": m.pick(None, m.normal(3 * embed)),
        "out_proj_weight": m.normal(embed, embed),
        "out_proj_bias": m.pick(None, m.normal(embed)),
        **{
            name: m.pick(None, ~m.mask(*shape), m.normal(*shape), m.normal(*shape, dtype=torch.float32))
            for name, shape in zip(("attn_mask", "key_padding_mask"), map(m.chance.choice, masks))
        },
        "is_causal": m.pick(False, True),
        "dropout_p": m.pick(0.0, 0.0, 0.25),
        "dropout_seed": torch.tensor(7),
    }


def gpt_attention(m):
    heads = m.pick(1, 3)
    embed = heads * m.pick(1, 8)
    return {
        "x": m.normal(m.pick(0, 1, 2), m.pick(0, 1, 9, 40), embed),
        "num_heads": heads,
        "qkv_weight": m.normal(3 * embed, embed),
        "qkv_bias": m.pick(None, m.normal(3 * embed)),
        "out_weight": m.normal(embed, embed),
        "out_bias": m.pick(None, m.normal(embed)),
        "dropout_p": m.pick(0.0, 0.0, 0.25),
        "dropout_seed": torch.tensor(7),
    }


def gqa(m):
    batch, seq, kv_heads, group, dim, v_dim = m.pick(0, 1, 2), m.pick(0, 1, 9), m.pick(1, 2), m.pick(1, 2), 8, 6
    embed, heads, out = m.pick(1, 12), kv_heads * group, m.pick(1, 5)
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * v_dim, "o": out}
    return {
        "x": m.normal(batch, seq, embed),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        **{f"{n}_weight": m.normal(size, heads * v_dim if n == "o" else embed) for n, size in rows.items()},
        **{f"{n}_bias": m.pick(None, m.normal(size)) for n, size in rows.items()},
        **m.pick({}, _angles(m, batch, seq, 3)),
        "is_causal": m.pick(False, True),
    }


def mla(m):
    batch, seq, heads, nope, rope_dim, v = m.pick(0, 1, 2), m.pick(0, 1, 9), m.pick(1, 2), m.pick(0, 8), 4, m.pick(1, 6)
    embed, kv_lora, q_lora, out = m.pick(1, 12), m.pick(1, 8), m.pick(None, 6), m.pick(1, 5)
    return {
        "x": m.normal(batch, seq, embed),
        "num_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": v,
        "q_a_weight": q_lora and m.normal(q_lora, embed),
        "q_a_norm_weight": q_lora and m.normal(q_lora),
        "q_b_weight": m.normal(heads * (nope + rope_dim), q_lora or embed),
        "kv_a_weight": m.normal(kv_lora + rope_dim, embed),
        "kv_a_norm_weight": m.normal(kv_lora),
        "kv_b_weight": m.normal(heads * (nope + v), kv_lora),
        "o_weight": m.normal(out, heads * v),
        **m.pick({}, _angles(m, batch, seq, rope_dim // 2)),
        "is_causal": m.pick(False, True),
        "scale": m.pick(None, 0.5),
        "eps": m.pick(0.0, 1e-6),
    }


INPUTS = {
    "attention": attention,
    "attention_fp8": attention_fp8,
    "varlen_attention": varlen_attention,
    "paged_attention": paged_attention,
    "block_attention": block_attention,
    "_attention_weights": lambda m: _weights(m, attention(m)),
    "_block_attention_weights": lambda m: _weights(m, block_attention(m)),
    "_explain": explain,
    "decode": decode,
    "mla_decode": mla_decode,
    "kv_cache_append": kv_cache_append,
    "kv_cache_truncate": kv_cache_truncate,
    "kv_cache_reorder": kv_cache_reorder,
    "paged_cache_append": paged_cache_append,
    "paged_cache_truncate": paged_cache_truncate,
    "paged_cache_reorder": paged_cache_reorder,
    "linear_attention": linear_attention,
    "gated_linear_attention": gated_linear_attention,
    "lightning_indexer": lightning_indexer,
    "lightning_indexer_loss": lightning_indexer_loss,
    "sparse_attention": sparse_attention,
    "rope": rope,
    "rope_": rope,
    "mha": mha,
    "gpt_attention": gpt_attention,
    "gqa": gqa,
    "mla": mla,
}


def covered():
    """The operators that `call_of` makes calls of."""
    return [name for name in operators() if name not in UNREACHED]


def _like(m, x):
    return None if x is None or not x.is_floating_point() else m.normal(*x.shape, dtype=x.dtype)


def call_of(name, seed, dtype=None):
    """The arguments of a right call by name, in the order of the schema."""
    m = Maker(seed, dtype)
    known = INPUTS[family_of(name)](m)
    names = [a.name for a in arguments_of(name)]
    if name == "mha":  # mha_forward's None is a tensor given again
        for which, again in (("key", "query"), ("value", "key")):
            known[which] = known[again] if known[which] is None else known[which]
    if name.endswith(("_backward", "_jvp")):
        forward = getattr(torch.ops.attnjourney, family_of(name) + "_forward").default
        inputs = {a.name: known[a.name] for a in forward._schema.arguments if a.name in known}
        outputs = dict(zip((r.name for r in forward._schema.returns), forward(**inputs)))
        known |= outputs
        known |= {f"grad_{n}": m.pick(_like(m, x), _like(m, x), None) for n, x in outputs.items()}
        first = next(iter(outputs))  # whose gradient may not be missing
        known[f"grad_{first}"] = _like(m, outputs[first])
        tangents = {f"{n}_tangent": _like(m, x) for n, x in known.items() if isinstance(x, torch.Tensor)}
        optional = ("out_tangent", "lse_tangent")  # those that may not be missing
        known |= {n: x if n in optional else m.pick(x, x, None) for n, x in tangents.items()}
        gradients = getattr(torch.ops.attnjourney, family_of(name) + "_backward").default._schema.returns
        known["need"] = (1 << len(gradients)) - 1
    return {n: known[n] for n in names if n in known}


def run(name, call):
    """The results of a call as a tuple, with what it wrote into its arguments."""
    result = getattr(torch.ops.attnjourney, name).default(**call)
    results = result if isinstance(result, (tuple, list)) else (result,)
    written = [call[a.name] for a in arguments_of(name) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(x for x in (*results, *written) if x is not None)
