"""flash-attn's reference formula, as attention_ref of its tests has it."""

import math

import torch


def reference(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, first_key=0):
    """(S, H, D) of one sequence -> (S, H, D), (H, S); masks and ALiBi are aligned to the bottom right."""
    rows, keys = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    row, column = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (row - column).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = (column > row + right if right >= 0 else torch.zeros(rows, keys, dtype=torch.bool)) | (column < first_key)
    if left >= 0:
        hidden = hidden | (column < row - left)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row without keys is 0
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)  # (S, H, D), (H, S)
