"""Linear attention, Infini- and Longformer attention on a CUDA device."""

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.linear.test_linear_attention import GRADIENT_FACTOR, NAMES, OUTPUT_FACTOR, ROWS, dense, inputs, padding, run
from tests.support.testing import assert_close_to_reference, row_id

pytestmark = pytest.mark.cuda


def there_and_back(function):
    """function on the device, for tensors and states on the CPU; a tensor is copied with its strides."""

    def move(x):
        if isinstance(x, tuple):
            return tuple(map(move, x))
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)

    def back(x):
        return tuple(map(back, x)) if isinstance(x, tuple) else x if x is None else x.cpu()

    return lambda *args, **options: back(function(*map(move, args), **{n: move(x) for n, x in options.items()}))


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    row = dict(row)
    mask, normalize = padding(row["lengths"][1], row.pop("mask")), row["normalize"]
    feature_map = row.pop("feature_map")
    if feature_map == "identity" and normalize:
        feature_map = torch.abs
    options = dict(feature_map=feature_map, is_causal=row.pop("is_causal"), normalize=row.pop("normalize"), eps=0.5)
    compare(*inputs(normalize=normalize, **row), mask, scale=0.7, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 200)])
def test_long_sequences_in_pieces(dims, dtype):
    options = dict(feature_map="elu+1", normalize=True, eps=1e-6, scale=1.0)
    for causal in (True, False):
        compare(*inputs(dtype, (2, 1), (1500, 1500), dims, state=True), is_causal=causal, **options)


def compare(q, k, v, state, mask=None, **options):
    actual = run(there_and_back(attnjourney.linear_attention), q, k, v, state, mask=mask, **options)
    expected = run(dense, q, k, v, state, torch.float64, mask=mask, **options)
    plain = run(dense, q, k, v, state, mask=mask, **options)
    names = NAMES if options["normalize"] else [n for n in NAMES if "normalizer" not in n]
    names = [n for n in names if state is not None or n not in ("grad_state", "grad_normalizer")]
    for name, a, p, e in zip(names, actual, plain, expected, strict=True):
        assert_close_to_reference(a, p, e, GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR, name)


def test_one_step_at_a_time_and_graph_capture():
    q, k, v, _ = inputs(torch.float32, lengths=(20, 20))
    device = [x.cuda() for x in (q, k, v)]
    whole, last = attnjourney.linear_attention(*device, return_state=True)
    state, steps = None, []
    for i in range(20):
        row, state = attnjourney.linear_attention(
            *(x[:, :, i : i + 1] for x in device), initial_state=state, return_state=True
        )
        steps.append(row)
    torch.testing.assert_close(torch.cat(steps, 2), whole)
    torch.testing.assert_close(state, last)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnjourney.linear_attention(*device)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update", ["linear", "delta"])
def test_infini_attention(update, dtype):
    q, k, v = (torch.randn(2, h, 150, 32).to(dtype) for h in (4, 2, 2))
    beta, options = torch.randn(4), dict(segment_length=64, update=update)
    out = attnjourney.infini_attention(*(x.cuda() for x in (q, k, v, beta)), **options)
    exact = reference.infini_attention(*(x.double() for x in (q, k, v, beta)), **options)
    plain = reference.infini_attention(q, k, v, beta.to(dtype), **options)
    assert_close_to_reference(out.cpu(), plain, exact)


@pytest.mark.parametrize("causal", [False, True])
def test_longformer_attention(causal):
    tensors = [torch.randn(2, 2, 130, 32).bfloat16() for _ in range(6)]
    is_global, hidden = torch.zeros(2, 130, dtype=torch.bool), torch.zeros(2, 130, dtype=torch.bool)
    is_global[0, [0, 40]] = is_global[1, 7] = hidden[1, 100:] = True
    options = dict(window=9, dilation=[1, 3], is_causal=causal)
    masks = dict(global_mask=is_global, key_padding_mask=hidden)
    out = attnjourney.longformer_attention(
        *(x.cuda() for x in tensors), **options, **{n: x.cuda() for n, x in masks.items()}
    )
    exact = reference.longformer_attention(*(x.double() for x in tensors), **options, **masks)
    plain = reference.longformer_attention(*tensors, **options, **masks)
    assert_close_to_reference(out.cpu(), plain, exact)
