"""Every operator called directly: saved tensors, inputs and caches in any layout give the same bits."""

import pytest
import torch

from tests.support.direct_calls import INPUTS, call_of, covered, family_of, run
from tests.support.layer_checks import SAME
from tests.support.testing import LAYOUTS, poison_memory

LAYERS = ("mha", "gpt_attention", "gqa", "mla")
STRIDED = [name for name in covered() if name.endswith(("_backward", "_jvp"))]


def test_every_operator_has_a_generator():
    assert {family_of(name) for name in covered()} == set(INPUTS)


def relaid(x, layout):
    """The same numbers: in columns, with NaN between, cut from a larger tensor."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or not x.is_floating_point():
        return x
    return LAYOUTS[layout if x.dim() > 1 else "stepped_last"](x)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", STRIDED)
def test_saved_tensors_in_any_layout(name, seed):
    """The layers' products are ATen's, which adds in another order where strides differ."""
    layout = ("columns", "stepped_rows", "stepped_last", "offset")[seed]
    products = family_of(name) in LAYERS
    call = call_of(name, seed, torch.float64 if products else None)
    expected = run(name, call)
    other = {n: relaid(x, layout) for n, x in call.items()}
    poison_memory()
    for x, y in zip(expected, run(name, other), strict=True):
        tolerance = SAME * x.abs().max().item() if products and x.numel() else 0.0
        torch.testing.assert_close(y, x, rtol=0, atol=tolerance, equal_nan=True)
