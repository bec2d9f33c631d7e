"""python -m benchmarks.ranks: attention over a sequence on several ranks of one thread, beside one process of as many
threads, in one run and in turns: forward and backward, causal."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from attnjourney import attention
from attnjourney.distributed import bytes_sent, ring_attention, shard
from attnjourney.distributed.cost import SCHEMES

from .machine import cpu_model


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--shape", default="1,8,8,4096,64", help="batch, heads, kv heads, tokens, head_dim")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    p.add_argument("--order", default="zigzag", choices=("zigzag", "contiguous"))
    p.add_argument("--rounds", type=int, default=7, help="turns of each; the best counts")
    return p.parse_args(argv)


def step(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    for x in tensors:
        x.grad = None
    call(*tensors).sum().backward()


def run(rank: int, args: argparse.Namespace, meeting: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.ranks)
    measure(rank, args)
    dist.destroy_process_group()


def measure(rank: int, args: argparse.Namespace) -> None:
    """On each rank of the default group; rank 0 prints."""
    threads = torch.get_num_threads()
    batch, heads, kv_heads, tokens, dim = map(int, args.shape.split(","))
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    whole = [torch.randn(batch, n, tokens, dim, dtype=dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    shards = [shard(x.detach(), order=args.order).clone().requires_grad_() for x in whole]
    options = dict(is_causal=True, enable_gqa=True)
    schemes = [s for s in SCHEMES if s != "ulysses" or kv_heads % args.ranks == heads % args.ranks == 0]
    turns: dict[str, Callable[[], None]] = {"one process": partial(step, partial(attention, **options), whole)}
    for scheme in schemes:
        call = partial(ring_attention, order=args.order, scheme=scheme, **options)
        turns[scheme] = partial(step, call, shards)
    best = dict.fromkeys(turns, float("inf"))
    for turn in range(args.rounds + 1):  # the first one warms up
        for name, run in turns.items():
            alone = name == "one process"
            torch.set_num_threads(args.ranks if alone else 1)
            dist.barrier()
            start = time.perf_counter()
            if rank == 0 or not alone:
                run()
            dist.barrier()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    if rank == 0:
        shapes = [tuple(x.shape) for x in shards]

        def sent(scheme: str) -> int:
            ways = (False, True)
            place = dict(rank=0, size=args.ranks, is_causal=True, order=args.order)
            return sum(bytes_sent(scheme, *shapes, dtype, backward=b, **place) for b in ways)

        show(args, best, {scheme: sent(scheme) for scheme in schemes})
    torch.set_num_threads(threads)


def show(args: argparse.Namespace, best: dict[str, float], sent: dict[str, int]) -> None:
    table = Table(title=f"{cpu_model()}, {args.dtype} ({args.shape}), {args.order}, torch {torch.__version__}")
    for column in ("", "time", "speed beside one process", "MB sent by a rank"):
        table.add_column(column, justify="right" if column else "left")
    for name, seconds in best.items():
        text = f"one process, {args.ranks} threads" if name not in sent else f"{name}, {args.ranks} ranks of one thread"
        megabytes = f"{sent[name] / 1e6:.1f}" if name in sent else ""
        table.add_row(text, f"{seconds * 1e3:.1f} ms", f"{best['one process'] / seconds:.2f}", megabytes)
    Console().print(table)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (args, f"file://{folder}/ranks"), args.ranks)


if __name__ == "__main__":
    main()
