"""Tiny models of transformers with random weights, and inputs for them."""

import torch
import transformers as T

from attnjourney.reference import quantize

VOCABULARY = 64
BASE = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPS = dict(BASE, num_key_value_heads=2)
HEADS = dict(GROUPS, head_dim=16)
LATENTS = dict(
    BASE, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    moe_intermediate_size=32,
)  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"]
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
ENCODER = dict(BASE, **NO_DROPOUT)
BOTH = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, dropout=0.0,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)


def configurations():
    """name: (class, configuration)."""
    sliding = dict(HEADS, sliding_window=6, query_pre_attn_scalar=16)
    gpt2 = dict(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    opt = dict(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.0,
    )  # fmt: skip
    t5 = dict(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    speech = dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, layerdrop=0.0, apply_spec_augment=False, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    return {
        "llama": (T.LlamaForCausalLM, T.LlamaConfig(**GROUPS)),
        "qwen2": (T.Qwen2ForCausalLM, T.Qwen2Config(**GROUPS)),
        "qwen3": (T.Qwen3ForCausalLM, T.Qwen3Config(**HEADS)),
        "mistral": (T.MistralForCausalLM, T.MistralConfig(**GROUPS, sliding_window=6)),
        "mixtral": (
            T.MixtralForCausalLM,
            T.MixtralConfig(**GROUPS, num_local_experts=2, num_experts_per_tok=1),
        ),
        "phi3": (T.Phi3ForCausalLM, T.Phi3Config(**GROUPS)),
        "phimoe": (T.PhimoeForCausalLM, T.PhimoeConfig(**GROUPS, sliding_window=6, num_local_experts=2)),
        "gemma2": (T.Gemma2ForCausalLM, T.Gemma2Config(**sliding, attn_logit_softcapping=0.5)),
        "gemma3": (T.Gemma3ForCausalLM, T.Gemma3TextConfig(**sliding, layer_types=ALTERNATING)),
        "gpt_oss": (
            T.GptOssForCausalLM,
            T.GptOssConfig(
                **HEADS, sliding_window=6, layer_types=ALTERNATING, num_local_experts=2, num_experts_per_tok=1
            ),
        ),
        "deepseek_v3": (T.DeepseekV3ForCausalLM, T.DeepseekV3Config(**LATENTS)),
        "cohere2": (T.Cohere2ForCausalLM, T.Cohere2Config(**GROUPS, sliding_window=6, layer_types=ALTERNATING)),
        "gpt2": (T.GPT2LMHeadModel, T.GPT2Config(**gpt2)),
        "gpt_neox": (T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**BASE)),
        "opt": (T.OPTForCausalLM, T.OPTConfig(**opt)),
        "bert": (T.BertForMaskedLM, T.BertConfig(**ENCODER)),
        "roberta": (T.RobertaForMaskedLM, T.RobertaConfig(**{**ENCODER, "max_position_embeddings": 80})),
        "modernbert": (
            T.ModernBertForMaskedLM,
            T.ModernBertConfig(**BASE, local_attention=8, cls_token_id=1, sep_token_id=2),
        ),
        "bart": (T.BartForConditionalGeneration, T.BartConfig(**BOTH, max_position_embeddings=64)),
        "t5": (T.T5ForConditionalGeneration, T.T5Config(**t5)),
        "whisper": (
            T.WhisperForConditionalGeneration,
            T.WhisperConfig(
                **BOTH, num_mel_bins=8, max_source_positions=30, max_target_positions=64, suppress_tokens=None,
                begin_suppress_tokens=None,
            ),
        ),
        "wav2vec2": (T.Wav2Vec2ForCTC, T.Wav2Vec2Config(**speech)),
        "vit": (T.ViTForImageClassification, T.ViTConfig(**VISION, **NO_DROPOUT)),
        "clip": (
            T.CLIPModel,
            T.CLIPConfig(text_config=dict(BASE), vision_config=dict(VISION), projection_dim=16),
        ),
    }  # fmt: skip


CONFIGURATIONS = configurations()
WITHOUT_CACHE = ("bert", "roberta", "modernbert", "vit", "clip", "wav2vec2")
DECODERS = [name for name in CONFIGURATIONS if name not in (*WITHOUT_CACHE, "bart", "t5", "whisper")]


def randomise(model, scale=0.2):
    """Weights of a size at which attention is not uniform."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
        p.data.copy_(noise * scale if p.dim() >= 2 else p.data + noise * 0.05)
    return model


def build(name, implementation, dtype=torch.float32, **changes):
    cls, config = CONFIGURATIONS[name]
    config = type(config)(**{**config.to_dict(), **changes})
    torch.manual_seed(0)
    return randomise(cls._from_config(config, attn_implementation=implementation, dtype=dtype))


def inputs_of(name, padding=None, dtype=torch.float32, batch=3, length=14):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    there = torch.ones(batch, length, dtype=torch.long)
    for row, missing in enumerate((4, 9)):
        if padding == "left":
            there[row, :missing] = 0
        elif padding == "right":
            there[row, -missing:] = 0
    text = dict(input_ids=ids * there, attention_mask=there)
    images = torch.randn(batch, 3, 32, 32, generator=generator).to(dtype)
    decoder = torch.randint(3, VOCABULARY, (batch, 9), generator=generator)
    if name == "vit":
        return dict(pixel_values=images)
    if name == "clip":
        return dict(**text, pixel_values=images)
    if name == "whisper":
        features = torch.randn(batch, 8, 60, generator=generator).to(dtype)
        return dict(input_features=features, decoder_input_ids=decoder)
    if name == "wav2vec2":
        return dict(input_values=torch.randn(batch, 400, generator=generator).to(dtype))
    return dict(**text, decoder_input_ids=decoder) if name in ("bart", "t5") else text


def logits_of(output):
    return output.logits if "logits" in output else output.logits_per_image


class RoundedLayer(T.cache_utils.DynamicLayer):
    """Keys and values, or latents and rotary keys, as the numbers that they are as bytes, for attention of others."""

    def __init__(self, dtype, latents):
        super().__init__()
        self.bytes, self.latents = dtype, latents

    def update(self, keys, values, *args, **kwargs):
        rows = [torch.cat([keys, values], -1)] if self.latents else [keys, values]
        rows = [(x.float() * scale[..., None]).to(keys.dtype) for x, scale in (quantize(x, self.bytes) for x in rows)]
        return super().update(*(rows[0].split([keys.shape[-1], values.shape[-1]], -1) if self.latents else rows))


def rounded_cache(model, dtype):
    made = T.DynamicCache(config=model.config)
    latents = hasattr(model.config, "kv_lora_rank")
    made.layers = [RoundedLayer(dtype, latents) for _ in range(model.config.num_hidden_layers)]
    return made
