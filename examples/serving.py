"""Continuous batching: requests come and go through a queue, and every step of the model serves all that are there.

A step takes one token of each sequence that has read its prompt, and pieces of the prompts of others, as packed rows.
Keys and values lie in blocks of one pool, so the memory is that of the pool whatever comes: a prompt that begins like
an earlier one starts on that one's blocks, a finished or cancelled request gives its blocks back at once, and where the
pool runs out, what nobody uses any more is forgotten first, and then the youngest request starts again later.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from attnjourney import PagedKVCache, PagedLatentCache, prefix_keys


class Served(Protocol):
    """A model over caches that all have the same table of blocks, one for each of its layers."""

    caches: list[PagedKVCache] | list[PagedLatentCache]

    def logits(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
        """tokens and positions (total,), of sequence b from cu_seqlens[b] on; the logits (len(rows), V) of some."""
        ...


class Request:
    """A prompt and how many tokens are wanted after it. Iterating over it waits for each token."""

    def __init__(self, prompt: list[int], count: int, stop: int | None = None):
        self.prompt, self.count, self.stop = list(prompt), count, stop
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.cancelled = False
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done = threading.Event()

    def cancel(self) -> None:
        """No more tokens; what it holds is given back before the next step."""
        self.cancelled = True

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> list[int]:
        """All tokens; fewer, if it was cancelled."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request: no result after {timeout} s")
        if self.error is not None:
            raise self.error
        return self.tokens

    def __iter__(self) -> Iterator[int]:
        while (token := self._news.get()) is not None:
            yield token
        if self.error is not None:
            raise self.error

    def _add(self, token: int) -> bool:
        """Whether it was the last."""
        self.tokens.append(token)
        self._news.put(token)
        return len(self.tokens) == self.count or token == self.stop

    def _end(self, error: BaseException | None = None) -> None:
        self.error = error
        self._news.put(None)
        self._done.set()


class Sequence:
    """A request on a row of the caches: its prompt with what has been generated, of which `read` tokens are cached."""

    def __init__(self, request: Request, row: int, read: int):
        self.request, self.row, self.read = request, row, read
        self.tokens = request.prompt + request.tokens

    @property
    def left(self) -> int:
        return len(self.tokens) - self.read


