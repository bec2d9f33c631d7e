"""attnjourney.trace_module: the stages of every module of attnjourney.nn lead to what the module returns."""

import pytest
import torch

import attnjourney
from attnjourney import nn
from attnjourney.nn._parts import merge_heads
from tests.support.testing import DTYPES, random_tensor

FP64 = {"dtype": torch.float64}


def x_of(batch=2, seq=7, width=16, dtype=torch.float64, seed=1):
    return random_tensor((batch, seq, width), dtype, seed, outliers=False)


def latent_attention(**options):
    sizes = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, rope=10000.0)
    return nn.MultiheadLatentAttention(16, 4, **{"q_lora_rank": 8, **sizes, **options}, dtype=torch.float64)


PADDING = torch.arange(7) >= torch.tensor([[7], [4]])
MODULES = {  # name -> (module, output projection, keywords of forward)
    "gpt": (lambda: nn.CausalSelfAttention(16, 4, **FP64), "out_proj", {}),
    "gpt, padded": (lambda: nn.CausalSelfAttention(16, 4, **FP64), "out_proj", {"key_padding_mask": PADDING}),
    "gqa": (lambda: nn.GroupedQueryAttention(16, 4, 2, rope=1e4, **FP64), "o_proj", {}),
    "gqa, options": (
        lambda: nn.GroupedQueryAttention(
            16, 4, 2, rope=1e4, window_size=(2, -1), softcap=2.0, sinks=True, qk_norm=True, **FP64
        ),
        "o_proj",
        {"key_padding_mask": PADDING},
    ),
    "mla": (latent_attention, "o_proj", {}),
    "mla, direct": (lambda: latent_attention(q_lora_rank=None), "o_proj", {}),
    "mla, padded": (latent_attention, "o_proj", {"key_padding_mask": PADDING}),
    "linear": (lambda: nn.LinearAttention(16, 4, 2, **FP64), "o_proj", {"key_padding_mask": PADDING}),
    "linear, all keys": (lambda: nn.LinearAttention(16, 4, feature_map="relu", is_causal=False, **FP64), "o_proj", {}),
    "linear, fla": (
        lambda: nn.LinearAttention(16, 4, feature_map=None, scale=0.5, normalize=False, **FP64), "o_proj", {}
    ),
    "infini": (lambda: nn.InfiniAttention(16, 4, 2, segment_length=3, rope=1e4, **FP64), "o_proj", {}),
    "infini, delta": (lambda: nn.InfiniAttention(16, 4, segment_length=2, update="delta", **FP64), "o_proj", {}),
    "longformer": (lambda: nn.LongformerSelfAttention(16, 4, 1, **FP64), None, {}),
    "longformer, global": (
        lambda: nn.LongformerSelfAttention(16, 4, 1, dilation=[1, 2, 1, 3], is_causal=True, **FP64),
        None,
        {"global_mask": torch.arange(7) == torch.tensor([[2], [6]]), "key_padding_mask": PADDING},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_stages_lead_to_the_result(name):
    make, projection, keywords = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval(), x_of()
    with torch.no_grad():
        expected = module(x, **keywords)
    seen = attnjourney.trace_module(module, x, **keywords)
    assert torch.equal(seen.result, expected)
    out = merge_heads(seen.output)
    with torch.no_grad():
        out = out if projection is None else getattr(module, projection)(out)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-12)
    part = attnjourney.trace_module(module, x, rows=[-1, 2], heads=[3, 0], **keywords)
    torch.testing.assert_close(part.output, seen.output[:, [3, 0]][:, :, [6, 2]], atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(part.weights, seen.weights[:, [3, 0]][:, :, [6, 2]], atol=1e-14, rtol=1e-12)
    assert str(part).startswith(f"{type(module).__name__}: rows 6, 2, heads 3, 0\n")


class Chosen(torch.nn.Module):
    """Token-sparse attention by an indexer, two key heads."""

    num_heads = 4

    def forward(self, query, key, value, index_query, index_key, weights):
        indices = attnjourney.lightning_indexer(index_query, index_key, weights, 3)
        return attnjourney.sparse_attention(query, key, value, indices, enable_gqa=True, softcap=2.0)


def test_token_sparse_attention():
    shapes = ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 5), (2, 3, 7, 6), (2, 7, 6), (2, 3, 7))
    inputs = [random_tensor(s, torch.float64, i, outliers=False) for i, s in enumerate(shapes)]
    seen = attnjourney.trace_module(Chosen(), *inputs, rows=[-1, 2], heads=[3, 0])
    torch.testing.assert_close(seen.output, Chosen()(*inputs)[:, [3, 0]][:, :, [6, 2]], atol=1e-14, rtol=1e-12)
    indices = attnjourney.lightning_indexer(*inputs[3:], 3)[:, [6, 2]]
    for b, row in ((0, 0), (1, 1)):
        assert seen.mask[b, 0, row].nonzero().flatten().tolist() == indices[b, row].tolist()
    scores = inputs[0][:, [3, 0]][:, :, [6, 2]] @ inputs[1][:, [1, 0]].mT / 8**0.5
    torch.testing.assert_close(seen.scores, scores)
    assert "softcapped" in seen and str(seen).startswith("Chosen: rows 6, 2, heads 3, 0\n")


