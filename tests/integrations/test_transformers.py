"""attnjourney.integrations.transformers: tiny random models give what they give in eager mode, and ours is called."""

import importlib
import sys

import pytest
import torch

import attnjourney

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", minversion="5")

from transformers import masking_utils  # noqa: E402
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer  # noqa: E402

from attnjourney.integrations import transformers as ours  # noqa: E402
from tests.support.transformers_models import CONFIGURATIONS, DECODERS, build, inputs_of, logits_of, randomise  # noqa: E402

NEAR = 2e-5  # relative, of float32 through two layers; their gradients five times it
PADDINGS = {name: ("left", "right", None)[i % 3] for i, name in enumerate(CONFIGURATIONS)}
GREEDY = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    ours.calls.clear()


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def real_rows(name, logits, inputs):
    """Rows of the padding are not compared: eager gives them a uniform attention."""
    alone = name not in ("bart", "t5", "whisper") and logits.dim() == 3 and "attention_mask" in inputs
    return logits * inputs["attention_mask"][..., None] if alone else logits


def trained(name, implementation, padding, dtype=torch.float32, prepare=lambda model: model, **more):
    """Logits and all gradients of parameters."""
    model = prepare(build(name, implementation, dtype).train())
    inputs = {**inputs_of(name, padding, dtype), **more}
    logits = real_rows(name, logits_of(model(**inputs)), inputs)
    weighing = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (logits * weighing).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_near(actual, expected):
    assert distance(actual[0], expected[0]) < NEAR and distance(actual[1], expected[1]) < 5 * NEAR


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_values_and_gradients(name):
    expected = trained(name, "eager", PADDINGS[name])
    assert not ours.calls
    assert_near(trained(name, "attnjourney", PADDINGS[name]), expected)
    assert ours.calls["attention"] >= 2 and set(ours.calls) == {"attention"}


def test_a_broken_kernel_shows(monkeypatch):
    expected = trained("llama", "eager", "left")
    monkeypatch.setattr(ours.attention, "attention", lambda query, *_, **__: query * 0.5)
    assert distance(trained("llama", "attnjourney", "left")[0], expected[0]) > 0.01


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert"])
def test_bfloat16(name):
    exact = trained(name, "eager", "left")
    plain = trained(name, "eager", "left", torch.bfloat16)
    actual = trained(name, "attnjourney", "left", torch.bfloat16)
    for got, rounded, wanted in zip(actual, plain, exact, strict=True):
        assert distance(got.float(), wanted) < 1.5 * distance(rounded.float(), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    for name in ("mistral", "gpt_oss"):
        expected = trained(name, "eager", "left")
        assert_near(trained(name, "attnjourney", "left", prepare=prepare), expected)
        assert ours.calls["attention"] == 4  # two layers, twice
        ours.calls.clear()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_compiled(name):
    def prepare(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    torch._dynamo.reset()
    expected = trained(name, "eager", "left")
    assert_near(trained(name, "attnjourney", "left", prepare=prepare), expected)
    assert ours.calls["attention"] >= 1


# --------------------------------------------------------------------------------------------------------------- masks


def patterns():
    packed = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 5 + [1] * 3]))
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    window = masking_utils.sliding_window_causal_mask_function(3)
    yield "causal", causal, True
    yield "window", window, True
    yield "bidirectional", both, True
    yield "bidirectional window", masking_utils.sliding_window_bidirectional_mask_function(2), True
    yield "packed", masking_utils.and_masks(causal, packed), True
    yield "packed window", masking_utils.and_masks(window, packed), True
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]])
    yield (
        "packed, as by position_ids",
        masking_utils.and_masks(masking_utils.remap_positions_for_packed_sequence(window, positions), packed),
        True,
    )
    yield (
        "packed, of other positions",
        masking_utils.and_masks(masking_utils.remap_positions_for_packed_sequence(window, 2 * positions), packed),
        False,
    )
    yield "chunked", masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)), False
    yield "or", masking_utils.or_masks(causal, masking_utils.sliding_window_bidirectional_overlay(2)), False
    yield (
        "twice packed",
        masking_utils.and_masks(
            causal, packed, masking_utils.packed_sequence_mask_function(torch.arange(8).expand(2, -1))
        ),
        False,
    )
    yield "the user's", lambda b, h, q, k: (k <= q) & (k != 2), False


