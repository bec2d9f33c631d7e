"""Multi-head latent attention with its projections, as in DeepSeek-V3: a module over torch.ops.attnjourney.mla."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import attention, mla
from ._cached import NewTokens, check_cache
from ._parts import check_positive, check_sequence, is_plain, leaf, merge_heads, padding_as_mask, split_heads
from .cache import LatentCache
from .rotary import Rotary, Tables, rotate


class MultiheadLatentAttention(nn.Module):
    """Multi-head latent self-attention, as in DeepSeek-V2 and V3: (batch, seq, embed) -> (batch, seq, embed). Keys and
    values come from one latent of kv_lora_rank numbers per position, next to it one rotary key that all heads share.
    Parameters are named as in transformers' deepseek_v3, whose state dicts load.

    Args:
        embed_dim: width of the input and the output.
        num_heads: heads.
        q_lora_rank: width of the queries' latent; None: queries come from x by one projection, q_proj.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: a query or key head is [nope | rope]; the rope part has the position.
        v_head_dim: of a value head.
        rope: rotary position embedding of the rope parts, interleaved layout. None: no rotation; a number: its base
            theta; a dict: "method" and parameters of attnjourney.rope_frequencies, "theta". mscale_all_dim of YaRN
            also scales the scores, as in DeepSeek.
        bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have one (attention_bias of transformers).
        is_causal: position i sees positions 0 .. i.
        scale: of the scores, (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 by default, times what YaRN says.
        eps: of the two RMS norms.
    """

    # modules, or None: q_proj alone without q_lora_rank, the other three with one
    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any

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
        rope: float | dict | None = None,
        bias: bool = False,
        is_causal: bool = True,
        scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive(
            embed_dim=embed_dim, num_heads=num_heads, q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank,
            v_head_dim=v_head_dim, qk_head_dim=qk_nope_head_dim + qk_rope_head_dim,
        )  # fmt: skip
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.is_causal = is_causal
        self.rotary = Rotary(rope, qk_rope_head_dim)
        default_scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * self.rotary.score_scale
        self.scale = default_scale if scale is None else scale
        self.eps = eps
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        query_width = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
            self.q_proj = nn.Linear(embed_dim, query_width, bias=False, **like)
        else:
            self.q_a_proj = nn.Linear(embed_dim, q_lora_rank, bias, **like)
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps, **like)
            self.q_b_proj = nn.Linear(q_lora_rank, query_width, bias=False, **like)
            self.q_proj = None
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, kv_lora_rank + qk_rope_head_dim, bias, **like)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps, **like)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **like)
        self.o_proj = nn.Linear(num_heads * v_head_dim, embed_dim, bias, **like)

    @leaf
    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        rotary: Tables | None = None,
        cache: LatentCache | None = None,
    ) -> Tensor:
        """
        Args:
            x: (batch, seq, embed).
            key_padding_mask: (batch, seq). bool: True hides a key. Floating: added to its scores.
            position_ids: (seq,) or (batch, seq) integers, 0 .. seq - 1 by default.
            rotary: cos, sin (seq, qk_rope_head_dim / 2) or (batch, seq, ...) in place of those of rope; layers may
                share them.
            cache: of kv_lora_rank and qk_rope_head_dim. x are the tokens that follow those in it, and are added to it,
                but for those that key_padding_mask (bool) hides; their positions go on from its lengths. Its rotary
                keys are interleaved as this layer's. Without gradients only.
        """
        check_sequence("x", x, self.kv_a_proj_with_mqa.in_features)
        if cache is not None:
            return self._cached(x, key_padding_mask, position_ids, rotary, cache)
        tables = self.rotary.tables(x, position_ids) if rotary is None else rotary
        if key_padding_mask is not None or not self._is_one_operator():
            return self._composed(x, key_padding_mask, tables)
        cos, sin = tables
        direct = self.q_proj is not None
        return mla(  # (batch, seq, embed)
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

    def _is_one_operator(self) -> bool:
        """Whether `mla` is this layer: products without bias, torch's own norms with one eps."""
        projections = self.q_proj, self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa, self.kv_b_proj, self.o_proj
        norms = [n for n in (self.q_a_layernorm, self.kv_a_layernorm) if n is not None]
        return (
            is_plain(*projections)
            and all(p is None or p.bias is None for p in projections)
            and all(type(n) is nn.RMSNorm and n.eps == self.eps and not n._forward_hooks for n in norms)
        )

    def _composed(self, x: Tensor, key_padding_mask: Tensor | None, tables: Tables) -> Tensor:
        nope, rope, v = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        query = self._query(x, tables)
        latent, shared_key = self._latent(x, tables).split([self.kv_a_layernorm.weight.shape[0], rope], -1)
        key_nope, value = split_heads(self.kv_b_proj(latent), self.num_heads).split([nope, v], -1)  # (batch, H, seq, .)
        key = torch.cat([key_nope, shared_key.unsqueeze(1).expand(-1, self.num_heads, -1, -1)], -1)
        mask = padding_as_mask(key_padding_mask, *x.shape[:2])
        return self.o_proj(merge_heads(attention(query, key, value, mask, 0.0, self.is_causal, scale=self.scale)))

    def _query(self, x: Tensor, tables: Tables) -> Tensor:
        """(batch, H, seq, nope + rope), the rope part turned."""
        query = self.q_proj(x) if self.q_proj is not None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query_nope, query_rope = split_heads(query, self.num_heads).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], -1
        )
        return torch.cat([query_nope, rotate(query_rope, tables, interleaved=True)], -1)

    def _latent(self, x: Tensor, tables: Tables) -> Tensor:
        """(batch, seq, kv_lora + rope): the normed latent, then the rotary key of all heads, turned."""
        kv_a, rope = self.kv_a_proj_with_mqa(x), self.qk_rope_head_dim
        latent, shared_key = kv_a.split([kv_a.shape[-1] - rope, rope], -1)
        shared_key = rotate(shared_key.unsqueeze(1), tables, interleaved=True).squeeze(1)
        return torch.cat([self.kv_a_layernorm(latent), shared_key], -1)

    def _cached(self, x, key_padding_mask, position_ids, rotary, cache):
        check_cache(cache, LatentCache)
        self.rotary.check_cache()
        if not is_plain(self.kv_b_proj):
            raise ValueError("cache: expected kv_b_proj to be a plain Linear beside one, which reads its weight")
        new = NewTokens(cache, x, key_padding_mask, position_ids)
        tables = self.rotary.tables(new.x, new.positions) if rotary is None else rotary
        query, latent = self._query(new.x, tables), self._latent(new.x, tables)
        options = {"is_causal": self.is_causal, "scale": self.scale}
        return self.o_proj(
            new.restore(merge_heads(cache.step(query, latent, self.kv_b_proj.weight, new.counts, **options)))
        )

    def extra_repr(self) -> str:
        dims = f"qk_nope_head_dim={self.qk_nope_head_dim}, qk_rope_head_dim={self.qk_rope_head_dim}"
        return f"num_heads={self.num_heads}, {dims}, v_head_dim={self.v_head_dim}, rope={self.rotary.rope}"
