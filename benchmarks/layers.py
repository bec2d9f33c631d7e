"""Whole layers: weights, the same layer composed of plain PyTorch calls, our operator, and its FLOP.

Shapes: x (batch, length, width), width = heads * v_head_dim. `attend(q, k, v, causal)` takes (batch, heads, length,
dim), k and v with kv_heads heads, and returns (batch, heads, length, v_head_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def _width(case) -> int:
    return case.heads * case.v_head_dim


def _mla_dims(case) -> tuple[int, int, int, int]:
    """nope, rope, q_lora_rank, kv_lora_rank: a third of the head is rope, the ranks are width / 2 and width / 4."""
    rope = case.head_dim // 3
    return case.head_dim - rope, rope, _width(case) // 2, _width(case) // 4


def rotary_table(length: int, dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (length, dim / 2)."""
    frequency = 1e4 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return tuple(t.to(device=like.device, dtype=like.dtype) for t in (angle.cos(), angle.sin()))


def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


def _rotate_halves(x, cos, sin):
    return torch.cat(_rotate(*x.chunk(2, -1), cos, sin), -1)


def _rotate_pairs(x, cos, sin):
    return torch.stack(_rotate(x[..., 0::2], x[..., 1::2], cos, sin), -1).flatten(-2)


def _heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _merge(x):
    return x.transpose(1, 2).flatten(-2)


def _packed_shapes(case):
    e = _width(case)
    return [(3 * e, e), (3 * e,), (e, e), (e,)]


def _compose_packed(case, attend, x, qkv_weight, qkv_bias, out_weight, out_bias):
    q, k, v = (_heads(t, case.heads) for t in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
    return F.linear(_merge(attend(q, k, v, case.causal)), out_weight, out_bias)


def _ours_mha(case, x, *weights):
    return torch.ops.attnjourney.mha(x, x, x, case.heads, *weights, is_causal=case.causal)


def _ours_gpt(case, x, *weights):
    return torch.ops.attnjourney.gpt_attention(x, case.heads, *weights)


def _gqa_shapes(case):
    e, kv = _width(case), case.kv_heads * case.head_dim
    return [(e, e), (kv, e), (kv, e), (e, e)]


def _compose_gqa(case, attend, x, q_weight, k_weight, v_weight, o_weight):
    cos, sin = rotary_table(x.shape[1], case.head_dim, x)
    q = _rotate_halves(_heads(F.linear(x, q_weight), case.heads), cos, sin)
    k = _rotate_halves(_heads(F.linear(x, k_weight), case.kv_heads), cos, sin)
    v = _heads(F.linear(x, v_weight), case.kv_heads)
    return F.linear(_merge(attend(q, k, v, case.causal)), o_weight)


def _ours_gqa(case, x, *weights):
    cos, sin = rotary_table(x.shape[1], case.head_dim, x)
    return torch.ops.attnjourney.gqa(x, case.heads, case.kv_heads, *weights, cos=cos, sin=sin, is_causal=case.causal)


def _mla_shapes(case):
    nope, rope, q_rank, kv_rank = _mla_dims(case)
    e, h, dv = _width(case), case.heads, case.v_head_dim
    return [
        (q_rank, e),
        (q_rank,),
        (h * (nope + rope), q_rank),
        (kv_rank + rope, e),
        (kv_rank,),
        (h * (nope + dv), kv_rank),
        (e, h * dv),
    ]


def _rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _compose_mla(case, attend, x, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, o_weight):
    nope, rope, _, kv_rank = _mla_dims(case)
    cos, sin = rotary_table(x.shape[1], rope, x)
    q = _heads(F.linear(_rms_norm(F.linear(x, q_a), q_norm), q_b), case.heads)
    latent, k_rope = F.linear(x, kv_a).split((kv_rank, rope), -1)
    k_nope, v = _heads(F.linear(_rms_norm(latent, kv_norm), kv_b), case.heads).split((nope, case.v_head_dim), -1)
    q_nope, q_rope = q.split((nope, rope), -1)
    k_rope = _rotate_pairs(k_rope[:, None], cos, sin).expand(-1, case.heads, -1, -1)
    q = torch.cat((q_nope, _rotate_pairs(q_rope, cos, sin)), -1)
    return F.linear(_merge(attend(q, torch.cat((k_nope, k_rope), -1), v, case.causal)), o_weight)


def _ours_mla(case, x, *weights):
    nope, rope, _, _ = _mla_dims(case)
    cos, sin = rotary_table(x.shape[1], rope, x)
    dims = (case.heads, nope, rope, case.v_head_dim)
    return torch.ops.attnjourney.mla(x, *dims, *weights, cos=cos, sin=sin, is_causal=case.causal)


@dataclass(frozen=True)
class Layer:
    operator: str  # torch.ops.attnjourney.<operator>
    shapes: (
        Callable  # (case) -> shapes of the weights in the operator's order; the two-dimensional ones are projections
    )
    compose: Callable  # (case, attend, x, *weights) -> out
    ours: Callable  # (case, x, *weights) -> out

    def flops(self, case, which: str) -> int:
        """Projections 2 in * out a token, twice that in backward, and the attention between them."""
        projections = 2 * case.batch * case.q_len * sum(s[0] * s[1] for s in self.shapes(case) if len(s) == 2)
        d, dv = case.head_dim, case.v_head_dim
        pair = 2 * (d + dv) if which == "forward" else 2 * (3 * d + 2 * dv)
        return projections * (1 if which == "forward" else 2) + case.batch * case.heads * case.pairs * pair

    def numel(self, case, which: str) -> int:
        """Numbers read and written at least: x, weights and out; in backward their gradients too."""
        x = case.batch * case.q_len * _width(case)
        weights = sum(s[0] * (s[1] if len(s) == 2 else 1) for s in self.shapes(case))
        return 2 * x + weights if which == "forward" else 3 * x + 2 * weights


LAYERS = {
    "mha": Layer("mha", _packed_shapes, _compose_packed, _ours_mha),
    "gpt": Layer("gpt_attention", _packed_shapes, _compose_packed, _ours_gpt),
    "gqa": Layer("gqa", _gqa_shapes, _compose_gqa, _ours_gqa),
    "mla": Layer("mla", _mla_shapes, _compose_mla, _ours_mla),
}