PATTERNS = list(patterns())


def seen_by(description):
    """What this package sees through a mask, (B, rows, keys): weights of equal scores are positive there."""
    batch, _, rows, keys = description.shape
    module = torch.nn.Module()
    value = torch.eye(keys)[None, None].expand(batch, 1, -1, -1)
    zeros = torch.zeros(batch, 1, keys, 4)
    out, _ = ours.attention.forward(module, zeros[:, :, :rows], zeros, value, description)
    return out[:, :, 0] > 0


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name, function, known", PATTERNS, ids=[p[0] for p in PATTERNS])
def test_descriptions_say_what_the_numbers_say(name, function, known, padding):
    there = torch.ones(2, 8, dtype=torch.bool)
    if padding:
        there[0, slice(0, 3) if padding == "left" else slice(5, 8)] = False
    places = [(8, 8, 0, 0), (3, 8, 5, 0), (1, 8, 7, 0), (8, 8, torch.tensor(0), 0), (3, 8, torch.tensor(4), 0)]
    if "packed" not in name:
        places += [(3, 5, 5, 3), (5, 8, 0, 0)]
    described = 0
    for q_length, kv_length, q_offset, kv_offset in places:
        call = dict(
            batch_size=2, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=function, attention_mask=there if padding else None,
        )  # fmt: skip
        expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)[:, 0]
        got = ours.masks.mask(**call, allow_is_causal_skip=False)
        if isinstance(got, ours.MaskDescription):
            described += 1
            torch.testing.assert_close(got & True, expected[:, None].expand(got.shape))  # an operation gets the numbers
        assert torch.equal(seen_by(got), expected), (q_length, kv_length, q_offset, kv_offset)
    assert (described > 0) == (known and not (padding and "packed" in name))


def test_right_padding_is_a_length():
    call = dict(batch_size=2, q_length=8, kv_length=8, mask_function=masking_utils.bidirectional_mask_function)
    there = torch.arange(8) < torch.tensor([[5], [8]])
    got = ours.masks.mask(**call, attention_mask=there)
    assert got.padding is None and got.lengths.tolist() == [5, 8]
    assert ours.masks.mask(**call, attention_mask=there.flip(1)).lengths is None


RELATIVE = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}  # one table for a stack, or (UMT5) one a layer


@pytest.mark.parametrize("prepare", [lambda model: model, ours.use], ids=["as given", "use"])
@pytest.mark.parametrize("name", RELATIVE)
def test_a_relative_bias_and_its_table(name, prepare, monkeypatch):
    cls, config = (getattr(transformers, RELATIVE[name] + what) for what in ("ForConditionalGeneration", "Config"))
    given = build("t5", "eager").config.to_dict()
    config = config(**{key: x for key, x in given.items() if key not in ("model_type", "architectures")})
    inputs, masks = inputs_of("t5", "right"), []

    def run(implementation, prepare):
        torch.manual_seed(0)
        model = prepare(randomise(cls._from_config(config, attn_implementation=implementation).train()))
        logits = model(**inputs).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        tables = {n: p.grad for n, p in model.named_parameters() if "relative_attention_bias" in n}
        greedy = tokens(model.eval(), inputs)
        return logits.detach(), tables, greedy

    def spy(query, key, value, mask=None, *options, **more):
        masks.append(mask)
        return attnjourney.attention(query, key, value, mask, *options, **more)

    expected = run("eager", lambda model: model)
    monkeypatch.setattr(ours.attention, "attention", spy)
    actual = run("attnjourney", prepare)
    assert distance(actual[0], expected[0]) < NEAR and torch.equal(actual[2], expected[2])
    assert len(actual[1]) == (4 if name == "umt5" else 2)
    for table, wanted in expected[1].items():
        assert wanted.norm() > 0 and distance(actual[1][table], wanted) < 5 * NEAR
    assert ours.calls["attention"] >= 6
    biases = [mask for mask in masks[:6] if mask is not None]
    assert len(biases) == 6  # of the batch's all, padding or not, and its keys side by side
    assert all(bias.shape[0] == 1 and bias.stride(-1) == 1 for bias in biases)


