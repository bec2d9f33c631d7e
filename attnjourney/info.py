"""What the CPU kernels found on this machine, and what a call would do."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from . import _node
from ._errors import raise_typed
from .block_mask import BlockMask
from .ops._attention_checks import CHECKED, alignment_index, check
from .ops._registry.operator import Signature
from .ops._registry.registration import LIBRARY
from .ops._registry.torch_internals import below_autograd
from .ops.attention import UNBOUNDED
from .ops.block_attention import BLOCKS, block_tensors

_SIGNATURE = Signature(torch.ops.attnjourney._explain.default)


@partial(torch.library.register_fake, _SIGNATURE.operator, lib=LIBRARY)
def _fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    named = _SIGNATURE.checked(args, kwargs)
    given = [named[name] for name in ("query", "key", "value", "attn_mask", "scale", "enable_gqa")]
    check(*given, **{name: named[name] for name in CHECKED})
    raise NotImplementedError("attnjourney::_explain: expected tensors with data, for its text depends on the machine")


def _autograd(*args: Any, **kwargs: Any) -> torch.Tensor:
    try:
        with below_autograd():
            return _SIGNATURE.operator(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        raise_typed(error)


LIBRARY.impl("_explain", _autograd, "Autograd")


def _decode(text: torch.Tensor) -> dict:
    return json.loads(bytes(text.tolist()).decode())


def cpu_info() -> dict:
    """The instruction sets of the CPU kernels, their tuning, and whose autograd nodes there are.

    Returns a dict: `isa` (the one in use), `forced` (whether the environment variable ATTNJOURNEY_ISA chose it),
    `found` (those this CPU and operating system can run, best first), `built` (those in this build), `threads`,
    `node` ("C++", or "Python" and why: small calls take longer); and `tuning`, the tile sizes of this machine: their
    `name`, what ATTNJOURNEY_TUNING says (`forced`, or ""), and what they were chosen by, `vendor` and sizes and ways of
    the data caches (`l1_bytes`, `l1_ways`, `l2_bytes`, `l2_ways`; 0: unknown).

    Raises RuntimeError where ATTNJOURNEY_ISA names an instruction set that is unknown or cannot run here, or
    ATTNJOURNEY_TUNING a tuning that there is not.
    """
    why_not = _node.why_not()
    node = "C++" if why_not is None else f"Python: {why_not}"
    return {**_decode(torch.ops.attnjourney._cpu_info()), "node": node}


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] | None = UNBOUNDED,
    prefix_length: int = 0,
    key_lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> dict:
    """Tells how `attention` would run with these arguments, without running it.

    Returns a dict: `isa`, `tuning` (its name, see `cpu_info`), `group` (query heads per key/value head), and for
    `forward` and `backward` the threads, tile sizes (query rows, keys), work items and scratch bytes per thread; what
    is cut smaller so that all threads end at about one time (the items of the forward after `uncut_items`, the parts of
    each head in the backward's `parts_of_cut_heads`); the `kernel` of `forward`, "decode" for few query rows (each item
    then has a chunk of keys, `key_block`), else "tiled", without the sequences of few rows among longer ones, which
    decode's kernels compute before; and `sdpa`: whether `activate` is on (`active`), and why
    F.scaled_dot_product_attention would still run torch's own function (`refusal`), or None.
    Raises what `attention` would raise.
    """
    from .integrations import sdpa

    refusal = sdpa.refusal(query, key, value, attn_mask if isinstance(attn_mask, torch.Tensor) else None, is_causal)
    blocks = {}
    if isinstance(attn_mask, BlockMask):
        blocks, attn_mask = dict(zip(BLOCKS, block_tensors(attn_mask, query, key))), None
    plan = _decode(
        torch.ops.attnjourney._explain(
            query,
            key,
            value,
            attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            causal_alignment=alignment_index(causal_alignment),
            window_size=UNBOUNDED if window_size is None else window_size,
            prefix_length=prefix_length,
            key_lengths=key_lengths,
            query_lengths=query_lengths,
            softcap=softcap or 0.0,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            **blocks,
        )
    )
    return {**plan, "sdpa": {"active": sdpa.activated(), "refusal": refusal}}
