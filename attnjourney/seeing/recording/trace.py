"""trace: one attention, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...block_mask import BlockMask
from ...info import explain
from ...ops._attention_checks import CHECKED, check
from ...ops._registry.operator import draw_seed
from ...ops.block_attention import of_call
from ._stages import attention_stages, number_of_heads
from ._stages_of_modules import module_stages
from .records import Rows, indices
from .table import render

UNBOUNDED = (-1, -1)


class Trace(Mapping):
    """The stages of an attention by name, in the order in which they happen: trace["weights"], or trace.weights.
    print(trace) shows the numbers of a small one, and the shapes of a large one.

    Attributes:
        heads, rows: int64, the heads and query rows that the stages are of.
        result: what the module, or the operator of trace_state, returned; None of trace.
    """

    def __init__(self, title: str, stages: dict[str, Tensor], heads: Tensor, rows: Tensor, result: Any = None):
        self.title, self.heads, self.rows, self.result = title, heads, rows, result
        self._stages = stages

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._stages:
            raise KeyError(f"{name!r}: expected a stage of this trace, {list(self._stages)}")
        return self._stages[name]

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_stages"][name]
        except KeyError:
            raise AttributeError(f"{name!r}: expected a stage of this trace, {list(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__.get("_stages", ()))

    def __len__(self) -> int:
        return len(self._stages)

    def __dir__(self):
        return [*super().__dir__(), *self._stages]

    def as_dict(self) -> dict[str, Tensor]:
        return dict(self._stages)

    def __rich__(self):
        return render(self)

    def __str__(self) -> str:
        return _console(self).export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return _console(self).export_html(inline_styles=True, code_format="<pre style='line-height: 1.1'>{code}</pre>")

    def __repr__(self) -> str:
        return f"Trace({self.title}: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in self.items()) + ")"


def _console(trace: Trace) -> Any:
    import io

    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(trace)
    return console


@torch.no_grad()
def trace(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = UNBOUNDED,
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    rows: Rows = None,
    heads: Sequence[int] | Tensor | None = None,
) -> Trace:
    """Every stage of attnjourney.attention by name.

        seen = attnjourney.trace(query, key, value, is_causal=True, rows=[-1])
        seen.weights  # (..., heads, 1, S)
        print(seen)   # a table

    `output` is what the fused operator gives for these rows, with the same dropout after the same torch.manual_seed.
    The stages before it are in float32 (float64 for float64). In the order of the formula, without those that a call
    does not use:

        query, key, value         of the rows and heads wanted: (..., heads, rows, E), (..., heads, S, E or Ev)
        scores                    scale * query key^T: (..., heads, rows, S), as all that follow
        softcapped                softcap * tanh(scores / softcap)
        bias, alibi               what a floating mask and ALiBi add
        mask                      bool, True where the row sees the key: causality, window, lengths and masks
        masked_scores             with bias and ALiBi; -inf where hidden
        sinks, lse                (..., heads, rows): the sink's logit; the logarithm of the denominator
        weights                   exp(masked_scores - lse)
        kept, dropped_weights     bool, what dropout keeps; the weights after it
        output                    (..., heads, rows, Ev), in query's dtype

    Args:
        rows, heads: those wanted, all by default, as in attnjourney.capture: memory is O(heads * rows * S).
        the others: as in attnjourney.attention.

    Returns:
        Trace, a mapping; not differentiable.

    Raises:
        as attnjourney.attention; ValueError for a row or a head that is not there.
    """
    options: dict[str, Any] = dict(
        scale=scale,
        enable_gqa=enable_gqa,
        causal_alignment=causal_alignment,
        window_size=window_size,
        prefix_length=prefix_length,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    if query.device.type == "cpu":
        explain(query, key, value, attn_mask, dropout_p, is_causal, **options)  # its checks are those of attention
    else:
        mask = None if isinstance(attn_mask, BlockMask) else attn_mask
        check(query, key, value, mask, scale, enable_gqa, **{name: options[name] for name in CHECKED})
    if isinstance(attn_mask, BlockMask):
        attn_mask = of_call(attn_mask, query, key)
    if dropout_p > 0 and dropout_seed is None:
        dropout_seed = draw_seed(query)
    heads = indices("heads", heads, number_of_heads(query, key, enable_gqa))
    rows = indices("rows", rows, query.shape[-2])
    options |= dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, dropout_seed=dropout_seed)
    return Trace("attention", attention_stages(query, key, value, heads, rows, **options), heads, rows)


@torch.no_grad()
def trace_module(
    module: nn.Module, *inputs: Any, rows: Rows = None, heads: Sequence[int] | Tensor | None = None, **keywords: Any
) -> Trace:
    """Every stage of a module of attnjourney.nn, or of any module that makes one attention call.

        seen = attnjourney.trace_module(layer, x, rows=[-1])
        seen.latent, seen.k_pe, seen.weights, seen.output, seen.result

    The module runs on its fused path, and the stages are computed from the queries, keys, values and options of that
    run. They are those of attnjourney.trace, and before them

        query_unrotated, key_unrotated    what rotary position embedding turned into query and key
        latent, k_pe                      of latent attention: (batch, seq, kv_lora_rank) normed, and the one rotary key
                                          of all heads (batch, seq, rope), turned; key and value are what they expand to

    LinearAttention has phi_query, phi_key, scores, mask, weights (which may not be softmax's, but sum to about 1 with
    normalize), normalizer, output. InfiniAttention has the stages of its local part, each row's keys those of its own
    segment, and local_output, memory_output (what the memory read), gate, output. LongformerSelfAttention has the
    stages of trace, whose scores are a global row's by the global projections. A module that calls
    gated_linear_attention has the stages of trace_state.

    Args:
        module: its inputs and keywords follow. A cache is written as by the call itself.
        rows, heads: as in attnjourney.trace.

    Returns:
        Trace; its `result` is what the module returned.

    Raises:
        as the module; ValueError for a row or head that is not there, or where there is not one attention call but
        none, or several.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    stages, heads, rows, result = module_stages(module, inputs, keywords, heads, rows)
    return Trace(type(module).__name__, stages, heads, rows, result)