def test_a_bias_of_diagonals_has_the_bits_of_a_look_up_of_all():
    for model in (build("t5", "eager"), switch()):
        parts = [part for part in model.modules() if getattr(part, "has_relative_attention_bias", False)]
        assert len(parts) == 2
        for sizes in ((7, 7, None, 0), (3, 9, None, 6), (1, 5, None, 4), (4, 12, None, torch.tensor(5))):
            before = [part.compute_bias(*sizes) for part in parts]
            ours.use(model)
            assert all("compute_bias" in vars(part) for part in parts)
            for part, wanted in zip(parts, before, strict=True):
                assert torch.equal(part.compute_bias(*sizes), wanted)
                del part.compute_bias


def switch():
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_experts=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip
    return randomise(transformers.SwitchTransformersModel._from_config(config, attn_implementation="eager"))


def test_no_mask_where_causality_is_all():
    assert ours.masks.mask(batch_size=2, q_length=8, kv_length=8) is None
    assert ours.masks.mask(batch_size=2, q_length=1, kv_length=8, q_offset=7) is None


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "bert", "modernbert"])
def test_no_matrix_of_rows_by_keys_is_made(name, monkeypatch):
    model, inputs = build(name, "attnjourney").eval(), inputs_of(name, "left")

    def refuse(**arguments):
        raise AssertionError(f"a mask of {arguments['q_length']} x {arguments['kv_length']}")

    monkeypatch.setattr(ours.masks, "sdpa_mask", refuse)
    with torch.no_grad():
        model(**inputs)
    assert sum(ours.calls.values()) >= 2


# ----------------------------------------------------------------------------------------------------- packed, weights


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(name, told_by):
    model = build(name, "attnjourney").eval()
    ids = inputs_of(name)["input_ids"][:1]
    cu = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 1, 8)])[None]
    more = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=8, max_length_k=8) if told_by == "cu_seq_lens" else {}
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
        alone = torch.cat([model(input_ids=ids[:, a:b]).logits for a, b in ((0, 5), (5, 6), (6, 14))], 1)
    assert distance(out, alone) < NEAR and ours.calls["varlen_attention"] == 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_output_attentions(name):
    inputs = inputs_of(name, "right")
    results = []
    for implementation in ("eager", "attnjourney"):
        out = build(name, implementation).eval()(**inputs, output_attentions=True)
        results.append(out.encoder_attentions if name == "t5" else out.attentions)
    rows = inputs["attention_mask"][:, None, :, None]
    assert ours.calls["weights"] >= 2
    for got, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got * rows, wanted * rows, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ generation and caches


def tokens(model, inputs, **options):
    given = {name: x for name, x in inputs.items() if not name.startswith("decoder_")}
    with torch.no_grad():
        return model.generate(**given, **{**GREEDY, **options})


@pytest.mark.parametrize("name", [*DECODERS, "bart", "t5", "whisper"])
def test_greedy_tokens(name):
    inputs = inputs_of(name, "left")
    expected = tokens(build(name, "eager").eval(), inputs)
    model = build(name, "attnjourney").eval()
    assert torch.equal(tokens(model, inputs), expected)
    assert ours.calls["attention"] >= 7
    if name in DECODERS:
        ours.calls.clear()
        ours.use(model)
        cache = ours.cache(model)
        assert torch.equal(tokens(model, inputs, past_key_values=cache), expected)
        own = [layer for layer in cache.layers if isinstance(layer, (ours.KVLayer, ours.LatentLayer))]
        windows = [layer for layer in cache.layers if isinstance(layer, ours.WindowLayer)]
        assert len(own) + len(windows) == len(cache.layers)
        assert all(layer.room[0].shape[2] == 12 and layer.keys.shape[2] == 5 for layer in windows)  # windows of 6
        assert all(int(layer.cache.lengths[0]) == layer.length == 14 + 7 for layer in own)


WAYS = {
    "static": dict(cache_implementation="static"),
    "without": dict(use_cache=False),
    "beams": dict(num_beams=3),
    "prompt lookup": dict(prompt_lookup_num_tokens=2),
    "sampled": dict(do_sample=True, top_k=5),
}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(name, way):
    inputs, options = inputs_of(name, "left"), WAYS[way]
    if way == "prompt lookup":
        inputs = {key: x[2:] for key, x in inputs.items()}  # for one sequence
    results = []
    for implementation in ("eager", "attnjourney"):
        torch.manual_seed(0)
        results.append(tokens(build(name, implementation).eval(), inputs, **options))
    assert torch.equal(*results) and sum(ours.calls.values()) > 0


