"""The rings of layers on two and four ranks against the whole in float64; what they send."""

import pytest

from tests.distributed import layer_calls as calls
from tests.support.testing import pairs, row_id

MLA = pairs(
    size=(4, 2),
    order=("contiguous", "zigzag"),
    scheme=("ring", "all_gather"),
    is_causal=(True, False),
    low_rank=(True, False),
    with_rope=(True, False),
    length=(calls.SEQ, 13),
)
LINEAR = pairs(
    is_causal=(True, False),
    feature_map=("elu+1", "relu", "identity"),
    normalize=(True, False),
    with_state=(True, False),
    padded=(True, False),
    lengths=((4, 4, 4, 4), (5, 0, 1, 3)),
)


INFINI = pairs(
    update=("linear", "delta"),
    truncate=(None, 1, 3),
    with_memory=(True, False),
    with_rope=(True, False),
    lengths=((4, 4, 4, 4), (6, 0, 2, 1), (2, 3, 0, 0)),
)


@pytest.mark.parametrize("case", MLA, ids=row_id)
def test_mla(ranks, case):
    assert ranks.run(calls.mla, **case) == [[]] * 4


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_mla_sends_latents(ranks, scheme):
    for of_rank in ranks.run(calls.mla_bytes, 4, scheme):
        for sent, expected in of_rank:
            assert sent == expected


@pytest.mark.parametrize("case", LINEAR, ids=row_id)
def test_linear_attention(ranks, case):
    if case["feature_map"] == "identity" and case["normalize"]:
        case = {**case, "feature_map": "elu+1"}  # sums near 0 magnify rounding
    assert ranks.run(calls.linear, 4, **case) == [[]] * 4


def test_linear_attention_sends_states(ranks):
    for sent, expected in ranks.run(calls.linear_bytes, 4):
        assert sent == expected


def test_linear_attention_names_what_differs(ranks):
    for text in ranks.run(calls.linear_differs):
        assert text.startswith("ValueError: query: expected the same on every rank"), text


@pytest.mark.parametrize("case", INFINI, ids=row_id)
def test_infini_attention(ranks, case):
    assert ranks.run(calls.infini, 4, **case) == [[]] * 4


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_infini_attention_sends_memories(ranks, update):
    for sent, expected in ranks.run(calls.infini_bytes, 4, update):
        assert sent == expected


def test_infini_attention_wants_whole_segments(ranks):
    for text in ranks.run(calls.infini_in_part):
        assert "whole segments of 2 rows" in text, text
