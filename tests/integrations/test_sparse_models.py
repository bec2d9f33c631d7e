"""DeepSeek-V3.2 and GLM-MoE-DSA of transformers: token-sparse attention gives what eager attention gives by a mask."""

import pytest
import torch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", minversion="5")
if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("a transformers without DeepSeek-V3.2", allow_module_level=True)

from attnjourney.integrations import transformers as ours  # noqa: E402
from tests.support.transformers_models import LATENTS, inputs_of, randomise  # noqa: E402

# with few heads many scores are 0, and which of equal ones is chosen is not defined
SIZES = dict(LATENTS, index_n_heads=16, index_head_dim=16, index_topk=5, n_shared_experts=1)
MODELS = {
    "deepseek_v32": (transformers.DeepseekV32ForCausalLM, transformers.DeepseekV32Config),
    "glm_moe_dsa": (transformers.GlmMoeDsaForCausalLM, transformers.GlmMoeDsaConfig),
}
NEAR = 2e-5  # as in test_transformers.py
OPERATORS = {"sparse_attention", "lightning_indexer"}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    ours.calls.clear()


def build(name, implementation):
    cls, config = MODELS[name]
    torch.manual_seed(0)
    return randomise(cls._from_config(config(**SIZES), attn_implementation=implementation, dtype=torch.float32))


def trained(model, padding):
    inputs = inputs_of("llama", padding)
    logits = model.train()(**inputs).logits * inputs["attention_mask"][..., None]
    weighing = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * weighing).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def assert_near(actual, expected):
    assert distance(actual[0], expected[0]) < NEAR and distance(actual[1], expected[1]) < 5 * NEAR


@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name, padding):
    expected = trained(build(name, "eager"), padding)
    assert not ours.calls
    assert_near(trained(build(name, "attnjourney"), padding), expected)
    assert ours.calls == {"sparse_attention": 2}
    ours.calls.clear()
    assert_near(trained(ours.use(build(name, "eager")), padding), expected)
    assert ours.calls["sparse_attention"] == 2 and ours.calls["lightning_indexer"] == (2 if padding is None else 0)


@pytest.mark.parametrize("broken", sorted(OPERATORS))
def test_a_broken_operator_shows(broken, monkeypatch):
    expected = trained(build("deepseek_v32", "eager"), None)
    where = ours.attention if broken == "sparse_attention" else ours.indexers
    operator = getattr(where, broken)

    def shifted(*args, **options):  # the indices of the next row
        if broken == "lightning_indexer":
            return operator(*args, **options).roll(1, 1)
        return operator(*args[:3], args[3].roll(1, 1), **options)

    monkeypatch.setattr(where, broken, shifted)
    model = ours.use(build("deepseek_v32", "eager"))
    assert distance(trained(model, None)[0], expected[0]) > 0.01


def tokens(model, inputs, **options):
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name, padding):
    inputs = inputs_of("llama", padding)
    expected = tokens(build(name, "eager").eval(), inputs)
    model = build(name, "attnjourney").eval()
    assert torch.equal(tokens(model, inputs), expected)
    assert set(ours.calls) == {"sparse_attention"}
    ours.use(model)
    ours.calls.clear()
    cache = ours.cache(model)
    assert torch.equal(tokens(model, inputs, past_key_values=cache), expected)
    assert ours.calls["sparse_latents"] == 2 * 8 and (padding == "left" or ours.calls["lightning_indexer"] == 2 * 8)
    for layer in cache.layers:
        assert isinstance(layer, ours.LatentLayer) and layer.indexed == layer.length == 14 + 7


def test_beams_over_our_cache():
    inputs = inputs_of("llama", "left")
    expected = tokens(build("deepseek_v32", "eager").eval(), inputs, num_beams=3)
    model = ours.use(build("deepseek_v32", "eager").eval())
    assert torch.equal(tokens(model, inputs, num_beams=3, past_key_values=ours.cache(model)), expected)


def test_prompt_lookup_over_our_cache():
    """What was drafted and not taken is cropped, of the indexer's keys too."""
    inputs = {name: x[2:] for name, x in inputs_of("llama").items()}
    expected = tokens(build("deepseek_v32", "eager").eval(), inputs)
    model = ours.use(build("deepseek_v32", "eager").eval())
    found = tokens(model, inputs, prompt_lookup_num_tokens=2, past_key_values=ours.cache(model))
    assert torch.equal(found, expected)


def test_weights_are_refused():
    model = build("deepseek_v32", "attnjourney").eval()
    with pytest.raises(ValueError, match="output_attentions: expected False beside the indices"), torch.no_grad():
        model(**inputs_of("llama"), output_attentions=True)


def test_bytes_are_refused():
    with pytest.raises(ValueError, match="dtype: expected None for a model whose layers choose tokens, got torch.int8"):
        ours.cache(build("deepseek_v32", "eager").eval(), dtype=torch.int8)
