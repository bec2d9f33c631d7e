"""torch's own context_parallel runs on the CPU, and gives what one rank does."""

import pytest

from tests.distributed import torch_calls as calls
from tests.support.testing import pairs, row_id

CASES = pairs(size=(4, 2), kv_heads=(4, 2), is_causal=(True, False))


@pytest.mark.parametrize("case", CASES, ids=row_id)
def test_values_and_gradients(ranks, case):
    assert ranks.run(calls.under_torchs_entry, **case) == [[]] * 4
