"""The arguments of CausalSelfAttention, GroupedQueryAttention and MultiheadLatentAttention, beside other layers."""

import copy
import math

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from attnjourney import nn
from tests.support.layer_checks import assert_agree
from tests.support.testing import random_tensor

double = torch.float64
RANKS = dict(kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
YARN = dict(method="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.3)
MAKE = {
    "gpt": lambda: nn.CausalSelfAttention(16, 2, dtype=double),
    "gqa": lambda: nn.GroupedQueryAttention(16, 4, 2, bias=True, rope=100.0, dtype=double),
    "mqa": lambda: nn.GroupedQueryAttention(16, 4, 1, rope=dict(rotary_dim=2), is_causal=False, dtype=double),
    "mla": lambda: nn.MultiheadLatentAttention(16, 3, q_lora_rank=5, **RANKS, rope=100.0, dtype=double),
    "mla direct": lambda: nn.MultiheadLatentAttention(16, 3, q_lora_rank=None, **RANKS, rope=dict(YARN), dtype=double),
}


def make(name):
    torch.manual_seed(0)
    return MAKE[name]()


def sequence(batch=2, seq=7, width=16, dtype=double, seed=0):
    return random_tensor((batch, seq, width), dtype, seed=seed, outliers=False)


def run(module, x, **options):
    x = x.clone().requires_grad_()
    out = module(x, **options)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def close(actual, expected, tolerance=1e-10):
    __tracebackhide__ = True
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MAKE)
def test_padding_that_hides_nothing_changes_nothing(name):
    """One operator and the parts it is made of: the same results and gradients."""
    module, x = make(name), sequence()
    expected = run(module, x)
    for mask in (torch.zeros(2, 7, dtype=torch.bool), torch.zeros(2, 7, dtype=double)):
        for a, b in zip(run(module, x, key_padding_mask=mask), expected, strict=True):
            close(a, b)


@pytest.mark.parametrize("name", MAKE)
def test_right_padding_is_the_shorter_sequence(name):
    module, x, lengths = make(name), sequence(), [7, 4]
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    out = module(x, key_padding_mask=padding)
    added = torch.zeros(2, 7, dtype=double).masked_fill(padding, -math.inf)
    close(module(x, key_padding_mask=added), out)
    for i, n in enumerate(lengths):
        close(out[i, :n], module(x[i : i + 1, :n])[0])
    poisoned = x.clone()
    poisoned[1, 4:] = math.nan
    close(module(poisoned, key_padding_mask=padding)[1, :4], out[1, :4])


@pytest.mark.parametrize("name", ["gqa", "mla", "mla direct"])
def test_position_ids(name):
    """Scores depend on distances: shifted positions change nothing, stretched ones do, and they are by sequence."""
    module, x = make(name), sequence()
    expected = module(x)
    close(module(x, position_ids=torch.arange(7) + 50), expected)
    stretched = module(x, position_ids=2 * torch.arange(7))
    assert (stretched - expected).abs().max() > 1e-6
    both = module(x, position_ids=torch.stack([torch.arange(7), 2 * torch.arange(7)]))
    close(both, torch.stack([expected[0], stretched[1]]))
    angle = torch.arange(7, dtype=double)[:, None] * 100.0 ** -(torch.arange(0, 4, 2, dtype=double) / 4)
    if name != "mla direct":
        close(module(x, rotary=(angle.cos(), angle.sin())), expected)
    with pytest.raises(ValueError, match=r"position_ids: expected shape \(7,\) or \(2, 7\), got \(6,\)"):
        module(x, position_ids=torch.arange(6))


@pytest.mark.parametrize("name, projection", [
    ("gpt", "qkv_proj"), ("gpt", "out_proj"), ("gqa", "k_proj"), ("gqa", "o_proj"), ("mla", "q_a_proj"),
    ("mla", "kv_b_proj"), ("mla direct", "q_proj"),
])  # fmt: skip
def test_hooks_adapters_and_parametrizations_take_part(name, projection):
    class Adapter(torch.nn.Module):  # a low-rank update beside a frozen projection
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.in_features = base.in_features
            self.a = torch.nn.Parameter(torch.randn(2, base.in_features, dtype=double) / 4)
            self.b = torch.nn.Parameter(torch.randn(base.out_features, 2, dtype=double) / 4)

        def forward(self, x):
            return self.base(x) + x @ self.a.T @ self.b.T

    module, x, calls = make(name), sequence(), []
    before = module(x)
    handle = getattr(module, projection).register_forward_hook(lambda *_: calls.append(1))
    close(module(x), before)
    assert calls == [1]
    handle.remove()
    weight_norm(getattr(module, projection))
    close(module(x), before)
    module = make(name)
    setattr(module, projection, Adapter(getattr(module, projection)))
    adapter = getattr(module, projection)
    out = module(x)
    gradients = torch.autograd.grad(out.sum(), [adapter.a, adapter.b])
    assert all(g.any() for g in gradients)
    merged = make(name)
    with torch.no_grad():
        getattr(merged, projection).weight += adapter.b @ adapter.a
    close(out, merged(x))


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_is_torchs(padded):
    torch.manual_seed(0)
    ours = nn.GroupedQueryAttention(16, 4, 4, kv_dim=6, bias=True, is_causal=False, dtype=double)
    theirs = torch.nn.MultiheadAttention(16, 4, kdim=6, vdim=6, batch_first=True, dtype=double)
    with torch.no_grad():
        for name in "qkv":
            getattr(theirs, f"{name}_proj_weight").copy_(getattr(ours, f"{name}_proj").weight)
        theirs.in_proj_bias.copy_(torch.cat([getattr(ours, f"{n}_proj").bias for n in "qkv"]))
        theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, memory = sequence(), sequence(2, 9, 6, seed=1).requires_grad_()
    padding = torch.arange(9) >= torch.tensor([9, 5])[:, None] if padded else None
    out = ours(x, memory, key_padding_mask=padding)
    expected = theirs(x, memory, memory, key_padding_mask=padding)[0]
    close(out, expected)
    close(*[torch.autograd.grad(o.square().sum(), memory)[0] for o in (out, expected)])
    with pytest.raises(ValueError, match="key_value: expected a tensor, this layer has a kv_dim, got None"):
        ours(x)
    with pytest.raises(ValueError, match=r"key_value: expected shape \(batch, seq, 6\), got \(2, 7, 16\)"):
        ours(x, x)
    with pytest.raises(ValueError, match=r"key_value: expected None, this layer has no kv_dim, got shape \(2, 9, 6\)"):
        make("gqa")(x, memory)


def test_cross_attention_of_fewer_heads_reads_groups():
    torch.manual_seed(0)
    grouped = nn.GroupedQueryAttention(16, 4, 2, kv_dim=6, is_causal=False, dtype=double)
    full = nn.GroupedQueryAttention(16, 4, 4, kv_dim=6, is_causal=False, dtype=double)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    x, memory = sequence(), sequence(2, 9, 6, seed=1)
    close(grouped(x, memory), full(x, memory))


@pytest.mark.parametrize("padded", [False, True])
def test_query_and_key_norms_are_those_of_qwen3(padded):
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    config = qwen.Qwen3Config(hidden_size=16, **heads, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = qwen.Qwen3Attention(config, 0).double()
    with torch.no_grad():
        theirs.q_norm.weight.normal_(1, 0.3), theirs.k_norm.weight.normal_(1, 0.3)
    ours = nn.GroupedQueryAttention(16, 4, 2, head_dim=6, qk_norm=True, rope=10000.0, dtype=double)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = sequence()
    mask = torch.full((7, 7), -math.inf, dtype=double).triu(1).expand(2, 1, 7, 7).clone()
    padding = None
    if padded:
        padding = torch.arange(7) >= torch.tensor([7, 4])[:, None]
        mask = mask.masked_fill(padding[:, None, None], -math.inf)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs(x1, qwen.Qwen3RotaryEmbedding(config)(x, torch.arange(7)[None]), mask)[0]
    out = ours(x2, key_padding_mask=padding)
    expected.square().sum().backward(), out.square().sum().backward()
    assert_agree(out, expected, "out", 1e-5)  # their norms, tables and softmax are float32
    assert_agree(x2.grad, x1.grad, "x", 1e-5)
    theirs_parameters = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert_agree(p.grad, theirs_parameters[name].grad, name, 1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("q_lora_rank", [5, None])
def test_latent_attention_with_yarn_is_that_of_deepseek(bias, q_lora_rank):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    yarn = {k: v for k, v in YARN.items() if k != "method"}
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}
    config = deepseek.DeepseekV3Config(
        hidden_size=16, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=q_lora_rank, **RANKS,
        attention_bias=bias, max_position_embeddings=256, rope_parameters=parameters, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = deepseek.DeepseekV3Attention(config, 0).double()
    ours = nn.MultiheadLatentAttention(16, 3, q_lora_rank=q_lora_rank, **RANKS, rope=YARN, bias=bias, dtype=double)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = sequence()
    mask = torch.full((7, 7), -math.inf, dtype=double).triu(1)
    expected = theirs(x, deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(7)[None]), mask)[0]
    assert_agree(ours(x), expected, "out", 1e-5)
    assert (ours(x) - make_with_scale(ours, (8 + 4) ** -0.5)(x)).abs().max() > 1e-4  # mscale is seen


def make_with_scale(module, scale):
    module = copy.deepcopy(module)
    module.scale = scale
    return module


def test_scales_of_deepseek():
    """DeepSeek-V3: factor 40, mscale_all_dim 1; V2: 0.707."""
    for mscale, expected in ((1.0, 0.13523378), (0.707, 0.11472139)):
        rope = dict(method="yarn", factor=40.0, original_max_position_embeddings=4096)
        rope.update(mscale=mscale, mscale_all_dim=mscale)
        ranks = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        with torch.device("meta"):
            assert nn.MultiheadLatentAttention(16, 2, **ranks, rope=rope).scale == pytest.approx(expected, rel=1e-7)


def test_gpt2_weights_load():
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    config = gpt2.GPT2Config(n_embd=16, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = gpt2.GPT2Attention(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours = nn.CausalSelfAttention(16, 2, dtype=double)
    ours.load_gpt2(theirs.state_dict())
    x = sequence()
    mask = torch.full((7, 7), -math.inf, dtype=double).triu(1)[None, None]
    close(ours(x), theirs(x, attention_mask=mask)[0], 1e-7)
    with pytest.raises(ValueError, match=r"c_attn.weight: expected shape \(16, 48\), got \(48, 16\)"):
        ours.load_gpt2({"c_attn.weight": torch.zeros(48, 16)})


def test_dropout_in_training_only():
    module = nn.GroupedQueryAttention(16, 4, 2, dropout=0.5, dtype=double)
    plain = nn.GroupedQueryAttention(16, 4, 2, dtype=double)
    plain.load_state_dict(module.state_dict())
    x = sequence()
    assert torch.equal(module.eval()(x), plain(x))
    torch.manual_seed(1)
    first = module.train()(x)
    assert not torch.equal(first, module(x))
    torch.manual_seed(1)
    assert torch.equal(first, module(x))


def test_dynamic_frequencies_follow_the_length():
    rope = dict(method="dynamic", factor=2.0, max_position_embeddings=8)
    module, x = nn.GroupedQueryAttention(16, 4, 2, rope=rope, dtype=double), sequence(1, 20)
    plain = nn.GroupedQueryAttention(16, 4, 2, rope=10000.0, dtype=double)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x[:, :8]), plain(x[:, :8]))
    stretched = nn.GroupedQueryAttention(16, 4, 2, rope=10000.0 * (2 * 20 / 8 - 1) ** (4 / 2), dtype=double)
    stretched.load_state_dict(module.state_dict())
    close(module(x), stretched(x))


def test_built_on_the_meta_device():
    with torch.device("meta"):
        module = MAKE["gqa"]()
    module.to_empty(device="cpu").load_state_dict(make("gqa").state_dict())
    assert torch.equal(module(sequence()), make("gqa")(sequence()))


@pytest.mark.parametrize("name", MAKE)
def test_compile(name):
    module, x = make(name), sequence()
    padding = torch.arange(7) >= torch.tensor([7, 4])[:, None]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    close(compiled(x, key_padding_mask=padding), module(x, key_padding_mask=padding))


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: nn.CausalSelfAttention(8, 3), "num_heads: expected a divisor of embed_dim, 8, got 3"),
        (lambda: nn.CausalSelfAttention(8, 0), "num_heads: expected a positive number, got 0"),
        (lambda: nn.CausalSelfAttention(8, 2, dropout=-0.1), "dropout: expected a number between 0 and 1, got -0.1"),
        (lambda: nn.GroupedQueryAttention(8, 4, 3), "num_kv_heads: expected a divisor of num_heads, 4, got 3"),
        (lambda: nn.GroupedQueryAttention(8, 4, 2, kv_dim=0), "kv_dim: expected a positive number, got 0"),
        (lambda: nn.GroupedQueryAttention(8, 4, 2, rope=dict(method="yearn")), "method: expected one of"),
        (
            lambda: nn.GroupedQueryAttention(8, 4, 2, rope=dict(rotary_dim=4)),
            "rope: expected a rotary_dim of at most 2",
        ),
        (lambda: nn.MultiheadLatentAttention(8, 2, q_lora_rank=0, **RANKS), "q_lora_rank: expected a positive number"),
    ],
)
def test_constructor_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", MAKE)
def test_forward_errors(name):
    module = make(name)
    with pytest.raises(ValueError, match=r"key_padding_mask: expected shape \(2, 7\), got \(7, 2\)"):
        module(sequence(), key_padding_mask=torch.zeros(7, 2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="key_padding_mask: expected a bool or floating dtype, got torch.int64"):
        module(sequence(), key_padding_mask=torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x: expected shape \(batch, seq, 16\), got \(2, 7, 8\)"):
        module(sequence(width=8), key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))
