"""The stages of modules: one run of the module, and what its attention call read."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn

from ...nn import InfiniAttention, LongformerSelfAttention, MultiheadLatentAttention
from ._dispatch_mode import OperatorCalls
from ._scores import PACKED, READERS, Scores
from ._stages import attention_stages
from ._stages_gated import gated_stages
from ._stages_infini import infini_stages
from ._stages_linear import linear_stages
from ._stages_longformer import longformer_stages
from ._states import STATES
from .records import indices

_OPERATORS = {*READERS, *STATES, "rope"}


def module_stages(
    module: nn.Module, inputs: tuple, keywords: dict, heads: Any, rows: Any
) -> tuple[dict, Tensor, Tensor, object]:
    """(stages by name, heads, rows, what the module returned)"""
    stages_of: dict[type, Any] = {InfiniAttention: infini_stages, LongformerSelfAttention: longformer_stages}
    own = stages_of.get(type(module))
    if own is not None:
        result = module(*inputs, **keywords)
        arguments = _bound(module, inputs, keywords)
        x = arguments["x"]
        heads, rows = indices("heads", heads, cast(int, module.num_heads)), indices("rows", rows, x.shape[1])
        return own(module, heads, rows, **arguments), heads, rows, result

    calls: list[tuple[str, Any]] = []
    turned: list[tuple[Tensor, Tensor]] = []

    def on_call(func: Any, operator: str, call: dict, outputs: tuple) -> None:
        if operator == "rope":
            turned.append((call["x"], outputs[0]))
        elif operator in STATES:
            calls.append((operator, call))
        else:
            calls.append((operator, READERS[operator](call, outputs)))

    with OperatorCalls(on_call, _OPERATORS):
        result = module(*inputs, **keywords)
    if len(calls) != 1:
        names = ", ".join(operator for operator, _ in calls) or "none"
        raise ValueError(f"module: expected one that makes one attention call, got {names}: trace the module inside")
    ((operator, call),) = calls
    if operator in PACKED or (operator in STATES and call.get("cu_seqlens") is not None):
        raise ValueError("module: expected attention without packed sequences: trace one sequence at a time")
    if operator in STATES:
        heads = indices("heads", heads, max(call["query"].shape[1], call["value"].shape[1]))
        rows = indices("rows", rows, call["query"].shape[2])
        stages = gated_stages if operator == "gated_linear_attention" else linear_stages
        return stages(call, heads, rows), heads, rows, result
    heads, rows = indices("heads", heads, call.heads), indices("rows", rows, call.length)
    return _stages(module, inputs, keywords, call, turned, heads, rows), heads, rows, result


def _stages(
    module: Any,
    inputs: tuple,
    keywords: dict,
    scores: Scores,
    turned: list[tuple[Tensor, Tensor]],
    heads: Tensor,
    rows: Tensor,
) -> dict[str, Tensor]:
    before = dict(scores.before())
    for name, x in (("query", scores.query), ("key", scores.key)):
        for source, rotated in turned:  # what rope gave out is what attention read
            if rotated.data_ptr() == x.data_ptr() and rotated.shape == x.shape:
                before[f"{name}_unrotated"] = source
    if scores.expanded is not None:
        scores = scores.expanded()
        before |= scores.before()
    elif isinstance(module, MultiheadLatentAttention) and "latent" not in before:
        arguments = _bound(module, inputs, keywords)
        tables = arguments["rotary"] or module.rotary.tables(arguments["x"], arguments["position_ids"])
        latent = module._latent(arguments["x"], tables)
        before["latent"], before["k_pe"] = latent.split(
            [latent.shape[-1] - module.qk_rope_head_dim, module.qk_rope_head_dim], -1
        )
    of_heads, of_rows = heads.to(scores.query.device), rows.to(scores.query.device)
    if "query_unrotated" in before:
        before["query_unrotated"] = before["query_unrotated"].index_select(-3, of_heads).index_select(-2, of_rows)
    if "key_unrotated" in before:
        group = scores.heads // scores.key.shape[-3]
        before["key_unrotated"] = before["key_unrotated"].index_select(-3, of_heads // group)

    query, options, at = scores.of_rows(rows)
    value = scores.value() if callable(scores.value) else scores.value
    stages = attention_stages(query, scores.key, value, heads, at, **options, **scores.dropout)
    return before | stages


def _bound(module: nn.Module, inputs: tuple, keywords: dict) -> dict:
    bound = inspect.signature(module.forward).bind(*inputs, **keywords)
    bound.apply_defaults()
    return dict(bound.arguments)
