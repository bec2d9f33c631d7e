"""ring_attention on two and four ranks against the fp64 reference of the whole, by the rule of tests/support."""

import pytest
import torch

from attnjourney import distributed
from tests.distributed import calls, lost_ranks
from tests.support import options_cases
from tests.support.testing import pairs, row_id

OPTIONS = (
    ("causal",),
    ("window", "softcap"),
    ("left", "sinks"),
    ("prefix", "alibi"),
    ("key_lengths", "scale"),
    ("causal", "alibi_per_item", "sinks"),
    ("window", "key_lengths", "alibi"),
    ("sinks", "large"),
    ("causal", "alibi", "large"),
)
CASES = pairs(
    options=OPTIONS,
    scheme=("ring", "all_gather", "ulysses"),
    order=("contiguous", "zigzag"),
    dtype=(torch.float64, torch.float32, torch.bfloat16),
    size=(4, 2),
)


def checked(ranks, size, options, dtype, **call):
    results = ranks.run(calls.whole_call, size, options, dtype, **call)
    query, key, value, arguments = calls.make(options, dtype, **call.get("sizes", {}))
    if "blocks" in options:
        arguments["attn_mask"] = arguments["attn_mask"].to_dense()
    for results_of_rank, _ in results:
        for name, x in results_of_rank.items():
            assert torch.equal(x, results[0][0][name]), f"{name} differs between ranks"
    options_cases.compare(*results[0], (query, key, value), arguments)
    return results[0][0]


@pytest.mark.parametrize("case", CASES, ids=row_id)
def test_values_and_gradients(ranks, case):
    checked(ranks, **case)


@pytest.mark.parametrize(
    "case",
    pairs(
        options=(("dropout", "causal", "alibi"), ("dropout", "window", "bool_mask"), ("dropout", "prefix", "sinks")),
        scheme=("ring", "all_gather", "ulysses", "auto"),
        order=("contiguous", "zigzag"),
        dtype=(torch.float64, torch.float32, torch.bfloat16),
        size=(4, 2),
        sizes=(dict(), dict(q_len=29, kv_len=29)),
    ),
    ids=row_id,
)
def test_dropout_has_the_bits_of_one_rank(ranks, case):
    checked(ranks, **case)


@pytest.mark.parametrize(
    "case",
    pairs(
        options=(("causal", "alibi"), ("left", "sinks"), ("prefix", "key_lengths"), ("window", "mask"), ("dropout",)),
        scheme=("ring", "all_gather", "ulysses", "auto"),
        order=("contiguous", "zigzag"),
        dtype=(torch.float64, torch.bfloat16),
        size=(4, 2),
        sizes=(dict(q_len=13, kv_len=13), dict(q_len=21, kv_len=7), dict(q_len=2, kv_len=9)),
    ),
    ids=row_id,
)
def test_uneven_and_empty_shards(ranks, case):
    checked(ranks, **case)


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("lengths", [(0, 5, 1, 7), (4, 0, 9, 0)], ids=str)
def test_contiguous_shards_of_any_lengths(ranks, scheme, lengths):
    for options in (("causal", "alibi", "sinks"), ("mask",)):
        sizes = dict(q_len=13, kv_len=13)
        checked(ranks, 4, options, torch.float64, scheme=scheme, lengths=lengths, sizes=sizes)


@pytest.mark.parametrize(
    "case",
    pairs(
        options=(
            ("blocks", "causal"),
            ("blocks", "window", "sinks"),
            ("blocks", "prefix", "dropout"),
            ("blocks", "alibi"),
        ),
        scheme=("ring", "all_gather", "ulysses", "auto"),
        order=("contiguous", "zigzag"),
        dtype=(torch.float64, torch.float32, torch.bfloat16),
        size=(4, 2),
        sizes=(dict(q_len=128, kv_len=128), dict(q_len=127, kv_len=127), dict(q_len=128, kv_len=256)),
    ),
    ids=row_id,
)
def test_masks_of_blocks(ranks, case):
    checked(ranks, **case)


@pytest.mark.parametrize(
    "case",
    pairs(
        options=(
            ("causal", "alibi_per_item", "sinks"),
            ("window", "key_lengths"),
            (),
            ("dropout", "causal"),
            ("blocks",),
            ("mask", "causal"),
            ("row_mask",),
        ),
        scheme=("ring", "all_gather", "auto"),
        order=("zigzag", "contiguous"),
        dtype=(torch.float64, torch.bfloat16),
    ),
    ids=row_id,
)
def test_rings_of_ranks_that_share_heads(ranks, case):
    sizes = dict(q_len=128, kv_len=128) if "blocks" in case["options"] else {}
    checked(ranks, 4, by_heads=True, sizes=sizes, **case)


@pytest.mark.parametrize(
    "case",
    pairs(
        options=(
            ("mask", "causal"),
            ("row_mask", "alibi", "sinks"),
            ("column_mask", "window"),
            ("bool_mask", "alibi_per_item", "softcap"),
            ("bool_mask", "key_lengths"),
        ),
        scheme=("ring", "all_gather", "ulysses", "auto"),
        order=("zigzag", "contiguous"),
        dtype=(torch.float64, torch.float32, torch.bfloat16),
        size=(4, 2),
    ),
    ids=row_id,
)
def test_masks(ranks, case):
    checked(ranks, **case)


