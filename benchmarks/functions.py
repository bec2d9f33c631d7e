"""Functions that are no single softmax attention: ours, plain PyTorch beside it, fp64, FLOP and bytes.

Tensors: query, key, value (batch, heads, length, dim). `extent` of a case: the window of `longformer`, the segment of
`infini`, the keys that a row of `sparse` names, or the `indexer` chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64  # rows: what FLOP are counted for
GLOBAL_TOKENS = 4


def _group(x: torch.Tensor, case) -> torch.Tensor:
    return x.repeat_interleave(case.heads // case.kv_heads, 1)


# ---- linear attention, causal


def _chunked(case, q, k, v, chunk: int = CHUNK):
    """Chunked causal linear attention as written by hand in PyTorch: all chunks at once, states by a running sum in
    float32."""
    length, dtype = q.shape[2], q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    padding = (0, 0, 0, -length % chunk)
    q, k = F.pad(F.elu(q) + 1, padding), F.pad(F.elu(k) + 1, padding)
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, F.pad(v, padding)))
    states, sums = (k.mT @ v).to(wide), k.sum(-2, dtype=wide)
    states, sums = ((x.cumsum(2) - x).to(dtype) for x in (states, sums))
    own = (q @ k.mT).tril()
    denominator = q @ sums.unsqueeze(-1) + own.sum(-1, keepdim=True) + 1e-6
    return ((q @ states + own @ v) / denominator).flatten(2, 3)[:, :, :length]


def _linear(case, q, k, v):
    import attnjourney

    return attnjourney.linear_attention(q, k, v)


def _exact_linear(case, q, k, v):
    from attnjourney import reference

    return reference.linear_attention(q, k, v)


def _linear_flops(case, which: str) -> int:
    """In chunks of CHUNK rows. Forward: Q S, K^T V, and half of Q K^T and P V. Backward, two sweeps: dN S^T, S; V T^T,
    K T, T; and half of P (in both), P K, Q K^T, P^T Q, A^T dN."""
    d, dv = case.head_dim, case.v_head_dim
    state, own = 2 * d * dv, CHUNK + 1
    row = 2 * state + own * (d + dv) if which == "forward" else 5 * state + own * (3 * d + 3 * dv)
    return case.batch * case.heads * case.q_len * row


# ---- the gated delta rule ("gated_delta") and Kimi delta attention ("kda")


def _gates(case, k):
    """Gates and betas, about what trained models have; with "kda" a gate a channel."""
    rows = torch.arange(case.q_len, dtype=torch.float32)
    gate = -0.05 - 0.5 * torch.sin(rows).square().expand(case.batch, case.heads, -1)
    beta = (0.5 + 0.4 * torch.cos(3 * rows)).expand(case.batch, case.heads, -1)
    if case.function == "kda":
        gate = gate[..., None] * torch.linspace(0.1, 2, case.head_dim)
    return gate, beta


def _delta(case, q, k, v):
    import attnjourney

    return attnjourney.gated_linear_attention(q, k, v, *_gates(case, k), update=case.function, qk_l2norm=True)


def _exact_delta(case, q, k, v):
    from attnjourney import reference

    return reference.gated_linear_attention(q, k, v, *_gates(case, k), update=case.function, qk_l2norm=True)


def _chunked_delta(case, q, k, v, chunk: int = CHUNK):
    """The gated delta rule in chunks as written by hand in PyTorch: within chunks all at once, states one after the
    other, in float32."""
    length, dtype = q.shape[2], q.dtype
    gate, beta = _gates(case, k)
    q, k, v = (x.float() for x in (q, k, v))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    rows, padding = -length % chunk, (0, 0, 0, -length % chunk)
    q, k, v = (F.pad(x, padding).unflatten(2, (-1, chunk)) for x in (q * case.head_dim**-0.5, k, v))
    gate, beta = (F.pad(x, (0, rows)).unflatten(2, (-1, chunk)) for x in (gate, beta))
    sums = gate.cumsum(-1)
    decays = (sums[..., :, None] - sums[..., None, :]).masked_fill(torch.ones(chunk, chunk).triu(1).bool(), -torch.inf)
    decays, reads, writes = decays.exp(), sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]
    system, own = beta[..., None] * (k @ k.mT) * decays, (q @ k.mT) * decays
    right = torch.cat((v, reads * k), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, held = solved.split((case.v_head_dim, case.head_dim), -1)
    state, outs = 0, []
    for i in range(q.shape[2]):
        error = new[:, :, i] - held[:, :, i] @ state if i else new[:, :, i]
        read = (reads * q)[:, :, i] @ state if i else 0
        outs.append(read + own[:, :, i] @ error)
        state = state * sums[:, :, i, -1].exp()[..., None, None] + (writes * k)[:, :, i].mT @ error
    return torch.cat(outs, 2)[:, :, :length].to(dtype)


def _delta_flops(case, which: str) -> int:
    """In chunks of CHUNK rows. Forward: three products with the state, and half of K K^T, Q K^T, the triangular system
    and P E. Backward: eight products with states, and half of those four again, P^T dO, the transposed system, dO E^T,
    Z E^T, and two products of each of these with queries or keys."""
    d, dv = case.head_dim, case.v_head_dim
    state, own = 2 * d * dv, CHUNK + 1
    row = 3 * state + own * (2 * d + 2 * dv) if which == "forward" else 8 * state + own * (6 * d + 5 * dv)
    return case.batch * case.heads * case.q_len * row


# ---- Infini-attention, segments of `extent` rows


def _beta(case, x):
    return torch.linspace(-1, 1, case.heads, dtype=x.dtype)


def _infini(case, q, k, v):
    import attnjourney

    return attnjourney.infini_attention(q, k, v, _beta(case, q), segment_length=case.extent)


def _infini_loop(case, q, k, v):
    """Munkhdalai et al. 2024, segment by segment."""
    gate = _beta(case, q).sigmoid()[:, None, None]
    memory, total, outs = 0, 0, []
    for rows in range(0, q.shape[2], case.extent):
        own = [x[:, :, rows : rows + case.extent] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*own, is_causal=True) * (1 - gate)
        seen, kept = F.elu(own[0]) + 1, F.elu(own[1]) + 1
        if rows:
            out = out + gate * (seen @ memory) / (seen @ total)
        memory = memory + kept.mT @ own[2]
        total = total + kept.sum(-2).unsqueeze(-1)
        outs.append(out)
    return torch.cat(outs, 2)


def _exact_infini(case, q, k, v):
    from attnjourney import reference

    return reference.infini_attention(q, k, v, _beta(case, q), segment_length=case.extent)


def _infini_flops(case, which: str) -> int:
    """Causal softmax inside segments, a read and a write of the memory for each row; backwards two and a half times."""
    d, dv = case.head_dim, case.v_head_dim
    pairs = (case.extent + 1) / 2
    row = 2 * pairs * (d + dv) + 4 * d * dv
    if which == "backward":
        row = 2 * pairs * (3 * d + 2 * dv) + 10 * d * dv
    return int(case.batch * case.heads * case.q_len * row)


# ---- Longformer, a window of `extent` to each side and GLOBAL_TOKENS global tokens


def _globals(case, x):
    mask = torch.zeros(case.batch, case.q_len, dtype=torch.bool, device=x.device)
    mask[:, :GLOBAL_TOKENS] = True
    return mask


def _longformer(case, q, k, v):
    import attnjourney

    return attnjourney.longformer_attention(q, k, v, window=case.extent, global_mask=_globals(case, q))


def _exact_longformer(case, q, k, v):
    from attnjourney import reference

    return reference.longformer_attention(q, k, v, window=case.extent, global_mask=_globals(case, q))


def longformer_pairs(case) -> int:
    """Local tokens see their window and the global tokens, each once; these see all."""
    n, w, g = case.q_len, case.extent, min(GLOBAL_TOKENS, case.q_len)
    window = sum(min(n - 1, i + w) - max(g, i - w) + 1 for i in range(g, n))
    return window + (n - g) * g + g * n


def _longformer_flops(case, which: str) -> int:
    d, dv = case.head_dim, case.v_head_dim
    pair = 2 * (d + dv) if which == "forward" else 2 * (3 * d + 2 * dv)
    return case.batch * case.heads * longformer_pairs(case) * pair


# ---- attention over numbers in e4m3 with a scale for each block; the error is that of quantising, too


def _in_e4m3(case, q, k, v):
    import attnjourney

    bytes_, scales = zip(*(attnjourney.quantize_fp8(x) for x in (q, k, v)))
    return *bytes_, *scales


def _fp8(case, *numbers):
    import attnjourney

    return attnjourney.attention_fp8(*numbers, is_causal=case.causal, enable_gqa=True, out_dtype=case.torch_dtype)


def _exact_fp8(case, q, k, v):
    from attnjourney import reference

    return reference.attention(q, k, v, is_causal=case.causal, enable_gqa=True)


def _fp8_flops(case, which: str) -> int:
    return 2 * case.batch * case.heads * case.pairs * (case.head_dim + case.v_head_dim)


# ---- token-sparse attention, of each row over `extent` keys that lie anywhere


@functools.lru_cache(maxsize=2)
def _indices(batch: int, rows: int, keys: int, extent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    order = [torch.rand(keys, generator=generator).topk(extent).indices.sort().values for _ in range(batch * rows)]
    return torch.stack(order).view(batch, rows, extent).int()


def _named(case) -> torch.Tensor:
    return _indices(case.batch, case.q_len, case.kv_len, case.extent)


def _sparse(case, q, k, v):
    import attnjourney

    return attnjourney.sparse_attention(q, k, v, _named(case), enable_gqa=True)


def _exact_sparse(case, q, k, v):
    from attnjourney import reference

    return reference.sparse_attention(q, k, v, _named(case)[: len(q)], enable_gqa=True)


def _gathered(case, q, k, v, rows: int = 8):
    """By SDPA over keys that are gathered for a few rows at a time."""
    outs = []
    for named in _named(case).long().split(rows, 1):
        count, first = named.shape[1], rows * len(outs)
        at = named.reshape(case.batch, 1, -1, 1).expand(-1, case.kv_heads, -1, -1)
        own = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])).unflatten(2, (count, -1)) for x in (k, v))
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in own)  # (batch * rows, kv_heads, extent, dim)
        query = q[:, :, first : first + count].transpose(1, 2).flatten(0, 1).unsqueeze(2)
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        outs.append(out.squeeze(2).unflatten(0, (case.batch, count)).transpose(1, 2))
    return torch.cat(outs, 2)


def _sparse_flops(case, which: str) -> int:
    d, dv = case.head_dim, case.v_head_dim
    return case.batch * case.heads * case.q_len * case.extent * 2 * (d + dv if which == "forward" else 3 * d + 2 * dv)


# ---- the indexer: `extent` keys of each row, by all its heads. Weights are numbers of query; the output is the sum of
# the scores chosen, for every head and column.


def _of_scores(case, scores):
    return scores.sum(-1)[:, None, :, None].expand(-1, case.heads, -1, case.v_head_dim)


def _indexer(case, q, k, v):
    import attnjourney

    return _of_scores(
        case,
        attnjourney.lightning_indexer(q, k[:, 0], q[..., 0], case.extent, is_causal=False, return_scores=True)[1],
    )


def _indexer_rows(case, q, k, v):
    """The scores of one row at a time, and the highest."""
    rows = [(F.relu(row @ k[:, 0].mT) * row[..., :1]).sum(1).topk(case.extent).values for row in q.unbind(2)]
    return _of_scores(case, torch.stack(rows, 1))


def _exact_indexer(case, q, k, v):
    return _indexer_rows(case, q, k, v) + 0 * v.sum()


def _indexer_flops(case, which: str) -> int:
    return 2 * case.batch * case.heads * case.pairs * case.head_dim


@dataclass(frozen=True)
class Function:
    ours: Callable  # (case, query, key, value) -> out
    plain: Callable | None  # the same in plain PyTorch, O(length) memory
    exact: Callable  # the same by its definition, for fp64
    flops: Callable  # (case, "forward" or "backward") -> int
    prepare: Callable | None = (
        None  # (case, query, key, value) -> what ours is called with; not measured, forward alone
    )


FUNCTIONS = {
    "linear": Function(_linear, _chunked, _exact_linear, _linear_flops),
    "gated_delta": Function(_delta, _chunked_delta, _exact_delta, _delta_flops),
    "kda": Function(_delta, None, _exact_delta, _delta_flops),
    "infini": Function(_infini, _infini_loop, _exact_infini, _infini_flops),
    "fp8": Function(_fp8, None, _exact_fp8, _fp8_flops, _in_e4m3),
    "longformer": Function(_longformer, None, _exact_longformer, _longformer_flops),
    "sparse": Function(_sparse, _gathered, _exact_sparse, _sparse_flops),
    "sparse_latents": Function(_sparse, _gathered, _exact_sparse, _sparse_flops),
    "indexer": Function(_indexer, _indexer_rows, _exact_indexer, _indexer_flops),
}
