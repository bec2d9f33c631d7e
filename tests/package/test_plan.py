"""How a call is shared out over many threads, simulated: they take the pieces of its plan from one queue."""

import heapq

import pytest
import torch

import attnjourney
from tests.support.testing import threads

HEAD_DIM = 64


def idle_share(costs, count):
    """Of `count` workers that take pieces of these costs in order, until all are done."""
    ends = [0.0] * count
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return 1 - sum(costs) / (count * max(ends))


def visible(first, rows, length, is_causal):
    """Pairs of these rows with keys; a vector of 8 rows costs what a whole one does."""
    rows = -(-rows // 8) * 8
    return rows * (first + rows / 2 if is_causal else length)


def forward_costs(plan, heads, length, is_causal):
    """Head by head, the last rows first; the last items in pieces, their last rows first too."""
    rows, cut = plan["rows_per_item"], plan["rows_per_cut_item"]
    blocks = -(-length // rows)
    costs = []
    for item in range(heads * blocks):
        first = (blocks - 1 - item % blocks) * rows
        end = min(length, first + rows)
        size = rows if item < plan["uncut_items"] else cut
        costs += [visible(i, min(size, end - i), length, is_causal) for i in reversed(range(first, end, size))]
    return costs


def backward_costs(plan, heads, length, is_causal):
    """Whole heads, then the parts of the others; key blocks are dealt to parts forth and back."""

    def of_keys(first, keys):
        return keys * (length - first - keys / 2 if is_causal else length)

    costs = [of_keys(0, length)] * plan["heads_whole"]
    for parts in plan["parts_of_cut_heads"]:
        rounds = max(2 if is_causal else 1, -(-length // (parts * plan["key_block"])))
        largest = min(plan["key_block"], -length // (parts * rounds) // 16 * -16)
        step = min(range(largest, max(16, largest // 2) - 1, -16), key=lambda s: -(-length // s // parts) * s)
        own = [0.0] * parts
        for index, first in enumerate(range(0, length, step)):
            seat = index % parts
            own[seat if index // parts % 2 == 0 else parts - 1 - seat] += of_keys(first, min(step, length - first))
        costs += own
    return costs


def plans(heads, length, is_causal):
    x = torch.zeros(HEAD_DIM).expand(1, heads, length, HEAD_DIM)
    return attnjourney.explain(x, x, x, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("count, length", [(64, 4096), (64, 8192), (12, 8192), (2, 2048)])
def test_few_threads_wait_for_others(count, length, is_causal):
    worst = {}
    with threads(count):
        for heads in range(1, 257, 1 if (count, length) == (64, 4096) else 5):
            plan = plans(heads, length, is_causal)
            assert plan["forward"]["threads"] == plan["backward"]["threads"] == count
            for which, costs in (("forward", forward_costs), ("backward", backward_costs)):
                idle = idle_share(costs(plan[which], heads, length, is_causal), count)
                worst[which] = max(worst.get(which, (0,)), (idle, heads))
    limit = 0.03 if count == 64 else 0.06
    assert worst["forward"][0] < limit and worst["backward"][0] < limit, worst


def test_one_thread_cuts_nothing():
    with threads(1):
        plan = plans(3, 4096, True)
    assert plan["forward"]["items"] == plan["forward"]["uncut_items"]
    assert plan["backward"]["parts_of_cut_heads"] == [] and plan["backward"]["heads_whole"] == 3
