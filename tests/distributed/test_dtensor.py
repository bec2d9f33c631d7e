"""Every operator on DTensors against the same call on the whole: values, gradients, where results lie."""

import pytest

from tests.distributed import dtensor_calls as calls


@pytest.mark.parametrize("family", calls.FAMILIES)
@pytest.mark.parametrize(
    "sizes, rules", [((2,), calls.ONE), ((2, 2), ("BH", "HB")), ((4,), ("H",))], ids=["2", "2x2", "4"]
)
def test_shards_are_the_whole(ranks, family, sizes, rules):
    for wrong in ranks.run(calls.check, family, sizes, rules):
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
