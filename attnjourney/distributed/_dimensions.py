"""What the dimensions of every operator's tensors are, so that they can be shared out over ranks.

A letter for each dimension: B batch, H query heads, K key heads, L query rows; "." stays whole. A small letter: several
numbers for each, head after head (a projection's rows). Letters are aligned at the last dimension where a tensor has
fewer; dimensions that are more stand behind the first. Gradients and tangents are as what they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._registry.operator import NAMESPACE, Signature

_scores = dict(query="BHL.", key="BK..", value="BK..", out="BHL.", lse="BHL", stats="BHL.")
_per_head = dict(sinks="bH", alibi_slopes="bH")
_attention = dict(**_scores, **_per_head, key_lengths="b", query_lengths="b")
_packed = dict(query=".H.", key=".K.", value=".K.", out=".H.", lse="H.", stats="H..", sinks=".H", alibi_slopes=".H")
_decode = dict(query="BH..", out="BH..", lse="BH.", lengths="B", block_table="B.", attn_mask="BH..", **_per_head)
_linear = dict(
    query="BH..", key="BK..", value="BK..", key_padding_mask="B.", initial_state="BK..", initial_normalizer="BK.",
    out="BH..", denominator="BH.", state="BK..", normalizer="BK.",
)  # fmt: skip
_layer = dict(x="B..", out="B..", attn="B.h", lse="BH.", stats="BH..", cos="B..", sin="B..")
_gqa = dict(
    q_weight="h.", k_weight="k.", v_weight="k.", o_weight=".h", q_bias="h", k_bias="k", v_bias="k",
    query="B.h", key="B.k", value="B.k", **_layer,
)  # fmt: skip
_mla = dict(
    q_b_weight="h.", kv_b_weight="h.", o_weight=".h", query="B.h", kv="B.h", kv_a="B..", kv_rstd="B.", q_a="B..",
    q_rstd="B.", **_layer,
)  # fmt: skip
_mha = dict(
    query="B..", key="B..", value="B..", key_padding_mask="B.", out="B..", attn="B..", lse="B..", stats="B...",
    projected="b", attn_mask="b..",
)  # fmt: skip
_cache = dict(
    key_cache="BK..", value_cache="BK..", key="BK..", value="BK..", key_scale="BK.", value_scale="BK.",
)  # fmt: skip
_pool = dict(
    key_cache=".K..", value_cache=".K..", key=".K..", value=".K..", key_scale=".K.", value_scale=".K.",
)  # fmt: skip
_lengths = dict(lengths="B", new_lengths="B", lowest="B", counts="B")

# dimensions of the tensors of each operator; what is not named stays whole
DIMENSIONS: dict[str, dict[str, str]] = {
    "attention": {**_attention, "attn_mask": "BHL."},
    "varlen_attention": _packed,
    "paged_attention": {**_packed, "key": ".K..", "value": ".K.."},
    "attention_fp8": {},
    "block_attention": {**{n: d.replace("L", ".") for n, d in _attention.items()}, "block_offsets": "BH."},
    "decode": {**_decode, "key": "BK..", "value": "BK..", "key_scale": "BK.", "value_scale": "BK."},
    "mla_decode": {**_decode, "latent": "B..", "latent_scale": "B.", "kv_b_weight": "h."},
    "linear_attention": _linear,
    "gated_linear_attention": {},
    "rope": dict(x="BHL.", cos="BL.", sin="BL.", out="BHL."),
    "rope_": dict(x="BHL.", cos="BL.", sin="BL."),
    "mha": _mha,
    "gpt_attention": dict(x="B..", out="B..", attn="B..", lse="B..", stats="B...", qkv="B.."),
    "gqa": _gqa,
    "mla": _mla,
    "kv_cache_append": {**_cache, **_lengths},
    "kv_cache_truncate": _lengths,
    "kv_cache_reorder": dict(key_cache=".K..", value_cache=".K..", key_scale=".K.", value_scale=".K."),
    "paged_cache_append": _pool,
    "paged_cache_truncate": {},
    "paged_cache_reorder": {},
    "_attention_weights": {},
    "_block_attention_weights": {},
    "_explain": {},
}
SUMMED = {"gqa": "H", "mla": "H"}  # layers whose `out` is the sum over the shares of these
NARROWED = ("attention", "varlen_attention", "paged_attention", "block_attention", "decode")  # no result has key heads
ONCE = ("o_bias",)  # what is added to such a sum: by one rank


class Described:
    """An operator, its schema and its tensors' dimensions."""

    def __init__(self, operator: torch._ops.OpOverload, family: str):
        self.family = family
        self.signature = Signature(operator)
        self.name = operator._schema.name.removeprefix(f"{NAMESPACE}::")
        arguments = operator._schema.arguments
        self.written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.outputs = [r.name or "out" for r in operator._schema.returns]
        names = sorted(self.signature.tensors, key=lambda name: name != "lse")  # a backward follows its forward
        self.tensors = names if "lse" in names else [n for n in self.signature.names if n in self.signature.tensors]

    def dimensions(self, name: str, dim: int, named: dict[str, Any]) -> str:
        """A letter for each of the `dim` dimensions of that tensor."""
        base = base_name(name)
        letters = DIMENSIONS[self.family].get(base, "." * dim)
        if named.get("block_table") is not None and base.removesuffix("_scale") in ("key", "value", "latent"):
            letters = letters.replace("B", ".")  # the blocks of all sequences
        rank = max(dim, _dim(named.get("query"))) if base in ("attn_mask", "block_offsets") else dim
        if rank > len(letters):
            letters = letters[0] + "." * (rank - len(letters)) + letters[1:]
        return letters[len(letters) - dim :] if dim else ""


def base_name(name: str) -> str:
    return name.removesuffix("_tangent").removeprefix("grad_")


def _dim(x: Tensor | None) -> int:
    return 0 if x is None else x.dim()


def described() -> Sequence[Described]:
    """Every operator, and its forward and its derivatives."""
    namespace = getattr(torch.ops, NAMESPACE)
    found = [Described(namespace.attention_with_lse.default, "attention")]
    for family in DIMENSIONS:
        for suffix in ("", "_forward", "_backward", "_jvp", "_backward_jvp"):
            if torch._C._dispatch_has_kernel(f"{NAMESPACE}::{family}{suffix}"):
                found.append(Described(getattr(namespace, family + suffix).default, family))
    return found