@pytest.mark.parametrize("way", ["beams", "prompt lookup"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_ways_to_generate_over_our_cache(name, way):
    inputs, options = inputs_of(name, "left"), WAYS[way]
    if way == "prompt lookup":
        inputs = {key: x[2:] for key, x in inputs.items()}
    expected = tokens(build(name, "eager").eval(), inputs, **options)
    model = ours.use(build(name, "eager").eval())
    assert torch.equal(tokens(model, inputs, **options, past_key_values=ours.cache(model)), expected)
    assert sum(ours.calls.values()) > 0


@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_pages(name, way, monkeypatch):
    inputs, options = inputs_of(name, "left"), WAYS.get(way, {})
    if way == "prompt lookup":
        inputs = {key: x[2:] for key, x in inputs.items()}
    eager = build(name, "eager").eval()
    expected = tokens(eager, inputs, **options)

    def paged(model):
        return ours.cache(model, paged=True, block_size=4)

    assert torch.equal(tokens(eager, inputs, **options, past_key_values=paged(eager)), expected)  # gathered
    assert not ours.calls
    model = build(name, "attnjourney").eval()
    cache = paged(model)
    assert torch.equal(tokens(model, inputs, **options, past_key_values=cache), expected)
    layers = [layer for layer in cache.layers if isinstance(layer, ours.PagedLayer)]
    assert ours.calls["decode"] >= 2 * len(layers) > 0
    assert all(int(layer.cache.lengths[0]) == layer.length for layer in layers)
    held, blocks = layers[0].cache.block_refs, (layers[0].cache.block_table >= 0).sum()
    assert held.sum() == blocks and (way != "beams" or (held > 0).sum() < blocks)  # beams share pages
    with torch.no_grad():
        first = model(**inputs, past_key_values=paged(model)).logits
        monkeypatch.setattr(ours.attention, "decode", lambda query, *_, **__: query * 0.5)
        assert distance(model(**inputs, past_key_values=paged(model)).logits, first) > 0.01


def test_weights_over_pages():
    inputs, model = inputs_of("llama", "left"), build("llama", "attnjourney").eval()
    with torch.no_grad():
        weights = model(**inputs, past_key_values=ours.cache(model, paged=True), output_attentions=True).attentions
        expected = model(**inputs, output_attentions=True).attentions
    for got, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="paged: expected False"):
        ours.cache(ours.use(build("deepseek_v3", "eager")), paged=True)


def test_assisted_generation():
    inputs = {key: x[2:] for key, x in inputs_of("llama").items()}
    expected = tokens(build("llama", "eager").eval(), inputs)
    assistant = build("llama", "attnjourney", num_hidden_layers=1).eval()
    model = build("llama", "attnjourney").eval()
    assert torch.equal(tokens(model, inputs, assistant_model=assistant), expected)


def test_latents_are_what_is_kept():
    model = ours.use(build("deepseek_v3", "eager").eval())
    cache = ours.cache(model)
    inputs = inputs_of("deepseek_v3", "left")
    tokens(model, inputs, past_key_values=cache)
    assert set(ours.calls) == {"mla_decode"}
    config = model.config
    for layer in cache.layers:
        assert isinstance(layer, ours.LatentLayer)
        assert layer.cache.latent.shape[2] == config.kv_lora_rank + config.qk_rope_head_dim
    with pytest.raises(ValueError, match="output_attentions"), torch.no_grad():
        model(**inputs, past_key_values=ours.cache(model), output_attentions=True)
    ours.calls.clear()
    assert_near(
        trained("deepseek_v3", "attnjourney", "left", prepare=ours.use), trained("deepseek_v3", "eager", "left")
    )
    assert set(ours.calls) == {"attention"}  # training makes keys, as before


@pytest.mark.parametrize("cls", [ours.KVLayer, ours.PagedLayer])
def test_a_layer_has_the_verbs_of_theirs(cls):
    theirs, own = DynamicLayer(), cls()
    generator = torch.Generator().manual_seed(0)

    def both(call):
        for layer in (theirs, own):
            call(layer)
        for name in ("keys", "values"):
            assert torch.equal(getattr(own, name), getattr(theirs, name))
        assert own.get_seq_length() == theirs.get_seq_length() and own.get_mask_sizes(3) == theirs.get_mask_sizes(3)

    def update(count, batch):
        new = torch.randn(2, batch, 2, count, 8, generator=generator)
        both(lambda layer: layer.update(new[0], new[1]))

    for count in (5, 1, 70, 1):  # past its first room
        update(count, 3)
    assert own.cache.capacity == 128
    assert cls is ours.PagedLayer or own.keys.data_ptr() == own.cache.key.data_ptr()
    both(lambda layer: layer.crop(-4))
    both(lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0], dtype=torch.int32)))
    update(2, 3)
    both(lambda layer: layer.batch_repeat_interleave(2))
    both(lambda layer: layer.batch_select_indices(torch.tensor([5, 1])))
    update(60, 2)
    own.reset()
    theirs.reset()
    update(3, 2)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        own.crop(2)


