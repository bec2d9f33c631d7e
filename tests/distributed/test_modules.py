"""Modules of attnjourney.nn under torch's own parallel wrappers against one rank in float64."""

import pytest

from tests.distributed import module_calls as calls


def check(results):
    for wrong in results:
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


@pytest.mark.parametrize("size", [2, 4])
def test_plans_share_heads_out(ranks, size):
    check(ranks.run(calls.in_heads, size))


@pytest.mark.parametrize(
    "size, order, scheme, in_heads",
    [
        (4, "zigzag", "ring", False),
        (2, "contiguous", "all_gather", False),
        (4, "contiguous", "ring", True),
        (4, "contiguous", "all_gather", True),
    ],
)
def test_modules_over_shards_of_the_sequence(ranks, size, order, scheme, in_heads):
    check(ranks.run(calls.in_context, size, order, scheme, in_heads))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_data_parallel_wrappers(ranks, how):
    check(ranks.run(calls.wrapped, how))


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_of_a_pipeline(ranks, schedule):
    check(ranks.run(calls.in_pipeline, schedule))


@pytest.mark.parametrize("trained_first", [False, True])
def test_no_call_runs_by_the_rule_of_another(ranks, trained_first):
    ranks.run(calls.by_the_rule_of_another_call, trained_first)


def test_what_has_no_rule_is_refused_by_name(ranks):
    expected = (
        "NotImplementedError: dropout_p: expected 0 where mha",
        "ValueError: key: expected the device mesh of query",
        "ValueError: value_cache: expected placements",
        "ValueError: ranks: expected a divisor of the 8 heads, got 3",
        "NotImplementedError: module: expected one of GroupedQueryAttention",
        "ValueError: module: expected one with a GroupedQueryAttention",
        "ValueError: order: expected 'contiguous'",
        "ValueError: module: expected a dropout of 0",
    )
    for texts in ranks.run(calls.refused):
        for text, begin in zip(texts, expected, strict=True):
            assert text.startswith(begin), text


@pytest.mark.parametrize("how", ["inference", "func", "compile"])
def test_shards_of_heads_under(ranks, how):
    assert all(ranks.run(calls.under, how))
