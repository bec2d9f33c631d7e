"""Options of attention: what ours is called with, the same as a mask tensor for SDPA, visible pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SOFTCAP = 50.0  # Gemma 2's


@dataclass(frozen=True)
class Option:
    """Of a case and its query (batch, heads, length, dim)."""

    ours: Callable  # (case, query) -> keyword arguments of attnjourney.attention
    mask: Callable | None  # (case, query) -> attn_mask of F.scaled_dot_product_attention, None: it cannot
    pairs: Callable | None = None  # case -> visible pairs of one head, on average over the batch; None: all or causal


def _slopes(case, query):
    return 2.0 ** (-8.0 / case.heads * torch.arange(1, case.heads + 1, dtype=torch.float32, device=query.device))


def _distances(case, query):  # of rows and keys, signed
    rows, keys = (torch.arange(n, device=query.device) for n in (case.q_len, case.kv_len))
    return rows[:, None] - keys


def _alibi_mask(case, query):
    distance = _distances(case, query)
    bias = -_slopes(case, query)[:, None, None] * distance.abs()
    return (bias.masked_fill(distance < 0, -torch.inf) if case.causal else bias).to(query.dtype)


def _window_mask(case, query):
    distance = _distances(case, query)
    return (distance >= 0) & (distance < case.extent)


def _window_pairs(case):
    first = min(case.extent, case.q_len)  # rows whose window is cut off by the start
    return first * (first + 1) // 2 + (case.q_len - first) * case.extent


def _lengths(case):  # 1, 3/4, 1/2, 1/4 of the keys
    return [case.kv_len * (4 - i % 4) // 4 for i in range(case.batch)]


def _key_lengths(case, query):
    return torch.tensor(_lengths(case), device=query.device)


def _lengths_mask(case, query):
    return torch.arange(case.kv_len, device=query.device) < _key_lengths(case, query)[:, None, None, None]


def ragged(case) -> list[int]:
    """Where the sequences of a packed batch begin, and its end: five of different lengths."""
    ends = [0]
    for share in (13, 9, 5, 3):
        ends.append(ends[-1] + case.q_len * share // 32)
    return [*ends, case.q_len]


def _ragged_pairs(case):
    ends = ragged(case)
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    return sum(n * (n + 1) // 2 if case.causal else n * n for n in lengths)


def _ragged_mask(case, query):
    ends = torch.tensor(ragged(case)[1:], device=query.device)
    item = torch.bucketize(torch.arange(case.q_len, device=query.device), ends, right=True)
    mask = item[:, None] == item
    return mask.tril() if case.causal else mask


OPTIONS = {
    "softcap": Option(lambda case, query: dict(softcap=SOFTCAP), None),
    "sinks": Option(lambda case, query: dict(sinks=torch.linspace(-1, 1, case.heads, device=query.device)), None),
    "alibi": Option(lambda case, query: dict(alibi_slopes=_slopes(case, query)), _alibi_mask),
    "window": Option(lambda case, query: dict(window_size=(case.extent - 1, 0)), _window_mask, _window_pairs),
    "lengths": Option(
        lambda case, query: dict(key_lengths=_key_lengths(case, query)),
        _lengths_mask,
        lambda case: case.q_len * sum(_lengths(case)) // case.batch,
    ),
    "ragged": Option(None, _ragged_mask, _ragged_pairs),  # by varlen_attention
}


def ours(case, query) -> Callable:
    """f(q, k, v, causal): attnjourney.attention with the case's option, or varlen_attention."""
    import attnjourney

    if case.option == "ragged":
        ends = torch.tensor(ragged(case), device=query.device)

        def packed(q, k, v, causal):
            rows = (x[0].transpose(0, 1) for x in (q, k, v))
            return attnjourney.varlen_attention(*rows, ends, ends, is_causal=causal).transpose(0, 1).unsqueeze(0)

        return packed
    options = OPTIONS[case.option].ours(case, query)
    return lambda q, k, v, causal: attnjourney.attention(q, k, v, is_causal=causal, **options)


def exact(case, query, key, value) -> torch.Tensor:
    """The reference of the first batch item's first heads, tensors (1, heads, length, dim) in float64."""
    from attnjourney import reference

    if case.option == "ragged":
        return reference.attention(query, key, value, _ragged_mask(case, query))
    options = OPTIONS[case.option].ours(case, query)
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            options[name] = options[name][: query.shape[1]].double()
    if "key_lengths" in options:
        options["key_lengths"] = options["key_lengths"][:1]
    return reference.attention(query, key, value, is_causal=case.causal, enable_gqa=True, **options)
