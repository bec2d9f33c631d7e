"""torch.nn.MultiheadAttention over torch.ops.attnjourney.mha."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import mha
from ..ops._registry.operator import seed_for
from ..reference.mha import attention_mask
from ._multihead_cached import attend_cached
from ._multihead_checks import check_inputs
from ._parts import check_divides, check_positive, check_probability, is_plain, leaf, merge_heads, split_heads
from ._weights import attention_weights
from .cache import KeyValueCache


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention over the operators of this package (Vaswani et al. 2017, arXiv 1706.03762): the same
    constructor, parameters, initial values under a seed, state dict, `forward` and results, and an instance of it.

    It differs where torch's module leaves the fused path or gives NaN:

    * A query that sees no key gives out_proj's bias, weights 0 and finite gradients.
    * Weights that are returned are those before dropout: their rows sum to 1.
    * is_causal is a condition besides the masks, not a hint that attn_mask is causal, and needs no attn_mask.
    * attn_mask and key_padding_mask may have different dtypes.
    * Hooks on out_proj, and a module put in its place, take part.
    * Errors are ValueError (a shape or a number), RuntimeError (a dtype or a device); they name the argument.

    Args:
        embed_dim: width of query and output.
        num_heads: divides embed_dim.
        dropout: probability of dropping an attention weight; in training only.
        bias: whether the projections have one.
        add_bias_kv: one more key and value, trained, that every query sees.
        add_zero_attn: one more key and value of zeros that every query sees.
        kdim, vdim: widths of key and value; embed_dim by default.
        batch_first: (batch, seq, width) in place of (seq, batch, width).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        check_positive(embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim)
        check_divides(embed_dim, num_heads)
        check_probability("dropout", dropout)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )

    def __setstate__(self, state):
        super().__setstate__(state)
        self._qkv_same_embed_dim = self.kdim == self.vdim == self.embed_dim  # earlier versions stored False

    @leaf
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch.nn.MultiheadAttention.forward; shapes with N the batch size, H the number of heads.

        Args:
            query: (N, L, embed_dim) with batch_first, (L, N, embed_dim) without, (L, embed_dim) for one sample.
            key, value: (N, S, kdim) and (N, S, vdim), or (S, N, ...), or (S, ...).
            key_padding_mask: (N, S), or (S,). bool: True hides a key. Floating: added to its scores.
            need_weights: whether the weights are returned. They are computed from the softmax's log-sum-exp, a block
                of queries at a time: the output does not depend on it.
            attn_mask: (L, S) or (N * H, L, S). bool: True is a key that may not be seen. Floating (query's dtype or
                float32): added to the scores. Trainable.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: query i sees keys 0 .. i, within what the masks allow.
            cache: of num_heads heads. key and value are projected and added to it, but for those that key_padding_mask
                (bool) hides, and query attends to all it holds; key and value None attend to what is there. In
                self-attention (key is query) the queries are the last tokens of each sequence, by its own length. S of
                attn_mask and of the weights (KVCache only) is the longest length. Without gradients only.

        Returns:
            output, in query's shape; weights, (N, L, S), or (N, H, L, S) where not averaged, or None. S counts the
            keys of add_bias_kv and add_zero_attn too. One sample has no N.
        """
        if cache is None and (key is None or value is None):
            raise ValueError(f"{'key' if key is None else 'value'}: expected a tensor without a cache, got None")
        check_inputs(self, query, key, value, key_padding_mask, attn_mask if cache is None else None)
        batched = query.dim() == 3
        query, key, value = self._batch_first(query, key, value, batched)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)  # (1, S)
        dropout_p = self.dropout if self.training else 0.0

        weights = None
        if cache is not None:
            output, weights = attend_cached(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
                cache,
            )  # fmt: skip
        elif not need_weights and self._is_one_operator():
            output = mha(  # (N, L, embed)
                query,
                key,
                value,
                self.num_heads,
                self.in_proj_weight,  # (3 * embed, embed)
                self.in_proj_bias,  # (3 * embed,)
                self.out_proj.weight,  # (embed, embed)
                self.out_proj.bias,  # (embed,)
                attn_mask=attn_mask,
                key_padding_mask=key_padding_mask,
                is_causal=is_causal,
                dropout_p=dropout_p,
            )
        else:
            q, k, v = (split_heads(x, self.num_heads) for x in self._project(query, key, value))
            mask = attention_mask(attn_mask, key_padding_mask, self.num_heads)
            k, v, mask, is_causal = self._add_keys(k, v, mask, is_causal, query.shape[1])
            seed = seed_for(q, dropout_p)
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "dropout_seed": seed}
            heads = torch.ops.attnjourney.attention_forward(q, k, v, mask, **options)[0]  # (N, H, L, D)
            output = self.out_proj(merge_heads(heads))  # (N, L, embed)
            if need_weights:
                weights = attention_weights(q, k, mask, is_causal, average_attn_weights)

        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _batch_first(self, query: Tensor, key: Tensor | None, value: Tensor | None, batched: bool) -> list[Any]:
        """All as (N, seq, width); what is one tensor stays one tensor."""
        if batched and self.batch_first:
            return [query, key, value]
        first = [None if x is None else x.transpose(0, 1) if batched else x.unsqueeze(0) for x in (query, key, value)]
        query_, key_, value_ = first
        key_ = query_ if key is query else key_
        return [query_, key_, query_ if value is query else key_ if value is key else value_]

    def _is_one_operator(self) -> bool:
        """Whether `mha` is this layer: equal widths, no further keys, an output projection that is a plain product."""
        return self._qkv_same_embed_dim and self.bias_k is None and not self.add_zero_attn and is_plain(self.out_proj)

    def _project(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Any, ...]:
        """(N, L, embed), (N, S, embed), (N, S, embed); None for what is None."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights: tuple[Tensor, ...] = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        return tuple(
            None if x is None else F.linear(x, weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases)
        )

    def _add_keys(self, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, length: int) -> tuple[Any, ...]:
        """Appends the keys of add_bias_kv and add_zero_attn, which every query sees: k, v, mask, is_causal."""
        keys = k.shape[2]
        batch, heads, _, dim = k.shape
        if self.bias_k is not None:
            k, v = (
                torch.cat(
                    [x, bias.to(x.dtype).unflatten(-1, (heads, dim)).transpose(1, 2).expand(batch, -1, -1, -1)], 2
                )
                for x, bias in ((k, self.bias_k), (v, cast(Tensor, self.bias_v)))
            )
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added = k.shape[2] - keys
        if not added:
            return k, v, mask, is_causal
        if is_causal:  # the condition ends at the last real key: it becomes a mask, (L, S)
            past = torch.ones(length, keys, dtype=torch.bool, device=k.device).tril()
            if mask is None or mask.dtype == torch.bool:
                mask = past if mask is None else mask & past
            else:
                mask = torch.where(past, mask, -torch.inf)
        if mask is not None:
            mask = F.pad(mask, (0, added), value=1.0 if mask.dtype == torch.bool else 0.0)
        return k, v, mask, False

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
