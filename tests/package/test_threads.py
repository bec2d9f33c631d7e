"""Threads change nothing: any number of them, changed between calls, calls from several threads, after a fork."""

import os
import threading

import pytest
import torch

from tests.support.testing import DTYPES, attention_and_gradients, check_attention, random_tensor, threads

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_attn_mask")

# few heads on many threads, many heads, one row, long keys, grouped heads
SHAPES = {
    "one_head": ((1, 1, 300, 32), (1, 1, 300, 32)),
    "many_heads": ((2, 8, 64, 32), (2, 8, 64, 32)),
    "one_row": ((1, 2, 1, 64), (1, 2, 3000, 64)),
    "grouped": ((2, 8, 130, 32), (2, 2, 130, 32)),
    "more_queries": ((1, 1, 600, 32), (1, 1, 40, 32)),
    "length_31": ((1, 1, 31, 64), (1, 1, 31, 64)),
    "length_33": ((1, 1, 33, 64), (1, 1, 33, 64)),
    "2_items_4_heads": ((2, 4, 64, 64), (2, 4, 64, 64)),
}


def inputs(shape, dtype=torch.float32):
    q_shape, kv_shape = SHAPES[shape]
    return random_tensor(q_shape, dtype, 1), random_tensor(kv_shape, dtype, 2), random_tensor(kv_shape, dtype, 3)


def run(shape, dtype=torch.float32, mask=None, **options):
    q, k, v = inputs(shape, dtype)
    result = attention_and_gradients(q, k, v, mask, enable_gqa=True, **options)
    return [getattr(result, name) for name in NAMES if getattr(result, name) is not None]


def assert_same(first, second):
    for name, a, b in zip(NAMES, first, second):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_causal", (False, True))
def test_thread_count_changes_no_bit_of_the_forward(shape, dtype, is_causal):
    results = []
    for count in (1, 2, 3, 8):
        with threads(count):
            results.append(run(shape, dtype, is_causal=is_causal))
    for other in results[1:]:
        assert_same(results[0][:2], other[:2])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", (1, 2, 4))
def test_backward_is_deterministic_and_right_on_any_number_of_threads(shape, dtype, count):
    with threads(count):
        check_attention(*inputs(shape, dtype), is_causal=True, enable_gqa=True)
        mask = random_tensor((SHAPES[shape][0][-2], SHAPES[shape][1][-2]), dtype, 4)
        first = run(shape, dtype, mask)
        for _ in range(4):
            assert_same(first, run(shape, dtype, mask))


def test_thread_count_changed_between_calls():
    with threads(1):
        expected = {shape: run(shape) for shape in SHAPES}
    for count in (2, 1, 5, 3, 16, 1):
        with threads(count):
            for shape in SHAPES:
                assert_same(expected[shape][:2], run(shape)[:2])


def test_calls_from_several_python_threads():
    expected = {shape: run(shape) for shape in SHAPES}
    errors = []

    def work(offset):
        try:
            for i in range(12):
                shape = list(SHAPES)[(offset + i) % len(SHAPES)]
                assert_same(expected[shape], run(shape))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    pool = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not errors, errors[0]


def test_an_error_in_one_thread_leaves_the_others_alone():
    expected = run("many_heads")
    failures = []

    def wrong():
        for _ in range(20):
            with pytest.raises(ValueError):
                torch.ops.attnjourney.attention_forward(*[torch.ones(2)] * 3)
            failures.append(1)

    thread = threading.Thread(target=wrong)
    thread.start()
    for _ in range(10):
        assert_same(expected, run("many_heads"))
    thread.join()
    assert len(failures) == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork():
    # as a data loader's worker: the child has the calling thread only, and its own pool on demand
    with threads(1):  # OpenMP itself does not survive a fork of a process that has started its threads
        expected = run("many_heads")
        child = os.fork()
        if child == 0:
            ok = False
            try:
                again = run("many_heads")
                ok = all(torch.equal(a, b) for a, b in zip(expected, again))
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