def test_multihead_attention():
    torch.manual_seed(0)
    for bias_kv, masks in ((False, {}), (True, {}), (False, {"key_padding_mask": PADDING})):
        module = nn.MultiheadAttention(16, 4, 0.0, add_bias_kv=bias_kv, batch_first=True, dtype=torch.float64)
        x = x_of()
        blocked = torch.ones(7, 7, dtype=torch.bool).triu(2)
        for need_weights in (False, True):
            call = dict(attn_mask=blocked, need_weights=need_weights, average_attn_weights=False, **masks)
            seen = attnjourney.trace_module(module, x, x, x, **call)
            torch.testing.assert_close(module.out_proj(merge_heads(seen.output)), seen.result[0])
            if need_weights:
                torch.testing.assert_close(seen.weights, seen.result[1])
    module = nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True, dtype=torch.float64)
    other = x_of(seq=5, width=12)
    seen = attnjourney.trace_module(module, x, other, 2 * other, need_weights=False)
    torch.testing.assert_close(module.out_proj(merge_heads(seen.output)), seen.result[0])


@pytest.mark.parametrize("memories", [(0, 0), (0, 1), (1, 1), (1, 2)])
def test_the_projections_of_mha(memories):
    """Inputs that are one tensor are projected together, in every combination."""
    inputs = [x_of(seed=s) for s in (1, 2, 3)]
    module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x, key, value = inputs[0], *(inputs[i] for i in memories)
    seen = attnjourney.trace_module(module, x, key, value, need_weights=False)
    torch.testing.assert_close(module.out_proj(merge_heads(seen.output)), seen.result[0])


def test_dropout_has_the_bits_of_the_layer():
    torch.manual_seed(0)
    module, x = nn.CausalSelfAttention(16, 4, dropout=0.4, dtype=torch.float64), x_of()
    seen = attnjourney.trace_module(module, x)
    torch.testing.assert_close(module.out_proj(merge_heads(seen.output)), seen.result)
    assert 0 < (~seen.kept).double().mean() < 0.8


def test_stages_of_latent_attention():
    module, x = latent_attention(), x_of()
    for keywords in ({}, {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}):
        seen = attnjourney.trace_module(module, x, **keywords)
        kv_a = module.kv_a_proj_with_mqa(x)
        torch.testing.assert_close(seen.latent, module.kv_a_layernorm(kv_a[..., :8]))
        angles = torch.arange(7.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
        turned = torch.polar(torch.ones_like(angles), angles) * torch.view_as_complex(
            kv_a[..., 8:].unflatten(-1, (2, 2))
        )
        torch.testing.assert_close(seen.k_pe, torch.view_as_real(turned).flatten(-2))
        expanded = module.kv_b_proj(seen.latent).unflatten(-1, (4, 8)).transpose(1, 2)
        torch.testing.assert_close(seen.key[..., :4], expanded[..., :4])
        torch.testing.assert_close(seen.value, expanded[..., 4:])
        for head in range(4):  # one rotary key for all heads
            assert torch.equal(seen.key[:, head, :, 4:], seen.k_pe)
    assert "query_unrotated" in attnjourney.trace_module(module, x)


def test_queries_and_keys_before_and_after_rotation():
    for options in ({}, {"softcap": 3.0}):  # one operator, and composed
        module, x = nn.GroupedQueryAttention(16, 4, 2, rope=1e4, dtype=torch.float64, **options), x_of()
        seen = attnjourney.trace_module(module, x, heads=[3], rows=[5, 1])
        raw = module.k_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)[:, 1:]
        torch.testing.assert_close(seen.key_unrotated, raw)
        assert seen.query_unrotated.shape == seen.query.shape == (2, 1, 2, 4)
        for raw, turned, at in (
            (seen.query_unrotated, seen.query, [5.0, 1.0]),
            (seen.key_unrotated, seen.key, range(7)),
        ):
            torch.testing.assert_close(raw.norm(dim=-1), turned.norm(dim=-1))  # a rotation keeps the length
            angles = torch.tensor(list(at), dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01]).double()
            a, b = raw.chunk(2, -1)
            expected = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
            torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("kind", ["dense", "window", "paged"])
