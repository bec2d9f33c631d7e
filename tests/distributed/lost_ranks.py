"""Four ranks of their own, one of which falls silent, and later dies in the middle of a ring."""

import multiprocessing
import os
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from attnjourney import distributed
from attnjourney.distributed import _transfer
from tests.distributed.ranks import SIZE, free_port

SILENCE = 3  # seconds: the groups' timeout
LOST = 2


def errors():
    """{rank: [(error's text, seconds it took), for silence and for death]} of the ranks that are left."""
    context = multiprocessing.get_context("forkserver")
    port, queue = free_port(), context.Queue()
    processes = [context.Process(target=_run, args=(rank, port, queue), daemon=True) for rank in range(SIZE)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=60) for _ in range(SIZE - 1))
    for process in processes:
        process.join(10)
    return found


def _run(rank, port, queue):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    groups = [dist.new_group(timeout=timedelta(seconds=SILENCE)) for _ in range(2)]
    q = torch.ones(1, 2, 8, 4)
    for group in groups:
        distributed.ring_attention(q, q, q, group=group, scheme="ring")
    texts = []
    for group, how in zip(groups, ("silent", "dead")):
        if rank == LOST:
            if how == "silent":
                time.sleep(SILENCE + 1)
                continue
            _die_in_the_ring()
        begin = time.perf_counter()
        try:
            distributed.ring_attention(q, q, q, group=group, scheme="ring")
            texts.append(("", 0.0))
        except RuntimeError as error:
            texts.append((str(error), time.perf_counter() - begin))
        time.sleep(max(0.0, begin + SILENCE + 1 - time.perf_counter()) if how == "silent" else 0)
    queue.put((rank, texts))
    queue.close()
    queue.join_thread()
    time.sleep(1)  # the others still read what this rank has sent
    os._exit(0)


def _die_in_the_ring():
    """What this rank does when it has agreed with the others and the first shard of the ring is due."""
    real = _transfer.Exchange

    def exchange(group, sends=(), receives=(), what="ring"):
        if what == "ring":
            os._exit(1)
        return real(group, sends, receives, what)

    mock.patch.object(_transfer, "Exchange", exchange).start()