def test_a_window_has_the_verbs_of_theirs():
    theirs, own = DynamicSlidingWindowLayer(6), ours.WindowLayer(6)
    generator = torch.Generator().manual_seed(0)

    def both(call):
        for got, wanted in zip(call(own) or (), call(theirs) or (), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(own.keys, theirs.keys) and torch.equal(own.values, theirs.values)
        assert own.get_seq_length() == theirs.get_seq_length() and own.get_mask_sizes(3) == theirs.get_mask_sizes(3)

    def update(*counts, batch=3):
        for count in counts:
            new = torch.randn(2, batch, 2, count, 8, generator=generator)
            both(lambda layer, new=new: layer.update(new[0], new[1]))

    update(2, 1, 1, 1)
    place = own.room[0].data_ptr()
    update(1, 1, 1)
    assert own.room[0].data_ptr() == place  # written in place
    update(1, 1, 1, 1, 1, 1, 9, 1, 3)
    both(lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])))
    update(1, 1)
    both(lambda layer: layer.batch_repeat_interleave(2))
    update(1, batch=6)
    own.reset(), theirs.reset()
    update(8, 1, batch=6)


class Rounded(QuantizedLayer):
    """As transformers' quantised layers, whose packages are not installed: numbers in steps of 1/8."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round().to(torch.int8)

    def _dequantize(self, q_tensor):
        return q_tensor.float() / 8


def test_quantised_caches_are_theirs():
    """They hand out keys and values as tensors: attention is ours, what is kept theirs."""
    inputs, results = inputs_of("llama", "left"), []
    for implementation in ("eager", "attnjourney"):
        cache = transformers.Cache(layers=[Rounded(residual_length=4) for _ in range(2)])
        results.append(tokens(build("llama", implementation).eval(), inputs, past_key_values=cache))
    assert torch.equal(*results) and ours.calls["attention"] == 16


# --------------------------------------------------------------------------------------------------------------- guards


def test_models_with_attention_of_their_own_are_refused():
    small = dict(vocab_size=64, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    for cls, config in (
        (transformers.BloomForCausalLM, transformers.BloomConfig(**small, n_layer=1, n_head=4)),
        (
            transformers.FalconForCausalLM,
            transformers.FalconConfig(**small, num_hidden_layers=1, num_attention_heads=4),
        ),
    ):
        with pytest.raises(ValueError, match=f"{cls.__name__}.*has attention of its own"):
            ours.use(cls(config))
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        ours.use(torch.nn.Linear(2, 2))


def test_falcon_is_served_by_activate():
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.FalconForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    ids = inputs_of("llama")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        attnjourney.activity(reset=True)
        with attnjourney.active():
            actual = model(ids).logits
    assert distance(actual, expected) < NEAR and attnjourney.activity()["attnjourney"] == 2


def test_attention_and_mask_are_registered_together():
    assert transformers.AttentionInterface()["attnjourney"] is ours.attention.forward
    assert transformers.AttentionMaskInterface()["attnjourney"] is ours.masks.mask


def test_a_missing_client_is_named(monkeypatch):
    for name in [x for x in sys.modules if x.startswith("attnjourney.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers 5 .pip install"):
        importlib.import_module("attnjourney.integrations.transformers")