class Engine:
    """Serves requests in the order in which they come, as many at once as there are rows and blocks.

    Args:
        model: its caches' batch is how many sequences run at once, their blocks are all the memory there is.
        rows: tokens of a step, at most: one for each running sequence, the rest for pieces of prompts.
        share: whether prompts start on the blocks of earlier ones that begin alike, and these are read once a step.
    """

    def __init__(self, model: Served, rows: int = 256, share: bool = True):
        self.model, self.share = model, share
        cache = model.caches[0]
        self.batch, self.block_size, self.blocks = len(cache.lengths), cache.block_size, len(cache.block_refs)
        self.capacity = min(cache.capacity, self.blocks * self.block_size)
        if rows < self.batch:
            raise ValueError(f"rows: expected at least {self.batch}, one for each sequence, got {rows}")
        self.rows = rows
        self.incoming: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []  # in the order in which they were admitted
        self.steps = self.preempted = self.adopted = 0

    def submit(self, prompt: list[int], count: int, stop: int | None = None) -> Request:
        """From any thread."""
        if not prompt:
            raise ValueError("prompt: expected at least one token, got none")
        if count < 1 or len(prompt) + count > self.capacity:
            raise ValueError(
                f"count: expected from 1 to {self.capacity - len(prompt)} tokens after a prompt of {len(prompt)}, "
                f"as there is room for {self.capacity}, got {count}"
            )
        request = Request(prompt, count, stop)
        self.incoming.put(request)
        return request

    def run(self) -> None:
        """Until there is nothing left to do."""
        while self.step():
            pass

    def serve(self, stop: threading.Event, pause: float = 0.01) -> None:
        """Until `stop` is set; to be run in a thread of its own."""
        while not stop.is_set():
            if not self.step():
                stop.wait(pause)

    @torch.no_grad()
    def step(self) -> bool:
        """One call of the model; False if nobody wants anything."""
        try:
            self._drop_cancelled()
            self._admit()
            batch = self._plan()
            if batch:
                self._forward(batch)
            return bool(self.running or self.waiting or not self.incoming.empty())
        except BaseException as error:
            for request in [s.request for s in self.running] + list(self.waiting):
                request._end(error)
            self.running, self.waiting = [], deque()
            for cache in self.model.caches:
                cache.reset()
            raise

    def _drop_cancelled(self) -> None:
        while not self.incoming.empty():
            self.waiting.append(self.incoming.get())
        for request in [r for r in self.waiting if r.cancelled]:
            self.waiting.remove(request)
            request._end()
        for sequence in [s for s in self.running if s.request.cancelled]:
            self._leave(sequence)
            sequence.request._end()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch:
            request = self.waiting[0]
            row = min(set(range(self.batch)) - {s.row for s in self.running})
            sequence = Sequence(request, row, 0)
            if self.share:  # its last token has to be computed in any case
                keys = prefix_keys(sequence.tokens[:-1], self.block_size)
                sequence.read = [cache.adopt(row, keys) for cache in self.model.caches][0]
            promised = sum(self._more_blocks(s, s.left) for s in self.running)
            if not self._make_room(promised + self._more_blocks(sequence, sequence.left)):
                self._free(row)
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self.adopted += sequence.read

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Which sequence goes on with how many tokens; there are blocks for all of them."""
        while True:
            batch = [(s, 1) for s in self.running if s.left == 1]
            rest = self.rows - len(batch)
            for sequence in self.running:
                count = min(sequence.left, rest)
                if sequence.left > 1 and count > 0:
                    batch.append((sequence, count))
                    rest -= count
            if self._make_room(sum(self._more_blocks(s, count) for s, count in batch)):
                return batch
            youngest = self.running[-1]
            self._leave(youngest)
            self.waiting.appendleft(youngest.request)
            self.preempted += 1

    def _more_blocks(self, sequence: Sequence, count: int) -> int:
        return -(-(sequence.read + count) // self.block_size) - -(-sequence.read // self.block_size)

    def _make_room(self, blocks: int) -> bool:
        """Whether so many are free, if need be after forgetting prefixes."""
        missing = blocks - self.model.caches[0].free_blocks
        if missing > 0:
            for cache in self.model.caches:
                cache.evict(missing)
            missing = blocks - self.model.caches[0].free_blocks
        return missing <= 0

    def _forward(self, batch: list[tuple[Sequence, int]]) -> None:
        batch = sorted(batch, key=lambda item: item[0].row)
        counts, tokens, positions, ends, finished = [0] * self.batch, [], [], [], []
        for sequence, count in batch:
            begin = sequence.read
            counts[sequence.row], sequence.read = count, begin + count
            tokens += sequence.tokens[begin : sequence.read]
            positions += range(begin, sequence.read)
            if not sequence.left:
                finished.append(sequence)
                ends.append(len(tokens) - 1)
        cu_seqlens = torch.tensor([0, *counts]).cumsum(0)
        rows = torch.tensor(ends, dtype=torch.int64)
        logits = self.model.logits(torch.tensor(tokens), torch.tensor(positions), cu_seqlens, rows)
        self.steps += 1
        for sequence, token in zip(finished, logits.argmax(-1).tolist()):
            if self.share and not sequence.request.tokens:
                self._publish(sequence)
            sequence.tokens.append(token)
            if sequence.request._add(token):
                if self.share:
                    self._publish(sequence)
                self._leave(sequence)
                sequence.request._end()

    def _publish(self, sequence: Sequence) -> None:
        keys = prefix_keys(sequence.tokens[: sequence.read], self.block_size)
        for cache in self.model.caches:
            cache.publish(sequence.row, keys)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence.row)

    def _free(self, row: int) -> None:
        for cache in self.model.caches:
            cache.free(row)
