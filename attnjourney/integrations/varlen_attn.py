"""torch.nn.attention.varlen's varlen_attn and varlen_attn_out on the CPU, where torch has no kernel for them.

Importing this module registers the kernels: forward, backward and the form that writes into a tensor; torch's own
autograd, fake kernels and FLOP counts stay. CUDA is not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from torch.nn.attention import varlen as _varlen
except ImportError as error:
    raise ImportError(
        f"attnjourney.integrations.varlen_attn needs a torch with torch.nn.attention.varlen: {error}"
    ) from error

from ..ops import varlen_attention
from ..ops._attention_checks import ALIGNMENTS
from ..ops._registry.registration import OPERATORS
from .flash_attn import as_blocks
from .flash_operators import used_keys, used_offsets


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, is_causal: bool,
    scale: float | None, window_size: list[int] | None, seqused_k: Tensor | None, block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (T_q, H, Dv), lse (H, T_q)."""
    if block_table is not None:
        cu_seq_k = used_offsets(seqused_k)
        key, value, block_table = as_blocks(key, value, block_table)
    elif seqused_k is not None:
        key, value, cu_seq_k = used_keys(key, value, cu_seq_k, seqused_k, None)
    if cu_seq_k is None:
        raise ValueError("cu_seq_k: expected a tensor without block_table, got None")
    return varlen_attention(
        query, key, value, cu_seq_q, cu_seq_k, 0.0, is_causal, block_table=block_table, scale=scale,
        causal_alignment="bottom_right", window_size=_window(window_size), return_lse=True,
    )  # fmt: skip


def _window(window_size: list[int] | None) -> tuple[int, int]:
    return (-1, -1) if window_size is None else (window_size[0], window_size[1])


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse = _attend(query, key, value, cu_seq_q, cu_seq_k, is_causal, scale, window_size, seqused_k, block_table)
    return out, lse.float(), torch.zeros(2, dtype=torch.uint64)


def _forward_into(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
    max_k: int, is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    made, lse = _attend(query, key, value, cu_seq_q, cu_seq_k, is_causal, scale, window_size, seqused_k, block_table)
    out.copy_(made)
    return lse.float()


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor,
    cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the forward again: lse comes back in float32, also for float64. Below autograd, where this runs, the
    backward is an operator to be called; what it takes is found by name."""
    operator = OPERATORS["varlen_attention"]
    alignment = ALIGNMENTS.index("bottom_right")
    options = {"scale": scale, "causal_alignment": alignment, "window_size": _window(window_size)}
    call = operator.forward.flat((query, key, value, cu_seq_q, cu_seq_k, 0.0, is_causal), options)
    results = dict(zip(operator.forward.outputs, operator.forward.call(call)))
    values = {**dict(zip(operator.forward.names, call)), **results, "grad_out": grad_out, "grad_lse": None, "need": 7}
    q, k, v, *_ = operator.backward.call(tuple(values[name] for name in operator.backward.names))
    return q, k, v


for _operator, _kernel in (
    (_varlen._varlen_attn, _forward),
    (_varlen._varlen_attn_out, _forward_into),
    (_varlen._varlen_attn_backward, _backward),
):
    torch.library.register_kernel(_operator, "cpu", _kernel)
