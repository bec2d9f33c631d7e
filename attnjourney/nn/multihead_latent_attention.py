from __future__ import annotations

import torch
from torch import Tensor, nn

from .rotary import rotary_tables


class MultiheadLatentAttention(nn.Module):
    """Multi-head latent self-attention, as in DeepSeek-V2 and V3: (batch, seq, embed) -> (batch, seq, embed). Keys and
    values come from one latent of kv_lora_rank numbers per position, beside it one rotary key that all heads share.
    Parameters are named as in transformers' deepseek_v3, whose state dicts load.

    Args:
        embed_dim: width of the input and the output.
        num_heads: heads.
        q_lora_rank: width of the queries' latent; None: queries come from x by one projection, q_proj.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: a query or key head is [nope | rope]; the rope part has the position.
        v_head_dim: of a value head.
        is_causal: position i sees positions 0 .. i.
        rope_theta: base of the rotary position embedding, interleaved layout; None: no rotation.
        scale: of the scores, (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 by default.
        eps: of the two RMS norms.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        is_causal: bool = True,
        rope_theta: float | None = 10000.0,
        scale: float | None = None,
        eps: float = 1e-6,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.is_causal = is_causal
        self.rope_theta = rope_theta
        self.scale = scale
        self.eps = eps
        like = {"device": device, "dtype": dtype}
        query_width = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
            self.q_proj = nn.Linear(embed_dim, query_width, bias=False, **like)
        else:
            self.q_a_proj = nn.Linear(embed_dim, q_lora_rank, bias=False, **like)
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps, **like)
            self.q_b_proj = nn.Linear(q_lora_rank, query_width, bias=False, **like)
            self.q_proj = None
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, kv_lora_rank + qk_rope_head_dim, bias=False, **like)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps, **like)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **like)
        self.o_proj = nn.Linear(num_heads * v_head_dim, embed_dim, bias=False, **like)

    def forward(self, x: Tensor, *, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """rotary: cos, sin (seq, qk_rope_head_dim / 2) in place of those of rope_theta; layers may share them."""
        if rotary is None and self.rope_theta is not None:
            rotary = rotary_tables(x.shape[1], self.qk_rope_head_dim, self.rope_theta, device=x.device)
        cos, sin = (None, None) if rotary is None else rotary
        direct = self.q_proj is not None
        return torch.ops.attnjourney.mla(  # (batch, seq, embed)
            x,
            self.num_heads,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
            None if direct else self.q_a_proj.weight,  # (q_lora_rank, embed)
            None if direct else self.q_a_layernorm.weight,  # (q_lora_rank,)
            self.q_proj.weight if direct else self.q_b_proj.weight,  # (num_heads * (nope + rope), embed or q_lora_rank)
            self.kv_a_proj_with_mqa.weight,  # (kv_lora_rank + rope, embed)
            self.kv_a_layernorm.weight,  # (kv_lora_rank,)
            self.kv_b_proj.weight,  # (num_heads * (nope + v), kv_lora_rank)
            self.o_proj.weight,  # (embed, num_heads * v)
            cos=cos,
            sin=sin,
            is_causal=self.is_causal,
            scale=self.scale,
            eps=self.eps,
        )

    def extra_repr(self) -> str:
        dims = f"qk_nope_head_dim={self.qk_nope_head_dim}, qk_rope_head_dim={self.qk_rope_head_dim}"
        return f"num_heads={self.num_heads}, {dims}, v_head_dim={self.v_head_dim}, rope_theta={self.rope_theta}"
