"""Token-sparse attention on a CUDA device."""

import pytest
import torch

from tests.support.sparse_cases import SHAPES, make
from tests.support.testing import DTYPES

pytestmark = pytest.mark.cuda

DIMS = [(64, 64, False), (128, 128, False), (256, 256, False), (33, 20, False), (576, 512, True)]


def differentiate(case, device="cuda"):
    """Results by name, on the CPU."""
    ops = torch.ops.attnjourney
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731
    key = move(case.key)
    same = case.value.data_ptr() == case.key.data_ptr()
    value = key[..., : case.value.shape[-1]] if same else move(case.value)
    inputs = (move(case.query), key, value, move(case.indices))
    options = {name: move(x) for name, x in {**case.rows, **case.scores}.items()}
    options["causal_alignment"] = int(case.rows["causal_alignment"] == "bottom_right")
    options |= dict(enable_gqa=True, sinks=move(case.sinks))
    saved = ops.sparse_attention_forward(*inputs, **options)
    gradients = ops.sparse_attention_backward(move(case.grad_out), move(case.grad_lse), *inputs, *saved, **options)
    names = ("out", "lse", "grad_query", "grad_key", "grad_value") + ("grad_sinks",) * (case.sinks is not None)
    return {name: x.cpu() for name, x in zip(names, (*saved[:2], *gradients))}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values_and_gradients(dims, dtype):
    dim, v_dim, latent = dims
    for shape in SHAPES:
        case = make(shape, dtype, dim, v_dim, latent)
        case.compare(differentiate(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_many_rows_of_many_indices(dtype):
    """More rows of indices than a part of the workspace holds; the same bits every time."""
    case = make((1, 2, 1, 1100, 600, 512, 0, dict(is_causal=True)), dtype, 64, 64)
    first, second = differentiate(case), differentiate(case)
    case.compare(first)
    assert all(torch.equal(first[name], second[name]) for name in first)
