"""Linear attention's CUDA kernels, run on the CPU by tests/emulator: as tests/emulator/test_attention.py."""

from functools import partial

import pytest
import torch

from attnjourney import reference
from tests.emulator.faults import linear as faults_linear
from tests.emulator.host import build, linear, run
from tests.emulator.host.noticed import is_noticed
from tests.linear.test_linear_attention import NAMES, dense, inputs, padding
from tests.linear.test_linear_attention import run as differentiate
from tests.support.testing import DTYPES, GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference, random_tensor

# heads, (q_len, kv_len), (head_dim, v_head_dim), then what differs from the defaults of `check`
CASES = [
    ((1, 1), (150, 150), (64, 64), dict(state=True)),
    ((2, 1), (70, 70), (20, 33), dict(mask=True, feature_map="relu", rows_first=True)),
    ((1, 1), (600, 600), (8, 16), dict(state=True, mask=True, blocks=100)),
    ((2, 1), (300, 300), (16, 72), dict(normalize=False, feature_map="identity", state=True, blocks=9)),
    ((4, 2), (37, 90), (40, 72), dict(is_causal=False, state=True, mask=True)),
    ((1, 1), (9, 530), (16, 3), dict(is_causal=False, blocks=100, feature_map="identity", rows_first=True)),
    ((3, 1), (1, 1), (16, 16), dict(state=True)),
    ((1, 1), (40, 40), (16, 16), dict(mask=True, eps=0.0)),
]
FAULT_CASES = [CASES[i] for i in (1, 7, 3, 4)] + [((1, 1), (300, 300), (8, 16), dict(mask=True, blocks=9))]
# for chunks of 32 rows, which float32 and 16 bits have over 192 dimensions where blocks have 99 KB of shared memory
NARROW = [
    ((1, 1), (40, 40), (256, 200), dict(state=True, rows_first=True)),
    ((2, 1), (150, 150), (16, 72), dict(normalize=False, feature_map="identity", state=True, blocks=9)),
    ((2, 2), (37, 90), (40, 33), dict(is_causal=False, mask=True)),
]
SMALL = {  # of the shapes that float64's chunks of 32 rows make long
    (600, 600): (300, 300),
    (300, 300): (160, 160),
}


@pytest.fixture(scope="module")
def programs():
    requests = [linear.request(dtype) for dtype in DTYPES]
    requests += [linear.request(dtype, small=True) for dtype in (torch.bfloat16, torch.float32)]
    requests += [linear.request(dtype, build.Fault(*edit)) for dtype, _, *edit in faults_linear.LINEAR]
    build.build_all(requests)


def emulated(program, q, k, v, state, mask, order, rows_first, blocks, **options):
    """What `differentiate` gives, by the kernels."""
    grads = [random_tensor((*q.shape[:3], v.shape[3]), q.dtype, seed=9, outliers=False)]
    wide = torch.promote_types(q.dtype, torch.float32)
    shapes = [(*k.shape[:2], q.shape[3], v.shape[3]), (*k.shape[:2], q.shape[3])][: 1 + options["normalize"]]
    if options["normalize"]:
        grads.append(torch.zeros(q.shape[:3], dtype=wide))
    grads += [random_tensor(shape, q.dtype, seed=9, outliers=False).to(wide) for shape in shapes]
    results, _ = linear.call(
        program, q, k, v, state, grads, mask=mask, order=order, rows_first=rows_first, blocks=blocks, **options
    )
    out, _, s, z, *gradients = results
    kept = [out, s] + [z] * options["normalize"] + gradients[:3]
    return kept + ([] if state is None else gradients[3 : 4 + options["normalize"]])


def check(program, dtype, case, order="forward"):
    heads, lengths, dims, options = case
    if dtype == torch.float64:
        lengths = SMALL.get(lengths, lengths)
    options = dict(feature_map="elu+1", is_causal=True, scale=0.7, normalize=True, eps=0.5) | options
    how = {"order": order, "rows_first": options.pop("rows_first", False), "blocks": options.pop("blocks", 1)}
    has_state, masked = options.pop("state", False), options.pop("mask", False)
    q, k, v, state = inputs(dtype, heads, lengths, dims, state=has_state, normalize=options["normalize"])
    if options["feature_map"] == "identity" and options["normalize"]:
        q, k = q.abs(), k.abs()  # positive, or there is no denominator
    mask = padding(lengths[1], masked)
    actual = emulated(program, q, k, v, state, mask, **how, **options)
    expected = differentiate(reference.linear_attention, q, k, v, state, torch.float64, mask=mask, **options)
    plain = differentiate(dense, q, k, v, state, mask=mask, **options)
    names = [n for n in NAMES if options["normalize"] or "normalizer" not in n]
    names = [n for n in names if state is not None or n not in ("grad_state", "grad_normalizer")]
    for name, a, p, e in zip(names, actual, plain, expected, strict=True):
        assert_close_to_reference(a, p, e, GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_values(programs, dtype):
    """Every case, in every order once over the dtypes."""
    program, first = build.program(*linear.request(dtype)), DTYPES.index(dtype)
    for i, case in enumerate(CASES):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check(program, dtype, case, order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d)[6:])
def test_chunks_for_small_shared_memory(programs, dtype):
    program = build.program(*linear.request(dtype, small=True))
    for order, case in zip(("starve", "random", "reverse"), NARROW):
        check(program, dtype, case, order)
    check_nan(program, dtype)


