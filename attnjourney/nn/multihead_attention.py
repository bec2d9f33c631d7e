from __future__ import annotations

import torch
from torch import Tensor, nn


class MultiheadAttention(nn.Module):
    """Multi-head attention with the parameters of torch.nn.MultiheadAttention: same names, same initial values under
    the same seed, state dicts load either way.

    Args:
        embed_dim: width of query, key, value and the output.
        num_heads: divides embed_dim.
        dropout: probability of dropping an attention weight; in training only.
        bias: whether the projections have one.

    The other arguments of torch.nn.MultiheadAttention are accepted with the values written here and raise
    NotImplementedError with any other; batch_first is True.
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
        batch_first: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of embed_dim, {embed_dim}, got {num_heads}")
        fixed = (
            ("add_bias_kv", add_bias_kv, False),
            ("add_zero_attn", add_zero_attn, False),
            ("kdim", embed_dim if kdim is None else kdim, embed_dim),
            ("vdim", embed_dim if vdim is None else vdim, embed_dim),
            ("batch_first", batch_first, True),
        )
        for name, value, supported in fixed:
            if value != supported:
                raise NotImplementedError(f"{name}: only {supported} is implemented yet, got {value}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        like = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **like))  # query, key, value
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **like))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **like)  # draws random numbers: before in_proj_weight
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """query (batch, L, embed), key and value (batch, S, embed) -> (batch, L, embed).

        Without key: self-attention. Without value: value is key. key_padding_mask (batch, S) and attn_mask (L, S) or
        (batch * num_heads, L, S): True is blocked, floating is added. is_causal: row i sees keys 0 .. i; unlike in
        torch.nn.MultiheadAttention it is no hint about attn_mask but a condition of its own.
        """
        key = query if key is None else key
        return torch.ops.attnjourney.mha(  # (batch, L, embed)
            query,
            key,
            key if value is None else value,
            self.num_heads,
            self.in_proj_weight,  # (3 * embed, embed)
            self.in_proj_bias,  # (3 * embed,)
            self.out_proj.weight,  # (embed, embed)
            self.out_proj.bias,  # (embed,)
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
