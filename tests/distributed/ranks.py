"""Four processes of gloo on this machine, and what they are asked to do; groups of two are halves of the four."""

import multiprocessing
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

SIZE = 4
TIMEOUT = 60  # seconds


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Ranks:
    """All ranks run what they are given; results come back in the order of ranks, exceptions as such."""

    def __init__(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch._dynamo", "tests.distributed.module_calls", "tests.support.options_cases"]
        )
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args, **kwargs):
        """function(rank, *args, **kwargs) on every rank; the first exception is raised."""
        results = self.outcomes(function, *args, **kwargs)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def outcomes(self, function, *args, **kwargs):
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        return [pipe.recv() for pipe in self.pipes]

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(TIMEOUT)


def _serve(rank, port, pipe):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=TIMEOUT),
    )
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups.update({2: halves[rank // 2], SIZE: None, "across": across[rank % 2]})
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            pipe.send(function(rank, *args, **kwargs))
        except Exception as error:
            pipe.send(error)


groups = {}  # of a rank: by size
