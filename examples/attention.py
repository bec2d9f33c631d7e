"""Four causal attention layers: plain parameters, and one call of torch.ops.attnjourney.* in forward.

Shapes: B batch, T new tokens, E embed, H query heads, K key/value heads, D head_dim.

Training needs `forward` alone. The other methods are for generating text (generate.py), where the keys and values of
earlier tokens come from a cache: `project` gives the queries and what the cache keeps of the new tokens, which begin at
position `start` or stand at the positions `start` (T,); `keys_values` reads the cache, `merge` brings the attention's
result back to (B, T, E).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnjourney  # noqa: F401  (registers torch.ops.attnjourney)
from examples.config import Config

ops = torch.ops.attnjourney


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))  # GPT.initialise fills it


class MHA(nn.Module):
    """Multi-head attention; the weights are those of nn.MultiheadAttention."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.cache_heads, self.cache_width = config.heads, 2 * config.head_dim
        self.scale = config.head_dim**-0.5
        self.in_proj_weight = parameter(3 * config.embed, config.embed)
        self.in_proj_bias = parameter(3 * config.embed)
        self.out_proj_weight = parameter(config.embed, config.embed)
        self.out_proj_bias = parameter(config.embed)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mha(
            x, x, x, self.heads,
            self.in_proj_weight, self.in_proj_bias, self.out_proj_weight, self.out_proj_bias,
            is_causal=True,
        )  # fmt: skip

    def project(self, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)  # (B, T, 3 E)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)  # 3 times (B, H, T, D)
        return q, torch.cat([k, v], dim=-1)  # (B, H, T, D), (B, H, T, 2 D)

    def keys_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        return cache[..., : self.head_dim], cache[..., self.head_dim :]  # both (B, H, T, D)

    def merge(self, out: Tensor) -> Tensor:
        out = out.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, E)
        return F.linear(out, self.out_proj_weight, self.out_proj_bias)


