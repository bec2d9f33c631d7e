"""transformers' DeepseekV3Attention on the same weights, for the layer "mla"."""

from __future__ import annotations

import importlib.util
import math

import torch

from .. import layers
from .base import Skip, TorchPeer

NAMES = (
    "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
)  # fmt: skip


class Deepseek(TorchPeer):
    def __init__(self, backend: str):
        self.name = f"deepseek-{backend}"
        self.about = f'transformers\' DeepseekV3Attention, attn_implementation="{backend}" (layer "mla")'
        self.backend = backend

    def missing(self, device):
        return None if importlib.util.find_spec("transformers") else "transformers is not installed"

    def function(self, case, inputs):
        if case.layer != "mla":
            raise Skip("multi-head latent attention only")
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        nope, rope, q_rank, kv_rank = layers._mla_dims(case)
        x = inputs.tensors[0]
        config = deepseek.DeepseekV3Config(
            hidden_size=x.shape[-1], num_attention_heads=case.heads, num_key_value_heads=case.heads, q_lora_rank=q_rank,
            kv_lora_rank=kv_rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=case.v_head_dim,
            attn_implementation=self.backend, max_position_embeddings=case.q_len,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        module = deepseek.DeepseekV3Attention(config, 0).to(x)
        tables = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(case.q_len, device=x.device)[None])
        mask = None
        if self.backend == "eager" and case.causal:
            mask = torch.full((case.q_len, case.q_len), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        if not case.causal:
            raise Skip("causal only")

        def call(x, *weights):
            parameters = {f"{name}.weight": w for name, w in zip(NAMES, weights)}
            return torch.func.functional_call(module, parameters, (x, tables, mask))[0]

        return call


PEERS = [Deepseek("eager"), Deepseek("sdpa")]
