"""Every language model of transformers that a small common configuration builds: `use` refuses it, or it gives what it
gives in eager mode: logits, gradients, greedy tokens."""

import copy
import dataclasses
import inspect
import signal
from contextlib import contextmanager

import pytest
import torch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", minversion="5")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from attnjourney.integrations import transformers as ours  # noqa: E402
from tests.support.transformers_models import inputs_of, randomise  # noqa: E402

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "embedding_size"), 32),
    "word_embed_proj_dim": 32,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "vocab_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "resid_pdrop"), 0.0),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout"), 0.0),
    **{"mamba_chunk_size": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8},
    **{"pad_token_id": 0, "sliding_window": 6, "q_lora_rank": None, "tie_word_embeddings": False},
}  # fmt: skip
NOT_FOR_TEXT_ALONE = {"fuyu", "git", "kosmos-2", "trocr", "musicgen", "musicgen_melody", "speech_to_text_2", "reformer"}
WITHOUT_ATTENTION = {"falcon_mamba", "fnet", "mamba"}
ILL_CONDITIONED = {"mobilebert"}  # its gradient is as far from eager's with sdpa
MODELS = sorted(
    {(name, cls, True) for name, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name not in NOT_FOR_TEXT_ALONE}
    | {(name, cls, False) for name, cls in MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()}
)


def configuration(name):
    config = CONFIG_MAPPING[name]
    if dataclasses.is_dataclass(config):
        known = {field.name for field in dataclasses.fields(config)}
    else:
        known = set(inspect.signature(config.__init__).parameters)
    made = config(**{key: value for key, value in SIZES.items() if key in known})
    if {"text_config", "vision_config", "audio_config"} & set(vars(made)):
        pytest.skip("made of several configurations")
    return made


@contextmanager
def at_most(seconds):
    """TimeoutError after so many seconds of this process: some small models are slow ones."""

    def stop(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def results(cls, config, implementation, generates):
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > 1_000_000:
        pytest.skip(f"too big: {size} parameters")
    model = cls._from_config(copy.deepcopy(config), attn_implementation="eager").train()
    for part in randomise(model).modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    if implementation != "eager":
        ours.use(model)
    inputs = inputs_of("any", "left")
    logits = model(**inputs).logits * inputs["attention_mask"][..., None]
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    tokens = None
    if generates:
        options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        tokens = model.eval().generate(**inputs, **options)
    return logits.detach(), gradients, tokens


@pytest.mark.parametrize("name, class_name, generates", MODELS, ids=[f"{name}-{cls}" for name, cls, _ in MODELS])
def test_equals_eager(name, class_name, generates):
    transformers.logging.set_verbosity_error()
    try:
        cls, config = getattr(transformers, class_name), configuration(name)
        with at_most(10):
            expected = results(cls, config, "eager", generates)
    except pytest.skip.Exception:
        raise
    except Exception as error:
        pytest.skip(f"not in eager either: {type(error).__name__} {error}"[:200])
    ours.calls.clear()
    try:
        actual = results(cls, config, "attnjourney", generates)
    except ValueError as error:
        if "has attention of its own" in str(error):
            return
        raise
    assert (sum(ours.calls.values()) > 0) == (name not in WITHOUT_ATTENTION)
    for got, wanted, bound in zip(actual[:2], expected[:2], (2e-5, 2e-4)):
        assert ((got - wanted).norm() / wanted.norm()).item() < bound or name in ILL_CONDITIONED
    assert expected[2] is None or torch.equal(actual[2], expected[2])
