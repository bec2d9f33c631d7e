"""python -m benchmarks.prefixes: a step of sequences that begin alike, their prefix read by each and read once.

Both take turns and the best turn counts, in CPU time of one thread. 100 tokens of each sequence are its own; blocks of
64 tokens, heads of 128.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from attnjourney import PagedKVCache

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
OWN, DIM, BLOCK = 100, 128, 64


def measure(dtype: str, heads: int, kv_heads: int, batch: int, prefix: int, turns: int) -> tuple[float, float, int]:
    """Seconds of a step without and with shared_prefix, and bytes of the blocks."""
    kind = DTYPES[dtype]
    numbers = torch.bfloat16 if kind == torch.int8 else kind
    blocks = prefix // BLOCK + 3 * batch
    cache = PagedKVCache(batch, kv_heads, prefix + 2 * BLOCK, DIM, block_size=BLOCK, num_blocks=blocks, dtype=kind)
    key = torch.randn(batch, kv_heads, prefix, DIM, dtype=numbers)
    cache.append(key, key, torch.tensor([prefix] + [0] * (batch - 1)))
    cache.fork(0, list(range(1, batch)))
    cache.append(key[:, :, :OWN], key[:, :, :OWN])
    query = torch.randn(batch, heads, 1, DIM, dtype=numbers)
    found = cache.shared_prefixes()  # once a step, for all layers
    best = [float("inf")] * 2
    for turn in range(2 * turns + 2):
        start = time.process_time()
        cache.attend(query, shared_prefix=found if turn % 2 else False)
        if turn > 1:  # the first of each warms up
            best[turn % 2] = min(best[turn % 2], time.process_time() - start)
    return best[0], best[1], cache.held_nbytes


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__)
    p.add_argument("--dtype", choices=DTYPES, nargs="*", default=["bf16"])
    p.add_argument("--heads", default="32,8", help="query heads, key heads (%(default)s)")
    p.add_argument("--batch", type=int, nargs="*", default=[8, 32])
    p.add_argument("--prefix", type=int, nargs="*", default=[1024, 4096, 16384])
    p.add_argument("--turns", type=int, default=7)
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    heads, kv_heads = map(int, args.heads.split(","))
    shown = Table("dtype", "sequences", "prefix", "each ms", "once ms", "ratio", "MiB held")
    for dtype in args.dtype:
        for batch in args.batch:
            for prefix in args.prefix:
                each, once, held = measure(dtype, heads, kv_heads, batch, prefix, args.turns)
                row = (f"{1e3 * each:.2f}", f"{1e3 * once:.2f}", f"{each / once:.2f}", f"{held / 2**20:.0f}")
                shown.add_row(dtype, str(batch), str(prefix), *row)
    Console().print(shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
