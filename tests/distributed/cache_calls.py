"""What ranks do with a cache shared out by tokens: greedy generation beside one rank's."""

import torch

from attnjourney import distributed
from attnjourney.nn.cache import KVCache
from tests.distributed.dtensor_calls import numbers
from tests.distributed.ranks import groups

WORDS, DIM = 13, 8


class Model:
    """One layer: tokens to queries, keys, values, and results to the next token."""

    def __init__(self):
        self.words = numbers(0, WORDS, 16)
        self.weights = [numbers(i + 1, 16, heads * DIM) for i, heads in enumerate((4, 2, 2))]
        self.out = numbers(5, 4 * DIM, WORDS)
        self.sinks = numbers(6, 4)

    def heads(self, tokens):
        """(batch, N) -> query, key, value (batch, heads, N, DIM)."""
        return [(self.words[tokens] @ w).unflatten(-1, (-1, DIM)).transpose(1, 2) for w in self.weights]

    def next(self, out):
        return (out[:, :, -1].flatten(1) @ self.out).argmax(-1)


def generated(rank, size, order):
    """(tokens of all ranks, tokens of one, greatest difference of results, tokens of this rank's cache)."""
    group, model = groups[size], Model()
    options = dict(scale=0.2, softcap=3.0, sinks=model.sinks)
    prompt = torch.arange(14).view(2, 7) % WORDS
    shared = distributed.ShardedKVCache(2, 2, 20, DIM, group=group, dtype=torch.float64)
    alone = KVCache(2, 2, 20, DIM, dtype=torch.float64)
    q, k, v = model.heads(prompt)
    expected = alone.step(q, k, v, **options)
    ours = shared.prefill(*(distributed.shard(x, group, order) for x in (q, k, v)), order=order, **options)
    off = [(distributed.unshard(ours, group, order) - expected).abs().max()]
    last = model.next(expected)
    tokens = [[], []]
    for i in range(14):
        if i == 5:  # rejected tokens, another order of sequences
            for cache in (shared, alone):
                cache.truncate(torch.tensor([6, 10]))
                cache.reorder(torch.tensor([1, 0]))
        q, k, v = model.heads(last.unsqueeze(1))
        expected, ours = alone.step(q, k, v, **options), shared.step(q, k, v, **options)
        off.append((ours - expected).abs().max())
        last = model.next(expected)
        for found, out in zip(tokens, (ours, expected)):
            found.append(model.next(out).tolist())
    assert torch.equal(shared.lengths, alone.lengths)
    return tokens[0], tokens[1], max(off).item(), shared.local.lengths.tolist()


def refused(rank):
    """Errors of a full cache, of two tokens, of a prompt that comes second; zeros of an empty cache."""
    cache = distributed.ShardedKVCache(1, 1, 4, DIM, group=groups[2])
    q = torch.zeros(1, 1, 1, DIM)
    empty = cache.attend(q).abs().max().item()
    for _ in range(4):
        cache.step(q, q, q)
    two = torch.zeros(1, 1, 2, DIM)
    texts = []
    for call in (
        lambda: cache.step(q, q, q),
        lambda: cache.step(two, two, two),
        lambda: cache.prefill(q, q, q),
        lambda: cache.truncate(5),
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    return empty, texts
