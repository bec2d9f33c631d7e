"""Generation over a cache shared out by tokens: the tokens of one rank."""

import pytest

from tests.distributed import cache_calls as calls


@pytest.mark.parametrize("size, order", [(2, "contiguous"), (4, "zigzag")])
def test_tokens_are_those_of_one_rank(ranks, size, order):
    results = ranks.run(calls.generated, size, order)
    for ours, alone, off, _ in results:
        assert ours == alone and off < 1e-12
    held = [sum(of_rank) for *_, of_rank in results[:size]]
    assert sum(held) == (6 + 9) + (10 + 9) and max(held) - min(held) <= 4


def test_what_does_not_fit_is_refused(ranks):
    for empty, texts in ranks.run(calls.refused):
        assert empty == 0.0
        assert [text.split(":")[0] for text in texts] == ["key", "key", "key", "lengths"]
