"""Counts of the calls that came in through attnjourney.activate: where they ran, and why not here."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_reasons: Counter[str] = Counter()
OURS = ("attnjourney", "fast_path", "traced", "flash_operators")


def ran(where: str) -> None:
    """Counts a call that ran here: one of OURS."""
    with _lock:
        _counts[where] += 1


def left_to_torch(reason: str) -> None:
    with _lock:
        _reasons[reason] += 1


def activity(reset: bool = False) -> dict[str, Any]:
    """Where the calls that `activate` is for have run, since the process began or since the last reset.

    Args:
        reset: begin again at 0.

    Returns a dict:

    - attnjourney: calls of F.scaled_dot_product_attention, from Python or C++, that ran here.
    - fast_path: calls of the inference kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer that ran here.
    - traced: calls that put an operator of this package into a graph (torch.compile, make_fx, a decomposed export).
      Runs of the graph are not counted.
    - flash_operators: calls of torch's five operators of flash attention, forward or backward, that ran here: on CUDA,
      after torch.nn.attention.activate_flash_attention_impl("attnjourney").
    - torch: calls that, while activated, ran in torch's own function.
    - reasons: why, each with its number of calls.
    """
    with _lock:
        result = {**{name: _counts[name] for name in OURS}, "torch": _reasons.total(), "reasons": dict(_reasons)}
        if reset:
            _counts.clear()
            _reasons.clear()
    return result
