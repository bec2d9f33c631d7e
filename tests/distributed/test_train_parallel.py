"""examples.train_parallel: losses of a mesh equal those of one rank, which takes up its checkpoint."""

import pytest

from tests.distributed import train_calls as calls


@pytest.mark.parametrize(
    "name, sizes", [("gqa", (1, 2, 2)), ("mla", (1, 2, 2)), ("gpt", (1, 2, 2)), ("gqa", (2, 2, 1))]
)
def test_losses_are_those_of_one_rank(ranks, tmp_path, name, sizes):
    results = ranks.run(calls.losses, name, sizes, tmp_path / "checkpoint")
    expected = results[0][1]
    assert len(set(expected)) == 3 and len(results[0][2]) == 2
    for found, _, resumed in results:
        assert found == pytest.approx(expected, rel=1e-9)
        assert resumed == pytest.approx([expected[2]] * len(resumed), rel=1e-9)
