"""Grouped-query attention with its projections, as in Llama: a module over torch.ops.attnjourney.gqa."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import attention, gqa
from ..ops._attention_checks import check_scores
from ._cached import NewTokens, check_batch, check_cache
from ._parts import (
    check_divides,
    check_positive,
    check_probability,
    check_sequence,
    is_plain,
    leaf,
    merge_heads,
    padding_as_mask,
    split_heads,
)
from .cache import KeyValueCache
from .rotary import Rotary, Tables, rotate


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention, as in Llama (Ainslie et al. 2023, arXiv 2305.13245): (batch, seq, embed) -> (batch, seq,
    embed). One key/value head serves num_heads / num_kv_heads query heads; num_kv_heads = 1 is multi-query attention,
    num_heads multi-head attention. Parameters are named as in transformers' Llama and Qwen3: q_proj, k_proj, v_proj,
    o_proj, q_norm, k_norm.

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads.
        head_dim: embed_dim / num_heads by default.
        kv_dim: width of what keys and values are made of, the second argument of forward: cross-attention.
        bias: whether the four projections have one.
        is_causal: position i sees positions 0 .. i (in cross-attention keys 0 .. i).
        rope: rotary position embedding of queries and keys. None: no rotation; a number: its base theta; a dict:
            "method" and parameters of attnjourney.rope_frequencies, "theta", "rotary_dim".
        window_size: (left, right), both inclusive, -1 unbounded: the keys p - left .. p + right that position p sees
            (Mistral's sliding_window W is (W - 1, -1)).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118); 0: they stay.
        sinks: whether there is one trained logit per head, parameter `sinks` (num_heads,), that joins the softmax's
            denominator (gpt-oss; arXiv 2309.17453).
        qk_norm: an RMS norm of every query and key head before the rotation, as in Qwen3.
        eps: of that norm.
        dropout: probability of dropping an attention weight; in training only.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        kv_dim: int | None = None,
        bias: bool = False,
        is_causal: bool = True,
        rope: float | dict | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive(embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim, kv_dim=kv_dim)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            check_divides(embed_dim, num_heads)
        check_probability("dropout", dropout)
        check_scores(window_size, softcap)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kv_dim = kv_dim
        self.is_causal = is_causal
        self.dropout = dropout
        self.window_size = tuple(window_size)
        self.softcap = softcap
        self.rotary = Rotary(rope, self.head_dim)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        memory_dim = embed_dim if kv_dim is None else kv_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **like)
        self.k_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias, **like)
        self.v_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias, **like)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias, **like)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **like)) if sinks else None
        self.q_norm = nn.RMSNorm(self.head_dim, eps, **like) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps, **like) if qk_norm else None

    @leaf
    def forward(
        self,
        x: Tensor,
        key_value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        rotary: Tables | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """
        Args:
            x: (batch, seq, embed).
            key_value: (batch, keys, kv_dim) with kv_dim, else None: keys and values come from x.
            key_padding_mask: (batch, keys). bool: True hides a key. Floating: added to its scores.
            position_ids: (seq,) or (batch, seq) integers, 0 .. seq - 1 by default; of the queries in
                cross-attention, whose keys are at 0 .. keys - 1.
            rotary: cos, sin (seq, rotary_dim / 2) or (batch, seq, ...) in place of those of rope; layers may share
                them. Not in cross-attention.
            cache: of num_kv_heads heads of head_dim. x are the tokens that follow those in it, and are added to it, but
                for those that key_padding_mask (bool) hides; their positions go on from its lengths. In
                cross-attention key_value is added, and None attends to what is there. Without gradients only.
        """
        if (key_value is None) != (self.kv_dim is None) and (cache is None or self.kv_dim is None):
            expected = "None, this layer has no kv_dim" if self.kv_dim is None else "a tensor, this layer has a kv_dim"
            got = "None" if key_value is None else f"shape {tuple(key_value.shape)}"
            raise ValueError(f"key_value: expected {expected}, got {got}")
        dropout_p = self.dropout if self.training else 0.0
        check_sequence("x", x, self.q_proj.in_features)
        if cache is not None:
            check_cache(cache, KeyValueCache, dropout_p)
            self.rotary.check_cache()
            run = self._cached if self.kv_dim is None else self._cached_cross
            return run(x, key_value, key_padding_mask, position_ids, rotary, cache)
        tables = self.rotary.tables(x, position_ids) if rotary is None else rotary
        projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        special = key_value is not None or key_padding_mask is not None or self.q_norm is not None or dropout_p > 0
        special = special or self._score_options() != {}
        if not special and is_plain(*projections):
            cos, sin = tables
            return gqa(  # (batch, seq, embed)
                x,
                self.num_heads,
                self.num_kv_heads,
                *(p.weight for p in projections),
                *(p.bias for p in projections),
                cos=cos,
                sin=sin,
                is_causal=self.is_causal,
            )

        key_tables = tables
        if key_value is not None:
            check_sequence("key_value", key_value, self.kv_dim)
            key_tables = self.rotary.tables(key_value, None)
        memory = x if key_value is None else key_value
        query = self._query(x, tables)
        key, value = self._key_value(memory, key_tables)
        mask = padding_as_mask(key_padding_mask, *memory.shape[:2])
        options = self._score_options()
        out = attention(query, key, value, mask, dropout_p, self.is_causal, enable_gqa=True, **options)
        return self.o_proj(merge_heads(out))

    def _query(self, x: Tensor, tables: Tables) -> Tensor:
        """(batch, H, seq, D), normed and turned."""
        query = split_heads(self.q_proj(x), self.num_heads)
        return rotate(query if self.q_norm is None else self.q_norm(query), tables)

    def _key_value(self, memory: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """(batch, Hkv, keys, D) both, keys normed and turned."""
        key = split_heads(self.k_proj(memory), self.num_kv_heads)
        value = split_heads(self.v_proj(memory), self.num_kv_heads)
        return rotate(key if self.k_norm is None else self.k_norm(key), tables), value

    def _score_options(self) -> dict[str, Any]:
        """Options of `attention` that this layer has, those that are not the default."""
        options: dict[str, Any] = {}
        if self.window_size != (-1, -1):
            options["window_size"] = self.window_size
        if self.softcap != 0.0:
            options["softcap"] = self.softcap
        if self.sinks is not None:
            options["sinks"] = self.sinks
        return options

    def _cached(self, x, key_value, key_padding_mask, position_ids, rotary, cache):
        new = NewTokens(cache, x, key_padding_mask, position_ids)
        tables = self.rotary.tables(new.x, new.positions) if rotary is None else rotary
        options = {"is_causal": self.is_causal, "window_size": self.window_size, **self._score_options()}
        query, (key, value) = self._query(new.x, tables), self._key_value(new.x, tables)
        return self.o_proj(new.restore(merge_heads(cache.step(query, key, value, new.counts, **options))))

    def _cached_cross(self, x, key_value, key_padding_mask, position_ids, rotary, cache):
        """The cache counts the keys, not the queries: nothing here may depend on a query's place among them."""
        check_batch(cache, x.shape[0])
        if self.is_causal or self.window_size != (-1, -1):
            raise ValueError(
                "cache: expected a layer with is_causal=False and no window_size beside one in cross-attention, got "
                f"is_causal={self.is_causal}, window_size={self.window_size}"
            )
        if self.rotary.rope is not None and position_ids is None and rotary is None:
            raise ValueError("position_ids: expected those of x beside a cache in cross-attention, got None")
        query = self._query(x, self.rotary.tables(x, position_ids) if rotary is None else rotary)
        options = {"is_causal": False, **self._score_options()}
        if key_value is None:
            if key_padding_mask is not None:
                raise ValueError("key_padding_mask: expected None without key_value, the cache has no padding")
            return self.o_proj(merge_heads(cache.attend(query, **options)))
        check_sequence("key_value", key_value, self.kv_dim)
        new = NewTokens(cache, key_value, key_padding_mask)
        key, value = self._key_value(new.x, self.rotary.tables(new.x, new.positions))
        return self.o_proj(merge_heads(cache.step(query, key, value, new.counts, **options)))

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, is_causal={self.is_causal}, rope={self.rotary.rope}, dropout={self.dropout}"
