"""Spoilt calls of every operator (tests/support/fuzz.py): those that once failed, and some of each operator."""

import json
from collections import Counter

import pytest

from tests.support.direct_calls import covered
from tests.support.fuzz import FAILED, attempt, line_of

ONCE_FAILED = [json.loads(line) for line in FAILED.read_text().splitlines()]


@pytest.mark.parametrize("line", ONCE_FAILED, ids=lambda line: f"{line[0]}-{line[1]}")
def test_what_once_failed(line):
    attempt(line, Counter())


def test_some_of_each_operator():
    """The same calls every time; some give results, some are refused, and every operator is among them."""
    outcomes, lines = Counter(), [line_of(seed) for seed in range(600)]
    for line in lines:
        attempt(line, outcomes)
    assert {line[0] for line in lines} == set(covered())
    assert min(outcomes[kind] for kind in ("results", "ValueError", "RuntimeError", "TypeError")) > 0
