"""ring_mla and ring_linear_attention on two and four ranks against the whole in float64; what they send."""

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