@pytest.mark.parametrize(
    "case",
    pairs(
        size=(4, 2),
        order=("zigzag", "contiguous"),
        scheme=("ring", "all_gather", "auto"),
        by_heads=(False, True),
        options=((), ("softcap",), ("alibi",), ("dropout",)),
        masks=(dict(is_causal=True), {}, dict(is_causal=True, window_size=(2, -1), prefix_length=2)),
    ),
    ids=row_id,
)
def test_packed_sequences(ranks, case):
    assert ranks.run(calls.packed, **case) == [[]] * 4


def test_packed_sequences_in_uneven_shards(ranks):
    for order in ("contiguous", "zigzag"):
        found = ranks.run(calls.packed, 4, order, "ring", False, ("dropout",), dict(is_causal=True), length=31)
        assert found == [[]] * 4


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_float64_is_exact_and_keys_may_be_more_than_rows(ranks, scheme):
    sizes = dict(q_len=8, kv_len=24)
    actual = checked(ranks, 4, ("sinks",), torch.float64, scheme=scheme, order="zigzag", sizes=sizes)
    query, key, value, arguments = calls.make(("sinks",), torch.float64, **sizes)
    exact, _ = options_cases.run(options_cases.attnjourney.attention, (query, key, value), arguments)
    for name, x in actual.items():
        assert (x - exact[name]).abs().max() < 1e-10, name


def test_one_key_head_for_all(ranks):
    checked(ranks, 2, ("causal",), torch.float32, scheme="ring", sizes=dict(kv_heads=1))


def test_the_check_sees_ranks_that_stay_alone(ranks):
    results = ranks.run(calls.whole_call, 2, (), torch.float64, alone=True)
    query, key, value, arguments = calls.make((), torch.float64)
    with pytest.raises(AssertionError):
        options_cases.compare(*results[0], (query, key, value), arguments)


@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
def test_autocast_is_that_of_attention(ranks, scheme):
    assert all(ranks.run(calls.under_autocast, scheme))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("masks", [{}, dict(is_causal=True), dict(window_size=(3, 2))], ids=str)
def test_bytes_are_those_of_the_formula(ranks, scheme, masks):
    for of_rank in ranks.run(calls.bytes_of, 4, torch.bfloat16, scheme, **masks):
        for sent, expected in of_rank:
            assert sent == expected


@pytest.mark.parametrize(
    "odd, name",
    [
        (dict(shape=(2, 4, 8, 4)), "query"),
        (dict(dtype=torch.bfloat16), "query"),
        (dict(is_causal=False), "is_causal"),
        (dict(softcap=2.0), "softcap"),
        (dict(cu_seqlens=torch.tensor([0, 3])), "cu_seqlens"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_told_before_anything_is_sent(ranks, odd, name):
    for text, sent, after in ranks.run(calls.differing, 2, odd):
        assert text.startswith(f"ValueError: {name}: ") and "on rank 0" in text and "on rank 2" in text, text
        assert sent == 24 * 3 and after


def test_one_rank_that_refuses_ends_the_others(ranks):
    for rank, (text, _, after) in enumerate(ranks.run(calls.differing, 1, dict(dropout_p=1.5))):
        own = "ValueError: dropout_p: "
        assert text.startswith(own if rank == 1 else "RuntimeError: ring_attention: rank 1") and "dropout_p" in text
        assert after


def test_a_lost_rank_is_named_within_the_timeout(ranks):  # ranks: for their forkserver
    found = lost_ranks.errors()
    assert sorted(found) == [0, 1, 3]
    for rank, ((silent, seconds), (dead, _)) in found.items():
        assert silent.startswith("all_gather: ") and f"rank {lost_ranks.LOST} failed on rank {rank}" in silent, silent
        assert seconds < lost_ranks.SILENCE + 2
        assert dead.startswith("ring: ") and f"on rank {rank} of the group" in dead, dead
        if rank == lost_ranks.LOST + 1:
            assert f"receiving from rank {lost_ranks.LOST} failed" in dead, dead


def test_the_rule_of_auto():
    shape, small = (1, 8, 4096, 64), (1, 8, 8, 64)

    def chosen(query, key, size, **masks):
        return distributed.choose_scheme(query, key, key, torch.float32, size, **masks)

    assert chosen(small, small, 4) == "all_gather"
    assert chosen(shape, shape, 4) == "ulysses"
    assert chosen(shape, (1, 2, 4096, 64), 4) == "ring"  # fewer key heads than ranks
    assert chosen(shape, shape, 4, is_causal=True, window_size=(512, 0)) == "ring"


def test_benchmark_of_ranks(ranks):
    """python -m benchmarks.ranks: every scheme beside one process."""
    printed = ranks.run(calls.benchmark, ["--ranks", "4", "--shape", "1,4,4,64,16", "--rounds", "1"])[0]
    for name in ("one process", "ring", "all_gather", "ulysses"):
        assert name in printed, printed