def nan_rows(program, dtype, bad, infinite=False):
    """Rows of (out, gradients of query, key, value) with a NaN where row 41 of one tensor holds one; head 0 alone."""
    q, k, v, _ = inputs(dtype, (1, 1), (70, 70), (16, 16))
    grad = torch.ones(q.shape, dtype=dtype)
    {"key": k, "value": v, "query": q, "grad_out": grad}[bad][0, 0, 41, 3] = torch.inf if infinite else torch.nan
    grads = [grad, torch.zeros(2, 1, 70), torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 16)]
    wide = torch.promote_types(dtype, torch.float32)
    options = dict(feature_map="elu+1", is_causal=True, scale=1.0, normalize=True, eps=0.001)
    results, _ = linear.call(program, q, k, v, None, [grad, *(x.to(wide) for x in grads[1:])], **options)
    shown = [results[0], *results[4:7]]
    assert not any(x[1].isnan().any() for x in shown)
    return [(~x[0, 0].isfinite()).any(-1).nonzero().flatten().tolist() for x in shown], results[0]


def check_nan(program, dtype):
    after, before = list(range(41, 70)), list(range(42))
    for bad in ("key", "value", "query", "grad_out"):
        (out, grad_query, grad_key, grad_value), _ = nan_rows(program, dtype, bad)
        assert out == {"key": after, "value": after, "query": [41], "grad_out": []}[bad], bad
        if bad in ("query", "grad_out"):
            assert grad_query == [41] and grad_key == before and grad_value == before, bad
        else:
            assert grad_query == after, bad
    _, out = nan_rows(program, dtype, "value", infinite=True)
    assert (out[0, 0, 41:, 3] == torch.inf).all() and out[0, 0, :41].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(programs, dtype):
    check_nan(build.program(*linear.request(dtype)), dtype)


def test_the_gradient_of_the_denominator_and_only_what_is_wanted(programs):
    """Against autograd through the formula in float64: the denominator is a result of the operator, too."""
    program = build.program(*linear.request(torch.float64))
    q, k, v, state = inputs(torch.float64, (2, 1), (70, 70), (20, 33), state=True)
    leaves = [x.requires_grad_() for x in (q, k, v, *state)]
    phi = lambda x: torch.nn.functional.elu(x) + 1  # noqa: E731
    weights = (phi(q) @ phi(k).expand(2, 2, 70, 20).mT).tril()
    denominator = weights.sum(-1) + (phi(q) @ state[1].expand(2, 2, 20)[..., None])[..., 0] + 0.5
    out = (weights @ v + phi(q) @ state[0]) / denominator[..., None]
    last = state[0] + phi(k).mT @ v, state[1] + phi(k).sum(-2)
    grads = [random_tensor(x.shape, torch.float64, seed=9 + i) for i, x in enumerate((out, denominator, *last))]
    expected = torch.autograd.grad([out, denominator, *last], leaves, grads)
    options = dict(feature_map="elu+1", is_causal=True, scale=1.0, normalize=True, eps=0.5)
    given = [x.detach() for x in (q, k, v)], tuple(x.detach() for x in state)
    for need, blocks in ((7, 1), (7, 9), (1, 1), (2, 9), (4, 1), (4, 9)):
        results, _ = linear.call(program, *given[0], given[1], grads, need=need, blocks=blocks, **options)
        for bits, got, want in zip((1, 2, 2, 4, 4), results[4:], expected):
            assert got.numel() == 0 if not need & bits else (got - want).abs().max() < 1e-10


def test_no_keys_and_no_rows(programs):
    program = build.program(*linear.request(torch.float32))
    q, k, v, state = inputs(torch.float32, (2, 2), (3, 3), (16, 24), state=True)
    options = dict(feature_map="elu+1", is_causal=False, scale=1.0, normalize=True, eps=0.001)
    (read, *_), _ = linear.call(program, q, k[:, :, :0], v[:, :, :0], state, None, **options)
    expected = reference.linear_attention(q, k[:, :, :0], v[:, :, :0], is_causal=False, initial_state=state, eps=0.001)
    torch.testing.assert_close(read, expected)
    for causal in (False, True):
        rows = slice(0) if causal else slice(None)
        (_, _, s, z), _ = linear.call(
            program, q[:, :, :0], k[:, :, rows], v[:, :, rows], state, None, **options | {"is_causal": causal}
        )
        added = (v.new_zeros(1), v.new_zeros(1)) if causal else reference.linear_attention(
            q, k, v, is_causal=False, return_state=True)[1]  # fmt: skip
        torch.testing.assert_close(s, state[0] + added[0])
        torch.testing.assert_close(z, state[1] + added[1])


@pytest.mark.parametrize(
    "dtype,what,file,old,new", faults_linear.LINEAR, ids=[fault[1] for fault in faults_linear.LINEAR]
)
def test_a_fault_is_found(programs, dtype, what, file, old, new):
    program = build.program(*linear.request(dtype, build.Fault(file, old, new)))
    calls = [(case, order) for order in ("forward", "reverse", "random") for case in FAULT_CASES]
    checks = [partial(check, program, dtype, *call) for call in calls]
    assert is_noticed([*checks, partial(check_nan, program, dtype)], what)
