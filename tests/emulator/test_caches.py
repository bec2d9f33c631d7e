"""The caches' operators on CUDA, run on the CPU by tests/emulator, against plain lists of tokens: what fits, and what
becomes of what does not."""

from functools import partial

import pytest
import torch

from attnjourney.ops import kv_cache as cpu
from tests.emulator.faults import decode as faults_decode
from tests.emulator.host import build, kv_cache, run
from tests.emulator.host.noticed import is_noticed
from tests.support.testing import random_tensor

HEADS = 2


def make_state(batch, slots, dim, v_dim, blocks=0, max_blocks=0):
    """Caches full of different numbers, all of which count as junk."""
    sizes = ((blocks or batch, HEADS, slots, d) for d in (dim, v_dim))
    key, value = (random_tensor(size, torch.float16, 50 + i, outliers=False) for i, size in enumerate(sizes))
    return {
        "lengths": torch.zeros(batch, dtype=torch.int64),
        "block_table": torch.full((batch, max_blocks), -1, dtype=torch.int32),
        "block_refs": torch.zeros(blocks, dtype=torch.int32),
        "key_cache": key,
        "value_cache": value,
    }


def tokens(state, n, seed):
    batch = len(state["lengths"])
    names = ("key_cache", "value_cache")
    return [random_tensor((batch, HEADS, n, state[x].shape[3]), torch.float16, seed + i) for i, x in enumerate(names)]


def rows_to_write(state, counts, n):
    """(sequence, token given, position) of every new token, and the lengths after it."""
    after = state["lengths"].clamp(min=0)
    written = []
    for b in range(len(after)):
        count = min(max(0, counts[b]), n) if counts else n
        written += [(b, n - count + t, int(after[b]) + t) for t in range(count)]
        after[b] += count
    return written, after


def model_append(state, key, value, counts=None, ring=False):
    after = {name: x.clone() for name, x in state.items()}
    capacity = state["key_cache"].shape[2]
    written, after["lengths"] = rows_to_write(state, counts, key.shape[2])
    for b, t, at in written:
        if ring or at < capacity:
            after["key_cache"][b, :, at % capacity] = key[b, :, t]
            after["value_cache"][b, :, at % capacity] = value[b, :, t]
    return after