def test_over_a_cache(kind):
    window = (3, -1) if kind == "window" else (-1, -1)
    module = nn.GroupedQueryAttention(16, 4, 2, rope=1e4, window_size=window, dtype=torch.float64)
    sizes = {"head_dim": 4, "dtype": torch.float64}
    cache = {
        "dense": lambda: attnjourney.KVCache(2, 2, 32, **sizes),
        "window": lambda: attnjourney.WindowCache(2, 2, 3, max_append=4, **sizes),
        "paged": lambda: attnjourney.PagedKVCache(2, 2, 32, block_size=4, **sizes),
    }[kind]()
    x = x_of(seq=12)
    whole = attnjourney.trace_module(module, x, rows=[-1])
    for start, stop in ((0, 4), (4, 8), (8, 11)):
        with torch.no_grad():
            module(x[:, start:stop], cache=cache)
    seen = attnjourney.trace_module(module, x[:, 11:], cache=cache)
    assert cache.lengths.tolist() == [12, 12]
    torch.testing.assert_close(seen.output, whole.output)
    torch.testing.assert_close(seen.weights, whole.weights[..., -seen.weights.shape[-1] :])
    torch.testing.assert_close(seen.query_unrotated, whole.query_unrotated)


def test_latents_over_a_cache():
    module, x = latent_attention(), x_of(seq=12)
    cache = attnjourney.LatentCache(2, 32, 8, 4, dtype=torch.float64)
    whole = attnjourney.trace_module(module, x, rows=[-1])
    with torch.no_grad():
        module(x[:, :11], cache=cache)
    seen = attnjourney.trace_module(module, x[:, 11:], cache=cache, heads=[1, 3])
    for name in ("latent", "k_pe", "key", "value", "weights", "output"):
        expected = whole[name] if whole[name].dim() == 3 else whole[name][:, [1, 3]]
        torch.testing.assert_close(seen[name], expected, msg=name)


def test_linear_attention_with_a_state():
    module, x = nn.LinearAttention(16, 4, 2, dtype=torch.float64), x_of()
    with torch.no_grad():
        expected, state = module(x[:, :4], return_state=True)
        expected = module(x)
    seen = attnjourney.trace_module(module, x[:, 4:], initial_state=state)
    with torch.no_grad():
        torch.testing.assert_close(module.o_proj(merge_heads(seen.output)), expected[:, 4:])


def test_infini_attention_with_a_memory():
    module, x = nn.InfiniAttention(16, 4, segment_length=3, update="delta", dtype=torch.float64), x_of(seq=9)
    whole = attnjourney.trace_module(module, x)
    with torch.no_grad():
        _, memory = module(x[:, :6], return_memory=True)
    seen = attnjourney.trace_module(module, x[:, 6:], memory=memory)
    for name in ("local_output", "memory_output", "output"):
        torch.testing.assert_close(seen[name], whole[name][:, :, 6:])
    assert not whole.memory_output[:, :, :3].any()  # an empty memory reads 0


def test_other_dtypes():
    for dtype in DTYPES[1:]:
        for name in ("gqa", "mla", "linear", "infini", "longformer"):
            torch.manual_seed(0)
            module, x = MODULES[name][0]().to(dtype), x_of(dtype=dtype)
            seen = attnjourney.trace_module(module, x, **MODULES[name][2])
            assert seen.output.dtype == dtype and seen.weights.dtype == torch.float32
            out = merge_heads(seen.output)
            with torch.no_grad():
                out = out if MODULES[name][1] is None else module.o_proj(out)
            assert (out - seen.result).abs().max() <= 8 * torch.finfo(dtype).eps * seen.result.abs().max()


def test_errors():
    x = x_of(dtype=torch.float32)
    with pytest.raises(TypeError, match="module: expected a torch.nn.Module, got Tensor"):
        attnjourney.trace_module(x)
    two = torch.nn.Sequential(nn.CausalSelfAttention(16, 4), nn.GroupedQueryAttention(16, 4, 2))
    with pytest.raises(ValueError, match="one attention call, got gpt_attention, gqa: trace the module inside"):
        attnjourney.trace_module(two, x)
    with pytest.raises(ValueError, match="one attention call, got none"):
        attnjourney.trace_module(torch.nn.Linear(16, 16), x)
    with pytest.raises(ValueError, match="without dropout"):
        attnjourney.trace_module(nn.LongformerSelfAttention(16, 4, 1, dropout=0.5), x)
    with pytest.raises(ValueError, match="heads: expected numbers from -4 to 3, got 4"):
        attnjourney.trace_module(two[0], x, heads=[4])
