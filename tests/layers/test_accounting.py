"""account: parameters beside p.numel(), FLOPs beside torch.utils.flop_counter, published counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnjourney import (
    KVCache,
    PagedKVCache,
    PagedLatentCache,
    account,
    gated_linear_attention,
    lightning_indexer,
    nn,
    sparse_attention,
)

RANKS = dict(kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
LAYERS = {
    "mha": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
    "gpt": lambda: nn.CausalSelfAttention(16, 4),
    "gqa": lambda: nn.GroupedQueryAttention(16, 4, 2, head_dim=6, bias=True),
    "mla": lambda: nn.MultiheadLatentAttention(16, 3, q_lora_rank=5, **RANKS),
    "mla direct": lambda: nn.MultiheadLatentAttention(16, 3, q_lora_rank=None, **RANKS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name):
    layer, batch, seq = LAYERS[name](), 3, 7
    result = account(layer, seq, batch, torch.float32)
    assert result.parameters == sum(p.numel() for p in layer.parameters())
    x = torch.randn(batch, seq, 16, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = layer(x, x, x, need_weights=False)[0] if name == "mha" else layer(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert result.forward_flops == forward.get_total_flops()
    assert result.backward_flops == backward.get_total_flops()


@pytest.mark.parametrize("name, numbers", [("mha", 32), ("gpt", 32), ("gqa", 24), ("mla", 14)])
def test_cache(name, numbers):
    for dtype in (torch.bfloat16, torch.float32):
        assert account(LAYERS[name](), 5, dtype=dtype).cache_bytes_per_token == numbers * dtype.itemsize


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int8), ids=str)
@pytest.mark.parametrize("name", ("gqa", "mla"))
def test_bytes_of_sequences_that_begin_alike(name, dtype):
    """Beside the blocks that three sequences of 24 tokens hold, the first 16 in common."""
    sizes = dict(block_size=8, dtype=dtype)
    cache = PagedLatentCache(3, 24, 10, 4, **sizes) if name == "mla" else PagedKVCache(3, 2, 24, 6, **sizes)
    width = {"mla": (14,), "gqa": (6, 6)}[name]
    new = [torch.zeros(3, *([2] if name == "gqa" else []), 16, n, dtype=torch.bfloat16) for n in width]
    cache.append(*new, torch.tensor([16, 0, 0]))
    cache.fork(0, [1, 2])
    cache.append(*(x[..., :8, :] for x in new))
    counted = account(LAYERS[name](), 24, 3, dtype)
    assert cache.held_nbytes == counted.cache_bytes(shared_prefix=16) < counted.cache_bytes()
    cache.free([1, 2])
    assert cache.held_nbytes == account(LAYERS[name](), 24, 1, dtype).cache_bytes()
    with pytest.raises(ValueError, match="shared_prefix: expected a number from 0 to 24 \\(seq_len\\), got 25"):
        counted.cache_bytes(25)


def test_decoding_is_the_forward_of_one_token_beside_the_cache():
    """One query beside 9 keys; the projections of one token."""
    layer = LAYERS["gqa"]()
    q, k = torch.randn(1, 4, 1, 6), torch.randn(1, 2, 9, 6)
    with FlopCounterMode(display=False) as counter:
        torch.ops.attnjourney.attention(q, k, k, enable_gqa=True)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            torch.nn.functional.linear(torch.randn(1, p.in_features), p.weight)
    assert account(layer, 9).decode_flops_per_token == counter.get_total_flops()
    latent = LAYERS["mla"]()
    matrices = sum(p.numel() for p in latent.parameters() if p.dim() == 2)
    assert account(latent, 9).decode_flops_per_token == 2 * matrices + 2 * 3 * 9 * (10 + 4 + 10)


def test_the_profiler_names_our_operators():
    layer, cache = LAYERS["gqa"](), KVCache(2, 2, 8, 6)
    with torch.profiler.profile() as profile:
        layer(torch.randn(2, 3, 16)).sum().backward()
        with torch.no_grad():
            layer(torch.randn(2, 3, 16), cache=cache)
    seen = {event.key for event in profile.key_averages()}
    assert {f"attnjourney::{name}" for name in ("gqa", "gqa_backward", "kv_cache_append", "decode")} <= seen


def test_a_model_with_shared_parts():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 16)
            self.blocks = torch.nn.ModuleList([nn.CausalSelfAttention(16, 4) for _ in range(3)])
            self.blocks.append(self.blocks[0])
            self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 20)
            self.head = torch.nn.Linear(16, 11, bias=False)
            self.head.weight = self.embedding.weight

    model, one = Model(), account(LAYERS["gpt"](), 5)
    result = account(model, 5)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    parts = {row.name: row for row in result.parts}
    linear = parts["other linear layers"]
    assert linear.forward_flops == 2 * 5 * (2 * 16 * 20 + 11 * 16)
    gpt = [row for row in result.parts if row.name.startswith("CausalSelfAttention")]
    assert sum(row.forward_flops for row in gpt) == 4 * one.forward_flops  # four uses
    assert sum(row.parameters for row in gpt) == 3 * one.parameters  # of three layers
    encoder = next(row for row in result.parts if row.name == "MultiheadAttention encoder.self_attn")
    assert encoder.parameters == 4 * 16 * 16 + 4 * 16


def test_gpt3():
    config = dict(model_type="gpt2", n_embd=12288, n_layer=96, n_head=96, vocab_size=50257, n_positions=2048)
    result = account(config, 2048)
    parts = {row.name: row for row in result.parts}
    assert result.parameters == 174_604_259_328
    matrices = parts["attention"].parameters + parts["MLP"].parameters - 96 * 9 * 12288  # without biases
    assert matrices == 12 * 96 * 12288**2 == 173_946_175_488
    attention = parts["attention"].parameters - 96 * 4 * 12288
    assert attention == 57_982_058_496 and attention // 96 == 603_979_776 and attention // 96 // 96 == 6_291_456
    assert parts["attention"].cache_bytes_per_token == 96 * 2 * 12288 * 2


DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, vocab_size=129280,
)  # fmt: skip


def test_deepseek_v3():
    result = account(DEEPSEEK_V3, 4096)
    parts = {row.name: row for row in result.parts}
    assert parts["latent attention"].parameters == 61 * 187_105_280
    assert parts["norms of the latents"].parameters == 61 * 2_048
    assert parts["latent attention"].cache_bytes_per_token == 61 * 576 * 2
    assert round(result.parameters / 1e9) == 671
    active = result.decode_flops_per_token - parts["latent attention"].decode_flops_per_token
    active += 61 * 2 * 187_105_280
    assert round(active / 2e9) == 37  # the published active parameters


DEEPSEEK_V32 = {
    **DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64
}  # fmt: skip


def test_deepseek_v32():
    """Beside DeepSeek-V3: a row's scores of 2,048 keys at most, its indexer's of all past ones, 128 numbers cached."""
    dense, sparse = (account(c, 8192, 2) for c in (DEEPSEEK_V3, DEEPSEEK_V32))
    parts = {row.name: row for row in sparse.parts}
    indexer, attention = parts["lightning indexer"], parts["latent attention"]
    matrices = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64
    assert matrices == 13_959_168 and indexer.parameters == 61 * (matrices + 2 * 128) == 851_524_864
    assert sparse.parameters == dense.parameters + indexer.parameters
    past = 8192 * 8193 // 2
    assert indexer.forward_flops == 61 * 2 * (2 * 8192 * matrices + 2 * past * 64 * 128)
    assert indexer.backward_flops == 0
    other = {row.name: row for row in dense.parts}["latent attention"]
    assert other.forward_flops - attention.forward_flops == 61 * 2 * 2 * 8192 * 128 * (8192 - 2048) * (192 + 128)
    assert other.backward_flops - attention.backward_flops == 61 * 2 * 2 * 8192 * 128 * 6144 * (3 * 192 + 2 * 128)
    assert attention.decode_flops_per_token == 61 * (2 * 187_105_280 + 2 * 128 * 2048 * (512 + 64 + 512))
    assert indexer.decode_flops_per_token == 61 * (2 * matrices + 2 * 64 * 8192 * 128)
    assert sparse.cache_bytes_per_token == 61 * (576 + 128) * 2
    assert account(DEEPSEEK_V32, 8192, dtype=torch.float8_e4m3fn).cache_bytes_per_token == 61 * (576 + 4 + 128 + 4)
    short = {row.name: row for row in account(DEEPSEEK_V32, 100).parts}["latent attention"]  # all keys are chosen
    assert short.forward_flops == account(DEEPSEEK_V3, 100).parts[0].forward_flops


@pytest.mark.parametrize(
    "types, count",
    [
        ({}, 5),
        (dict(indexer_types=["full", "shared", "shared", "full", "shared"]), 2),
        (dict(index_topk_pattern="FSSSF"), 2),
        (dict(index_topk_freq=3, index_skip_topk_offset=2), 3),  # layers 0, 1 and 4
    ],
)
def test_layers_that_share_an_indexer(types, count):
    config = {**DEEPSEEK_V32, "model_type": "glm_moe_dsa", "num_hidden_layers": 5, **types}
    (row,) = [row for row in account(config, 100).parts if row.name == "lightning indexer"]
    assert row.count == count and row.cache_bytes_per_token == count * 128 * 2


def test_the_indexer_beside_the_operators_own_counts():
    sizes = dict(num_hidden_layers=1, q_lora_rank=5, index_topk=6, index_head_dim=8, index_n_heads=2)
    config = {**TINY["deepseek_v3"], "model_type": "deepseek_v32", **sizes, "first_k_dense_replace": 0}
    parts = {row.name: row for row in account(config, 11, 3).parts}
    query, key = torch.randn(3, 3, 11, 12, requires_grad=True), torch.randn(3, 3, 11, 12)
    with FlopCounterMode(display=False) as forward:
        indices = lightning_indexer(torch.randn(3, 2, 11, 8), torch.randn(3, 11, 8), torch.randn(3, 2, 11), 6)
        scores = forward.get_total_flops()
        out = sparse_attention(query, key, key[..., :6], indices)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    matrices = 5 * 2 * 8 + 16 * (8 + 2)
    assert parts["lightning indexer"].forward_flops == scores + 2 * 33 * matrices
    latent = 5 * (16 + 3 * 12) + 16 * 14 + 10 * 3 * 14 + 3 * 6 * 16
    assert parts["latent attention"].forward_flops == forward.get_total_flops() - scores + 2 * 33 * latent
    assert parts["latent attention"].backward_flops == backward.get_total_flops() + 4 * 33 * latent


TINY = {
    "gpt2": dict(n_embd=16, n_layer=2, n_head=2, vocab_size=19, n_positions=8),
    "llama": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
                  intermediate_size=20, vocab_size=19, attention_bias=True, mlp_bias=True),
    "mistral": dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
                    intermediate_size=20, vocab_size=19, tie_word_embeddings=True),
    "qwen2": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  intermediate_size=20, vocab_size=19),
    "qwen3": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
                  intermediate_size=20, vocab_size=19),
    "deepseek_v3": dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
                        q_lora_rank=None, **RANKS, intermediate_size=20, moe_intermediate_size=6, n_routed_experts=8,
                        n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2, topk_group=1,
                        vocab_size=19, attention_bias=True),
}  # fmt: skip
INDEXER = dict(q_lora_rank=5, index_topk=4, index_head_dim=8, index_n_heads=2)
TINY["deepseek_v32"] = {**TINY["deepseek_v3"], **INDEXER}
TINY["glm_moe_dsa"] = {**TINY["deepseek_v32"], "indexer_types": ["full", "shared", "full"]}


@pytest.mark.parametrize("kind", TINY)
def test_configurations_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"a transformers without {kind}")
    config = transformers.AutoConfig.for_model(kind, **TINY[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters())
    assert account(config, 4).parameters == expected
    assert account({"model_type": kind, **config.to_dict()}, 4).parameters == expected


def test_flops_of_a_configuration_are_those_of_the_modules():
    config = dict(model_type="llama", **TINY["qwen3"])
    attention = account(config, 9, 2).parts[0]
    layer = account(nn.GroupedQueryAttention(16, 4, 2, head_dim=6), 9, 2)
    for name in ("parameters", "forward_flops", "backward_flops", "decode_flops_per_token", "cache_bytes_per_token"):
        assert getattr(attention, name) == 2 * getattr(layer, name), name


def test_dict_and_table():
    pytest.importorskip("rich")
    result = account(DEEPSEEK_V3, 4096, 2, torch.float8_e4m3fn)
    as_dict = result.as_dict()
    assert as_dict["parameters"] == sum(part["parameters"] for part in as_dict["parts"])
    assert as_dict["dtype"] == "float8_e4m3fn" and as_dict["cache_bytes_per_token"] == 61 * (576 + 4)
    text = str(result)
    for row in result.parts:
        assert row.name in text and f"{row.parameters:,}" in text
    assert f"{result.forward_flops:,}" in text and "batch 2 x 4096 tokens" in text


def test_errors():
    for arguments, error, message in (
        (({"model_type": "rnn"}, 4), ValueError, "model: expected a model_type of gpt2, .*, got 'rnn'"),
        (({"model_type": "gpt2", "n_embd": 4}, 4), ValueError, "model: expected a configuration with n_layer"),
        ((3, 4), TypeError, "model: expected a torch.nn.Module, a configuration or a dict, got int"),
        ((DEEPSEEK_V3, 0), ValueError, "seq_len: expected a positive number, got 0"),
    ):
        with pytest.raises(error, match=message):
            account(*arguments)


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_model_with_states(name):
    """Parameters beside those of transformers; FLOPs of the delta rule beside the operator's own count."""
    fla = pytest.importorskip("tests.integrations.test_fla")
    model, config = getattr(fla, name)(pytest.importorskip("transformers"))
    result = account(config, 100, 2)
    assert result.parameters == sum(p.numel() for p in model(config).parameters())
    (part,) = [row for row in result.parts if row.name == "gated delta rule"]
    q, k, v = torch.randn(2, 2, 100, 8, requires_grad=True), torch.randn(2, 2, 100, 8), torch.randn(2, 4, 100, 12)
    with FlopCounterMode(display=False) as forward:
        out, state = gated_linear_attention(q, k, v, v[..., 0], v[..., 0], return_state=True)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    matrices = 32 * (2 * 16 + 2 * 48 + 8) + 48 * 32
    assert part.count == 1 and part.state_bytes_per_sequence == 4 * state[0].numel()
    assert part.forward_flops == forward.get_total_flops() + 2 * 200 * matrices
    assert part.backward_flops == backward.get_total_flops() + 4 * 200 * matrices
    assert (
        result.state_bytes_per_sequence == part.state_bytes_per_sequence and result.cache_bytes_per_token == 2 * 2 * 16
    )
