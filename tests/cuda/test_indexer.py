"""The lightning indexer on a CUDA device."""

import pytest
import torch

from tests.support.indexer_cases import (
    LOSS_SCALES,
    LOSS_SHAPES,
    TOPK_SHAPES,
    compare_loss,
    compare_topk,
    loss_inputs,
    topk_inputs,
)
from tests.support.testing import DTYPES

pytestmark = pytest.mark.cuda


def choose(inputs, options):
    """indices and scores, on the CPU."""
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    options["causal_alignment"] = int(options["causal_alignment"] == "bottom_right")
    given = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
    return [x.cpu() for x in torch.ops.attnjourney.lightning_indexer(*given, **options)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dim", [64, 128, 33])
def test_choice(dim, dtype):
    for shape in TOPK_SHAPES:
        inputs, options, _ = topk_inputs(shape, dtype, dim)
        compare_topk(*choose(inputs, options), inputs, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_one_row_of_many_keys(dtype):
    """Keys in parts over the whole device; many rows of fewer beside it."""
    shapes = [(1, 32, 1, 30000, 1024, 0, dict(whole=True)), (1, 8, 300, 2000, 256, 0, dict(is_causal=True))]
    for shape in shapes:
        inputs, options, _ = topk_inputs(shape, dtype, 64)
        compare_topk(*choose(inputs, options), inputs, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dims", [(64, 128), (128, 256), (128, 576), (33, 20)], ids=str)
def test_loss_and_gradients(dims, dtype):
    ops = torch.ops.attnjourney
    for shape in LOSS_SHAPES:
        inputs, grad_loss, _ = loss_inputs(shape, dtype, *dims)
        given = [x.cuda() for x in inputs]
        loss, grad_scores = ops.lightning_indexer_loss_forward(*given, enable_gqa=True, **LOSS_SCALES)
        gradients = ops.lightning_indexer_loss_backward(
            grad_loss.cuda(), *given[:3], given[5], grad_scores, index_scale=LOSS_SCALES["index_scale"]
        )
        compare_loss([x.cpu() for x in (loss, grad_scores, *gradients)], inputs, grad_loss)
