"""python -m tools.gpu_calls: a small call of every kind of kernel, to load them and to run them under a sanitizer."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

import attnjourney


def numbers(*sizes: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    return [torch.randn(size, **options) for size in sizes]


def attention(device: str, dim: int, dtype: torch.dtype) -> None:
    own: dict[str, Any] = dict(device=device, dtype=dtype)
    q, k, v = numbers(*((1, h, 150, dim) for h in (2, 1, 1)), requires_grad=True, **own)
    lengths, bias = torch.tensor([130], device=device), torch.randn(150, 150, **own)
    for options in (
        {}, {"is_causal": True}, {"window_size": (40, 3), "key_lengths": lengths},
        {"attn_mask": bias > 0, "dropout_p": 0.1}, {"attn_mask": bias, "softcap": 5.0},
    ):  # fmt: skip
        attnjourney.attention(q, k, v, enable_gqa=True, **options).sum().backward()
    blocks = attnjourney.BlockMask.from_function(lambda b, h, i, j: (i // 16 + j // 16) % 3 > i % 2, 1, 1, 150, 150, 16)
    attnjourney.attention(q, k, v, blocks.to(device), enable_gqa=True).sum().backward()
    attnjourney.attention_weights(q, k, blocks.to(device), enable_gqa=True)


def caches(device: str, dim: int, dtype: torch.dtype) -> None:
    own: dict[str, Any] = dict(device=device, dtype=dtype)
    q, k, v = numbers(*((1, h, 150, dim) for h in (2, 1, 1)), **own)
    cache = attnjourney.PagedKVCache(1, 1, 200, dim, block_size=16, **own)
    for n in (149, 1):
        cache.step(q[:, :, :n], k[:, :, :n], v[:, :, :n])
    query, latent, weight = numbers((1, 40, 1, 192), (1, 150, 576), (10240, 512), **own)
    attnjourney.mla_decode(attnjourney.rope(query), latent, torch.tensor([130], device=device), weight)


def linear(device: str, dtype: torch.dtype) -> None:
    q, k, v = numbers(*((1, h, 600, 40) for h in (2, 1, 1)), device=device, dtype=dtype, requires_grad=True)
    attnjourney.linear_attention(q, k, v).sum().backward()
    attnjourney.linear_attention(q, k, v, is_causal=False, normalize=False).sum().backward()


def gated(device: str, dtype: torch.dtype) -> None:
    own: dict[str, Any] = dict(device=device, dtype=dtype, requires_grad=True)
    q, k, v, gate, beta = numbers((1, 1, 200, 40), (1, 1, 200, 40), *((1, 2, 200, n) for n in (40, 40, 1)), **own)
    for update, gates in (("gated_delta", gate[..., 0]), ("kda", gate)):
        options: dict[str, Any] = dict(update=update, qk_l2norm=True)
        attnjourney.gated_linear_attention(q, k, v, -gates.exp(), beta[..., 0].sigmoid(), **options).sum().backward()
        row = [x[:, :, :1] for x in (q, k, v, -gates.exp(), beta[..., 0].sigmoid())]
        attnjourney.gated_linear_attention(*row, **options)


def everything(device: str) -> None:
    for dim, dtype in ((64, torch.bfloat16), (128, torch.float16), (64, torch.float32), (20, torch.float64)):
        attention(device, dim, dtype)
        with torch.no_grad():
            caches(device, dim, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        linear(device, dtype)
        gated(device, dtype)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m tools.gpu_calls", description=__doc__)
    p.add_argument("--device", default="cuda")
    p.add_argument("--rounds", type=int, default=1, help="the first one loads the kernels")
    args = p.parse_args(argv)
    for number in range(args.rounds):
        begin = time.perf_counter()
        everything(args.device)
        if args.device == "cuda":
            torch.cuda.synchronize()
        print(f"round {number + 1}: {time.perf_counter() - begin:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