class GPT2Attention(MHA):
    """Causal self-attention as in GPT-2: the same weights, an operator that knows that q, k and v come from one x."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.gpt_attention(
            x, self.heads, self.in_proj_weight, self.in_proj_bias, self.out_proj_weight, self.out_proj_bias
        )


class GQA(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): several query heads share one key/value head. Rotary positions."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.cache_heads, self.cache_width = config.kv_heads, 2 * config.head_dim
        self.scale = config.head_dim**-0.5
        self.q_weight = parameter(config.embed, config.embed)
        self.k_weight = parameter(config.kv_heads * config.head_dim, config.embed)
        self.v_weight = parameter(config.kv_heads * config.head_dim, config.embed)
        self.o_weight = parameter(config.embed, config.embed)
        cos, sin = rotary_tables(config.context, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]  # (T, D / 2)
        return ops.gqa(
            x, self.heads, self.kv_heads,
            self.q_weight, self.k_weight, self.v_weight, self.o_weight,
            cos=cos, sin=sin, is_causal=True,
        )  # fmt: skip

    def project(self, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        def heads(weight: Tensor) -> Tensor:
            return F.linear(x, weight).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or K, T, D)

        cos, sin = at(start, x, self.cos, self.sin)  # (T, D / 2)
        q, k = rotate_halves(heads(self.q_weight), cos, sin), rotate_halves(heads(self.k_weight), cos, sin)
        return q, torch.cat([k, heads(self.v_weight)], dim=-1)  # (B, H, T, D), (B, K, T, 2 D)

    def keys_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        return cache[..., : self.head_dim], cache[..., self.head_dim :]  # both (B, K, T, D)

    def merge(self, out: Tensor) -> Tensor:
        return F.linear(out.transpose(1, 2).flatten(2), self.o_weight)  # (B, H, T, D) -> (B, T, H D) -> (B, T, E)


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all keys and values of a token come from one latent.

    R is the latent's size (kv_lora_rank). A query and a key have a part without position (nope) and a rotary part
    (rope); the rotary part of the key is shared by all heads. The cache keeps the latent and that rotary key.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.rank = config.heads, config.kv_lora_rank
        self.nope, self.rope, self.v_dim = config.head_dim, config.rope_head_dim, config.head_dim
        self.cache_heads, self.cache_width = 1, self.rank + self.rope
        self.scale = (self.nope + self.rope) ** -0.5
        self.q_weight = parameter(self.heads * (self.nope + self.rope), config.embed)
        self.kv_a_weight = parameter(self.rank + self.rope, config.embed)
        self.kv_a_norm = nn.Parameter(torch.ones(self.rank))
        self.kv_b_weight = parameter(self.heads * (self.nope + self.v_dim), self.rank)
        self.o_weight = parameter(config.embed, self.heads * self.v_dim)
        cos, sin = rotary_tables(config.context, self.rope)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]  # (T, rope / 2)
        return ops.mla(
            x, self.heads, self.nope, self.rope, self.v_dim,
            None, None, self.q_weight, self.kv_a_weight, self.kv_a_norm, self.kv_b_weight, self.o_weight,
            cos=cos, sin=sin, is_causal=True,
        )  # fmt: skip

    def expand(self) -> tuple[Tensor, Tensor]:
        """The weights that make a head's keys and values from the latent: (H, nope, R), (H, v_dim, R)."""
        return self.kv_b_weight.view(self.heads, -1, self.rank).split([self.nope, self.v_dim], dim=1)

    def rotated(self, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = at(start, x, self.cos, self.sin)  # (T, rope / 2)
        q = F.linear(x, self.q_weight).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, nope + rope)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = F.linear(x, self.kv_a_weight).split([self.rank, self.rope], dim=-1)
        latent = F.rms_norm(latent, (self.rank,), self.kv_a_norm, 1e-6)
        kept = torch.cat([latent, rotate_pairs(k_rope, cos, sin)], dim=-1)  # (B, T, R + rope)
        query = torch.cat([q_nope, rotate_pairs(q_rope, cos, sin)], dim=-1)
        return query, kept.unsqueeze(1)  # (B, H, T, nope + rope), (B, 1, T, R + rope)

    def project(self, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        query, kept = self.rotated(x, start)
        q_nope, q_rope = query.split([self.nope, self.rope], dim=-1)
        # q . (W_K latent) = (q W_K) . latent: the query moves into the latent's space, and no key is ever made
        q_latent = q_nope @ self.expand()[0]  # (B, H, T, nope) @ (H, nope, R) -> (B, H, T, R)
        return torch.cat([q_latent, q_rope], dim=-1), kept  # (B, H, T, R + rope), (B, 1, T, R + rope)

    def keys_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        return cache, cache[..., : self.rank]  # (B, 1, T, R + rope), (B, 1, T, R): one head for all queries

    def merge(self, out: Tensor) -> Tensor:
        out = out @ self.expand()[1].transpose(1, 2)  # (B, H, T, R) @ (H, R, v_dim) -> (B, H, T, v_dim)
        return F.linear(out.transpose(1, 2).flatten(2), self.o_weight)  # (B, T, H v_dim) -> (B, T, E)


def rotary_tables(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary positions (arXiv 2104.09864), both (length, dim / 2)."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)  # (dim / 2,)
    angle = torch.arange(length).unsqueeze(1) * frequency  # (length, dim / 2)
    return angle.cos(), angle.sin()


def at(start: int | Tensor, x: Tensor, *tables: Tensor) -> list[Tensor]:
    """The rows of the tables for x (B, T, E)."""
    positions = slice(start, start + x.shape[1]) if isinstance(start, int) else start
    return [table[positions] for table in tables]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in gqa's layout: x (..., T, D), its first half paired with its second."""
    a, b = x.chunk(2, dim=-1)  # both (..., T, D / 2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in mla's layout: x (..., T, D), each even element paired with the next."""
    a, b = x[..., 0::2], x[..., 1::2]  # both (..., T, D / 2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)  # (..., T, D / 2, 2) -> (..., T, D)
