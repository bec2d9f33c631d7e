"""Calls of token-sparse attention, and what their results are compared with, for its kernels on CUDA and in the
emulator."""

from dataclasses import dataclass

import torch

from attnjourney import reference
from attnjourney.reference.sparse_attention import visible_indices
from tests.support.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference, plain_run, random_tensor

# batch, query heads, key heads, q_len, kv_len, indices of a row, columns less than the kernel's, what differs
SHAPES = [
    (1, 4, 1, 5, 150, 70, 0, dict(is_causal=True, bottom_right=True)),
    (2, 4, 2, 3, 90, 33, 8, dict(per_head=True, wide=True, softcap=7.0, rows_first=True)),
    (2, 2, 1, 7, 100, 65, 24, dict(query_block_size=3, is_causal=True, sinks=2, repeats=True, bottom_right=True)),
    (2, 3, 3, 4, 40, 100, 0, dict(key_lengths=(40, 17), repeats=True, sinks=1)),
    (1, 20, 1, 4, 300, 250, 16, dict(query_block_size=4, is_causal=True, bottom_right=True, empty_tiles=True)),
    (3, 2, 1, 2, 70, 64, 8, dict(key_lengths=(0, 70, 33), wide=True, sinks=1, grad_lse=False, workspace=1)),
    (1, 1, 1, 70, 37, 9, 0, dict(is_causal=True, workspace=200000)),  # rows of indices in parts
    (1, 2, 1, 3, 1100, 300, 0, dict(query_block_size=2, per_head=True, want_key=False)),
]


def make_indices(batch, kv_heads, blocks, kv_len, count, *, per_head, wide, repeats, empty_tiles, seed=3):
    """Keys in no order, each once unless `repeats`, behind some that name none: -1 and less, and past the keys."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, *[kv_heads] * per_head, blocks)
    if repeats:
        indices = torch.randint(-1, max(2, kv_len // 2), (*shape, count), generator=generator)
    else:
        order = torch.rand(*shape, max(kv_len, count), generator=generator).argsort(-1)[..., :count]
        indices = order.where(order < kv_len, -1)
    indices[torch.rand(indices.shape, generator=generator) < 0.1] = -1
    if empty_tiles:
        indices[..., :64] = -5
    indices[..., -1:][torch.rand(*shape, 1, generator=generator) < 0.5] = kv_len + 3
    if blocks > 1:
        indices[:, ..., blocks // 2, :] = -1  # a row that names none
    return indices if wide else indices.int()


def times_seen(indices, query, key, **options):
    """(batch, q_heads, q_len, kv_len): how often each row sees each key."""
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    at, seen = visible_indices(indices, q_len, kv_len, **options)
    shape = (batch, kv_heads, q_len, at.shape[-1])
    count = torch.zeros(batch, kv_heads, q_len, kv_len, dtype=torch.float64)
    count.scatter_add_(-1, at.expand(shape), seen.expand(shape).double())
    return count.repeat_interleave(heads // kv_heads, 1)


@dataclass
class Case:
    """The tensors of a call. `rows`: the options that say what a row sees; `scores`: those of its scores; `how`: what
    is not of the operator."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    indices: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    sinks: torch.Tensor | None
    rows: dict
    scores: dict
    how: dict
    repeats: bool

    def expected(self):
        """out, lse and the gradients of query, key, value and sinks, in float64 by autograd."""
        leaves = [x.double().requires_grad_() for x in (self.query, self.key, self.value)]
        leaves += [] if self.sinks is None else [self.sinks.double().requires_grad_()]
        sinks = leaves[3] if self.sinks is not None else None
        out, lse = reference.sparse_attention(
            *leaves[:3], self.indices, sinks=sinks, enable_gqa=True, return_lse=True, **self.rows, **self.scores
        )
        loss = (out * self.grad_out.double()).sum()
        if self.grad_lse is not None:
            loss = loss + torch.where(lse.isfinite(), lse * self.grad_lse.double(), 0.0).sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    def compare(self, results):
        """Asserts the rule on what there is of results by name: out, lse, grad_query ..."""
        times = times_seen(self.indices, self.query, self.key, **self.rows)
        wide = torch.promote_types(self.query.dtype, torch.float32)
        inputs = (self.query, self.key, self.value, times.log().to(wide) if self.repeats else times > 0)
        plain, roundings = plain_run(
            inputs, self.grad_out, self.grad_lse, sinks=self.sinks, enable_gqa=True, **self.scores
        )
        if self.repeats:  # without the mask's gradient
            del plain[5], roundings[5]
        names = ["out", "lse", "grad_query", "grad_key", "grad_value"] + ["grad_sinks"] * (self.sinks is not None)
        for name, p, e, rounding in zip(names, plain, self.expected(), roundings, strict=True):
            if name in results:
                factor = GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR
                assert_close_to_reference(results[name], p, e, factor, name, rounding)
        assert set(results) <= set(names)


def make(shape, dtype, dim, v_dim, latent=False):
    """The call of one of SHAPES; latent: value is the front of key."""
    batch, heads, kv_heads, q_len, kv_len, count, less, options = shape
    options = dict(options)
    less = less if dim % 8 == 0 else less % 8
    dim, v_dim = dim - less, v_dim - less
    rows, bottom_right = options.pop("query_block_size", 1), options.pop("bottom_right", False)
    kinds = {x: options.pop(x, False) for x in ("per_head", "wide", "repeats", "empty_tiles")}
    key = random_tensor((batch, kv_heads, kv_len, dim), dtype, seed=1)
    wide = torch.promote_types(dtype, torch.float32)
    has_grad_lse, sinks = options.pop("grad_lse", True), options.pop("sinks", 0)
    lengths = options.pop("key_lengths", None)
    return Case(
        query=random_tensor((batch, heads, q_len, dim), dtype, seed=0),
        key=key,
        value=key[..., :v_dim] if latent else random_tensor((batch, kv_heads, kv_len, v_dim), dtype, seed=2),
        indices=make_indices(batch, kv_heads, -(-q_len // rows), kv_len, count, **kinds),
        grad_out=random_tensor((batch, heads, q_len, v_dim), dtype, seed=4),
        grad_lse=random_tensor((batch, heads, q_len), wide, seed=5) if has_grad_lse else None,
        sinks=random_tensor((batch, heads)[2 - sinks :], wide, seed=6) if sinks else None,
        rows=dict(
            query_block_size=rows,
            is_causal=options.pop("is_causal", False),
            causal_alignment="bottom_right" if bottom_right else "top_left",
            key_lengths=None if lengths is None else torch.tensor(lengths),
        ),
        scores=dict(scale=0.3, softcap=options.pop("softcap", 0.0)),
        how=options,
        repeats=kinds["repeats"],
    )
