"""The error of attention over numbers in e4m3 beside fp64 of the numbers before, on inputs with outliers:

    python -m benchmarks.fp8_error

prints the table of docs/operators/attention_fp8.md. Inputs as in FlashAttention-3 (arXiv 2407.08608): every number of
query, key and value is N(0, 1) + N(0, 100) * Bernoulli(0.001).
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = {"heads": 4, "length": 1024, "head_dim": 128}


def inputs(heads: int, length: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    """query, key and value, (1, heads, length, head_dim) in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(1, heads, length, head_dim, generator=generator, dtype=torch.float64)

    chosen = [torch.rand(1, heads, length, head_dim, generator=generator) < 0.001 for _ in range(3)]
    return [normal() + 10 * normal() * c for c in chosen]


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value


def quantized(x: list[Tensor], per: str, rotate: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Query, key (rotated or not) and value as numbers in e4m3 and scales."""
    import attnjourney

    signs = None
    if rotate:
        signs = attnjourney.hadamard_signs(x[0].shape[-1], generator=torch.Generator().manual_seed(1))
    return [attnjourney.quantize_fp8(t, per, signs=signs if i < 2 else None) for i, t in enumerate(x)]


def _ours(per: str, rotate: bool = False):
    def run(*x: Tensor) -> Tensor:
        import attnjourney

        (q, q_scale), (k, k_scale), (v, v_scale) = quantized(list(x), per, rotate)
        return attnjourney.attention_fp8(q, k, v, q_scale, k_scale, v_scale, out_dtype=torch.float16)

    return run


def _rounded_weights(per: str, rotate: bool = False):
    """With weights in e4m3 besides, 2^8 at a row's maximum, in plain PyTorch: what tensor cores of GPUs take."""

    def run(*x: Tensor) -> Tensor:
        from attnjourney.reference.attention_fp8 import dequantize_fp8

        q, k, v = (dequantize_fp8(t, s, torch.float64) for t, s in quantized(list(x), per, rotate))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = 256 * torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights.to(torch.float8_e4m3fn).double() @ v / weights.sum(-1, keepdim=True)).to(torch.float16)

    return run


def _in(dtype: torch.dtype):
    def run(*x: Tensor) -> Tensor:
        import attnjourney

        return attnjourney.attention(*(t.to(dtype) for t in x))

    return run


METHODS = {
    "float16": _in(torch.float16),
    "bfloat16": _in(torch.bfloat16),
    "a scale a tensor": _ours("tensor"),
    "a scale a head": _ours("head"),
    "a scale a block": _ours("block"),
    "a scale a tensor, rotated": _ours("tensor", True),
    "a scale a block, rotated": _ours("block", True),
    "a scale a tensor, weights in e4m3": _rounded_weights("tensor"),
    "a scale a block, weights in e4m3": _rounded_weights("block"),
    "a scale a block, rotated, weights in e4m3": _rounded_weights("block", True),
}
# FlashAttention-3's own, of a kernel whose weights are e4m3, in sizes of its own
PUBLISHED = {
    "a scale a tensor, weights in e4m3": "2.4e-2",
    "a scale a block, rotated, weights in e4m3": "9.1e-3",
}


def errors(**sizes: int) -> dict[str, float]:
    """Root mean square error of each method."""
    x = inputs(**{**SIZES, **sizes})
    wanted = exact(*x)
    return {name: (run(*x).double() - wanted).square().mean().sqrt().item() for name, run in METHODS.items()}


def rows(found: dict[str, float]) -> str:
    """The table of the documentation."""
    lines = ["| query, key, value | RMSE | FlashAttention-3 |", "|---|---:|---:|"]
    lines += [f"| {name} | {error:.1e} | {PUBLISHED.get(name, '')} |" for name, error in found.items()]
    return "\n".join(lines).replace("e-0", "e-")


if __name__ == "__main__":
    print(rows(errors()))
