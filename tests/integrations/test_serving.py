"""Packed rows of many sequences through models of transformers: tokens of generate, one request at a time."""

import pytest
import torch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", minversion="5")

from attnjourney.integrations import transformers as ours  # noqa: E402
from attnjourney.ops import _shared_prefix  # noqa: E402
from examples import serve  # noqa: E402
from examples.served_models import ServedTransformer  # noqa: E402
from examples.serving import Engine  # noqa: E402
from tests.support.transformers_models import rounded_cache  # noqa: E402

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.3,
)  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": dict(sliding_window=9),
    "Gemma2": dict(sliding_window=8, query_pre_attn_scalar=8, attn_logit_softcapping=3.0),
    "GptOss": dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    transformers.logging.set_verbosity_error()
    ours.calls.clear()
    monkeypatch.setattr(_shared_prefix, "LEAST", 8)


def build(name):
    """In float64, in which two orders of addition choose the same token; experts know float32 alone."""
    torch.manual_seed(0)
    dtype = torch.float32 if name == "GptOss" else torch.float64
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    cls = getattr(transformers, f"{name}ForCausalLM")
    return cls._from_config(config, attn_implementation="eager", dtype=dtype).eval()


def prompts():
    common = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    return [common + [3 + i] * (i + 1) if i % 3 else list(range(5, 6 + 4 * i)) for i in range(7)]


def alone(model, prompt, count):
    given = torch.tensor([prompt])
    options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(name):
    model = build(name)
    wanted = [(prompt, 3 + i) for i, prompt in enumerate(prompts())]
    expected = [alone(model, *request) for request in wanted]
    assert not ours.calls
    engine = Engine(ServedTransformer(model, 3, 64, block_size=8), rows=9)
    requests = [engine.submit(*request) for request in wanted]
    engine.run()
    assert [r.result(0) for r in requests] == expected
    assert ours.calls == {"attend_packed": 2 * engine.steps}
    assert engine.adopted >= 2 * 24
    cache = engine.model.caches[0]
    cache.evict()
    assert cache.free_blocks == engine.blocks


def test_a_small_pool_and_requests_that_leave():
    model = build("Llama")
    wanted = [(list(range(3 + i, 12 + 2 * i)), 30) for i in range(5)]
    expected = [alone(model, *request) for request in wanted]
    engine = Engine(ServedTransformer(model, 3, 64, block_size=8, num_blocks=8))
    requests = [engine.submit(*request) for request in wanted]
    gone = engine.submit(list(range(40)), 20)
    for _ in range(6):
        engine.step()
    requests[0].cancel()
    gone.cancel()
    engine.run()
    assert engine.preempted > 0 and gone.result(0) == []
    assert [r.result(0) for r in requests[1:]] == expected[1:]
    done = requests[0].result(0)
    assert 0 < len(done) < 30 and done == expected[0][: len(done)]
    assert engine.model.caches[0].nbytes == 8 * 8 * 2 * 2 * 8 * 8  # blocks, tokens, heads, keys and values, dim, bytes


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn), ids=str)
def test_bytes_are_near(dtype):
    """Logits of a step after two prompts: those of eager attention over the numbers that the bytes are, to a twentieth
    of what rounding changes."""
    model = build("Llama").float()
    first, second = prompts()[1], prompts()[6]
    cache = ours.packed_cache(ours.use(model), 2, 64, block_size=8, dtype=dtype)
    got = []
    for pieces in ([first[:-1], second[:-1]], [first[-1:], second[-1:]]):
        counts = [len(p) for p in pieces]
        starts = [0 if n > 1 else len(p) - 1 for n, p in zip(counts, (first, second))]
        cache.pack(torch.tensor([0, *counts]).cumsum(0))
        given = dict(
            input_ids=torch.tensor([sum(pieces, [])]),
            position_ids=torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts)])[None],
        )
        with torch.no_grad():
            got = model(**given, past_key_values=cache).logits[0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for row, prompt in zip(got, (first, second)):
            tokens, held = torch.tensor([prompt]), rounded_cache(model, dtype)
            exact, rounded = (model(tokens, past_key_values=c).logits[0, -1] for c in (None, held))
            assert 20 * (row - rounded).norm() < (rounded - exact).norm() < 0.2 * exact.norm()


def test_what_is_refused():
    model = build("Llama")
    cache = ours.packed_cache(model, 2, 64, dtype=torch.float64)
    cache.pack(torch.tensor([0, 3, 3]))
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        with pytest.raises(ValueError, match="expected attn_implementation='attnjourney'"):
            model(input_ids=tokens, past_key_values=cache)
        ours.use(model)
        cache = ours.packed_cache(model, 2, 64)
        with pytest.raises(ValueError, match="input_ids: expected packed tokens \\(1, total\\), got a batch of 2"):
            model(input_ids=tokens.expand(2, 3), past_key_values=cache)
        with pytest.raises(ValueError, match="no packed_cache beside dropout, biases and output_attentions"):
            cache.pack(torch.tensor([0, 3, 3]))
            model(input_ids=tokens, past_key_values=cache, output_attentions=True)
        with pytest.raises(ValueError, match="attention_mask: expected None or a causal mask"):
            model(input_ids=tokens, past_key_values=cache, attention_mask=torch.tensor([[1, 0, 1]]))
    config = transformers.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=None)
    latents = transformers.DeepseekV3ForCausalLM._from_config(config)
    with pytest.raises(ValueError, match="model: expected keys and values in the cache of every layer"):
        ours.packed_cache(latents, 1, 8)


def test_the_command(capsys):
    sizes = ["--prompt", "20", "--shared", "17", "--new", "4", "--batch", "2", "--turns", "1"]
    assert serve.main(["--model", "llama", "--requests", "3", *sizes]) == 0
    out = capsys.readouterr().out
    assert out.count("3 of 3 answers the same") >= 2 and "tokens/s" in out and "16 of 60 tokens" in out