class Pool:
    """A paged cache as the CPU's operators change it, and what happens where they refuse."""

    def __init__(self, state):
        self.state = {name: x.clone() for name, x in state.items()}
        self.table, self.refs = self.state["block_table"], self.state["block_refs"]
        self.size, self.width = state["key_cache"].shape[2], state["block_table"].shape[1]

    def take(self):
        free = (self.refs == 0).nonzero().flatten().tolist()
        if not free:
            return -1
        self.refs[free[0]] = 1
        return free[0]

    def append(self, key, value, counts=None):
        written, lengths = rows_to_write(self.state, counts, key.shape[2])
        copies = []
        for b, length in enumerate(self.state["lengths"].tolist()):
            last, new = min(-(-length // self.size), self.width), min(-(-int(lengths[b]) // self.size), self.width)
            if lengths[b] > length and length % self.size and length < self.size * self.width:
                j = length // self.size
                shared = int(self.table[b, j])
                if shared >= 0 and self.refs[shared] > 1:
                    self.table[b, j] = block = self.take()
                    self.refs[shared] -= 1
                    if block >= 0:
                        copies.append((shared, block, length % self.size))
            for j in range(last, new):
                self.table[b, j] = self.take()
        for name, new in (("key_cache", key), ("value_cache", value)):
            cache = self.state[name]
            for shared, block, n in copies:
                cache[block, :, :n] = cache[shared, :, :n]
            for b, t, at in written:
                if at < self.size * self.width and self.table[b, at // self.size] >= 0:
                    cache[self.table[b, at // self.size], :, at % self.size] = new[b, :, t]
        self.state["lengths"] = lengths

    def truncate(self, wanted):
        for b, length in enumerate(self.state["lengths"].tolist()):
            new = min(max(0, wanted[b]), length)
            for j in range(-(-new // self.size), min(self.width, -(-length // self.size))):
                if self.table[b, j] >= 0:
                    self.refs[self.table[b, j]] -= 1
                self.table[b, j] = -1
            self.state["lengths"][b] = new

    def reorder(self, index):
        index = torch.tensor([i if 0 <= i < len(self.table) else b for b, i in enumerate(index)])
        for sign, rows in ((-1, self.table), (1, self.table[index])):
            for block in rows[rows >= 0].tolist():
                self.refs[block] += sign
        self.table[:] = self.table[index].clone()
        self.state["lengths"] = self.state["lengths"][index]


def assert_same(got, expected, label):
    for name, x in expected.items():
        raw = (y.contiguous().view(torch.int16) if y.dtype == torch.float16 else y for y in (got[name], x))
        assert torch.equal(*raw), f"{label}: {name}"


ORDERS = run.ORDER_NAMES


def check_dense(program, order):
    """Appends of every kind, one after another, until they overflow; then a truncation and a reordering."""
    for ring, unit, dim, v_dim in ((False, 2, 5, 3), (True, 16, 8, 16), (False, 16, 264, 8)):
        state = make_state(3, 9, dim, v_dim)
        for seed, (n, counts, parts) in enumerate(
            ((4, [4, 1, 0], 1), (1, None, 1), (5, [0, 5, 9], 2), (11, [11, 3, -2], 3), (1, None, 1))
        ):
            key, value = tokens(state, n, seed)
            how = dict(key=key, value=value, counts=counts, parts=parts, ring=ring, unit=unit, order=order)
            after = kv_cache.call(program, "append", state, **how)
            assert_same(after, model_append(state, key, value, counts, ring), f"append {n} {counts} {ring} {unit}")
            state = after
        expected = {name: x.clone() for name, x in state.items()}
        lengths = state["lengths"].tolist()
        wanted, lowest = [lengths[0] + 5, -3, 4], [0, 2, -9]
        expected["lengths"] = torch.tensor([lengths[0], 2, 4])
        after = kv_cache.call(program, "truncate", state, wanted=wanted, lowest=lowest, order=order)
        assert_same(after, expected, "truncate")
        for index, source in (([1, 2, 0], (1, 2, 0)), ([2, 3, -1], (2, 1, 2))):
            state = after
            expected = {name: x.clone() for name, x in state.items()}
            for b, i in enumerate(source):
                n = min(int(state["lengths"][i]), 9)
                for name in ("key_cache", "value_cache"):
                    expected[name][b, :, :n] = state[name][i, :, :n]
                expected["lengths"][b] = state["lengths"][i]
            after = kv_cache.call(program, "reorder", state, wanted=index, unit=unit, order=order, width=5)
            assert_same(after, expected, f"reorder {index}")

    state = make_state(2, 9, 5, 3)
    state["lengths"][:] = torch.tensor([-4, 2])
    key, value = tokens(state, 2, 1)
    after = kv_cache.call(program, "append", state, key=key, value=value, parts=2, order=order)
    assert_same(after, model_append(state, key, value), "append to a length below 0")


def check_latents(program, order):
    """A cache of one tensor."""
    state = make_state(2, 5, 12, 0)
    key, value = tokens(state, 3, 1)
    after = kv_cache.call(program, "append", state, key=key, value=value, counts=[3, 2], order=order)
    assert_same(after, model_append(state, key, value, [3, 2]), "latents")


PAGED = [  # verb, and what it takes: tokens and counts, new lengths, or batch_index
    ("append", 5, [5, 2, 0, 7]),
    ("reorder", [0, 0, 1, 0]),
    ("append", 1, None),  # shared blocks are copied, but by their last holder
    ("append", 3, [0, 3, 1, 3]),
    ("truncate", [4, 99, 0, -1]),
    ("reorder", [1, 1, 9, 0]),
    ("append", 2, [1, 2, 0, 2]),
    ("append", 9, [0, 9, 0, 9]),  # more than the pool has
    ("reorder", [3, 2, 1, 0]),
    ("append", 6, None),
    ("truncate", [2, 2, 2, 2]),
    ("append", 8, [8, 0, 8, 0]),  # past a sequence's capacity
    ("append", 40, [0, 40, 0, 1]),
    ("truncate", [0, 0, 0, 0]),
    ("append", 20, [2, 0, 12, 20]),
    ("reorder", [0, 0, 2, 3]),
    ("append", 1, [1, 1, 0, 0]),  # a shared block, and none free
]


def check_paged(program, order):
    for unit, dim, v_dim, blocks in ((2, 3, 5, 9), (16, 8, 8, 8240)):
        state = make_state(4, 4, dim, v_dim, blocks, 5)
        if blocks > 9:  # free ones in what two warps and two rounds of paged_plan look at
            state["block_refs"][:8190] = 1
            state["block_refs"][torch.tensor([30, 254, 255, 256])] = 0
        for seed, (verb, *given) in enumerate(PAGED):
            model = Pool(state)
            if verb == "append":
                key, value = tokens(state, given[0], seed)
                model.append(key, value, given[1])
                how = dict(key=key, value=value, counts=given[1], parts=1 + seed % 2)
            else:
                getattr(model, verb)(given[0])
                how = dict(wanted=given[0])
            state = kv_cache.call(program, f"paged_{verb}", state, order=order, unit=unit, width=2, **how)
            assert_same(state, model.state, f"{verb} {given}, step {seed}, {blocks} blocks")


AS_THE_CPU = [  # nothing that it refuses
    ("append", 5, [5, 2, 0, 4]),
    ("reorder", [0, 0, 1, 0]),
    ("append", 1, None),
    ("append", 3, [0, 3, 1, 2]),
    ("truncate", [4, 2, 0, 3]),
    ("append", 6, [6, 0, 5, 1]),
    ("reorder", [2, 2, 3, 2]),
    ("append", 2, None),
    ("truncate", [0, 1, 0, 6]),
    ("append", 7, [7, 3, 0, 2]),
]


def test_paged_caches_are_those_of_the_cpu():
    """What the checks of paged caches expect, step by step: the same blocks, too."""
    state = make_state(4, 4, 3, 5, 14, 5)
    for seed, (verb, *given) in enumerate(AS_THE_CPU):
        model, tables = Pool(state), [state[name] for name in ("lengths", "block_table", "block_refs")]
        if verb == "append":
            new = tokens(state, given[0], seed)
            model.append(*new, given[1])
            counts = None if given[1] is None else torch.tensor(given[1])
            cpu.paged_append(state["key_cache"], state["value_cache"], *tables, *new, counts=counts)
        elif verb == "truncate":
            model.truncate(given[0])
            cpu.paged_truncate(*tables, torch.tensor(given[0]), block_size=4)
        else:
            model.reorder(given[0])
            cpu.paged_reorder(*tables, torch.tensor(given[0]))
        assert_same(state, model.state, f"{verb} {given}, step {seed}")


def check_gather(program, order):
    """Keys in one piece: of blocks, one of them missing, and of a ring."""
    state = make_state(2, 4, 8, 16, 9, 3)
    state["block_table"][:] = torch.tensor([[4, 0, 7], [2, -1, 3]])
    state["lengths"][:] = torch.tensor([11, 10])
    for parts in (1, 3):
        *pieces, held, _ = kv_cache.call(program, "gather", state, order=order, unit=16, parts=parts)
        assert held.tolist() == [11, 10]
        for piece, name in zip(pieces, ("key_cache", "value_cache")):
            for b, n in enumerate(held.tolist()):
                for j in range(n):
                    block = int(state["block_table"][b, j // 4])
                    expected = state[name][block, :, j % 4] if block >= 0 else torch.zeros(HEADS, piece.shape[3])
                    assert torch.equal(piece[b, :, j], expected.half()), f"key {j} of sequence {b}"
    state = make_state(2, 7, 6, 6)
    state["lengths"][:] = torch.tensor([24, 5])
    *pieces, held, _ = kv_cache.call(program, "gather", state, order=order, ring=True)
    assert held.tolist() == [7, 5]
    for piece, name in zip(pieces, ("key_cache", "value_cache")):
        assert torch.equal(piece[0], state[name][0][:, [(17 + j) % 7 for j in range(7)]])
        assert torch.equal(piece[1, :, :5], state[name][1, :, :5])


def check_gather_in_a_window(program, order):
    """A prefix and a window, each with the keys beside it that a tile of the reader may hold: never noise."""
    near, prefix, left, length = 128, 3, 10, 500
    state = make_state(1, 512, 2, 2)
    state["lengths"][:] = length
    *pieces, _, _ = kv_cache.call(program, "gather", state, order=order, left=left, prefix=prefix)
    for piece, name in zip(pieces, ("key_cache", "value_cache")):
        for keys in (slice(prefix + near), slice(length - 1 - left - near, length)):
            assert torch.equal(piece[:, :, keys], state[name][:, :, keys])


def check_broken_table(program, order):
    """Numbers of no block: nothing outside the pool is read or written, and the other sequence is right."""
    state = make_state(2, 4, 3, 5, 9, 4)
    state["lengths"][:] = torch.tensor([6, 5])
    state["block_table"][:, :2] = torch.tensor([[9, 1 << 30], [3, 5]])
    state["block_refs"][[3, 5]] = 1
    key, value = tokens(state, 4, 1)
    after = kv_cache.call(program, "paged_append", state, key=key, value=value, order=order)
    assert after["lengths"].tolist() == [10, 9] and after["block_refs"].sum() == 4
    table = after["block_table"]
    for name, new in (("key_cache", key), ("value_cache", value)):
        for t in range(4):
            assert torch.equal(after[name][table[1, (5 + t) // 4], :, (5 + t) % 4], new[1, :, t])
    after = kv_cache.call(program, "paged_reorder", after, wanted=[1, 0], order=order, width=2)
    assert after["block_table"].max() < 9 and torch.equal(after["block_table"][0], table[1])
    after = kv_cache.call(program, "paged_truncate", after, wanted=[0, 0], order=order)
    assert (after["block_refs"] == 0).all() and (after["block_table"] == -1).all()


CHECKS = (check_dense, check_latents, check_paged, check_gather, check_gather_in_a_window, check_broken_table)


@pytest.fixture(scope="module")
def programs():
    build.build_all([kv_cache.PROGRAM, *((*kv_cache.PROGRAM, build.Fault(*f[1:])) for f in faults_decode.CACHES)])


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_verbs(programs, check):
    for order in ORDERS if check is check_paged else ORDERS[::2]:
        check(build.program(*kv_cache.PROGRAM), order)


@pytest.mark.parametrize("what,file,old,new", faults_decode.CACHES, ids=[f[0] for f in faults_decode.CACHES])
def test_faulty_kernel_is_found(programs, what, file, old, new):
    program = build.program(*kv_cache.PROGRAM, build.Fault(file, old, new))
    assert is_noticed([partial(check, program, order) for check in CHECKS for order in ORDERS[:3]], what)
