"""Gated linear attention's CUDA kernels, run on the CPU by tests/emulator: as tests/emulator/test_attention.py."""

from functools import partial

import pytest
import torch

from attnjourney import reference
from attnjourney.ops.gated_linear_attention import UPDATES
from tests.emulator.faults import gated as faults_gated
from tests.emulator.host import build, gated, run
from tests.emulator.host.noticed import is_noticed
from tests.linear import test_gated_linear_attention as cpu
from tests.linear.test_gated_linear_attention import SEQUENCES, grad_like, inputs
from tests.support.testing import DTYPES

# update, (q_heads, kv_heads, v_heads), length, (head_dim, v_head_dim), then what differs from the defaults of `check`
CASES = [
    ("gated_delta", (2, 1, 2), 150, (40, 72), dict(state=True, qk_l2norm=True)),
    ("kda", (2, 2, 4), 70, (64, 8), dict(state=True, strength=1.0)),
    ("gated", (2, 1, 1), 100, (20, 33), dict(state=True, rows_first=True)),
    ("kda", (4, 1, 2), 130, (20, 33), dict(qk_l2norm=True, rows_first=True, strength=12.0)),
    ("delta", (1, 1, 1), 65, (136, 40), dict(state=True, layout="transposed")),
    ("gated", (1, 1, 2), 67, (36, 16), dict(state=True, channels=True, strength=0.02)),
    ("linear", (2, 2, 2), 64, (16, 72), dict(qk_l2norm=True, batch=2)),
    ("gated_delta", (2, 1, 2), 33, (256, 24), dict(strength=30.0)),
    ("kda", (2, 1, 2), 3, (20, 33), dict(state=True, qk_l2norm=True, rows_first=True)),
    ("gated_delta", (1, 1, 2), 4, (136, 40), dict(state=True)),
    ("gated", (4, 2, 2), 2, (8, 40), {}),
]
FAULT_CASES = [CASES[i] for i in (0, 3, 2, 8, 4, 5)]


@pytest.fixture(scope="module")
def programs():
    build.build_all([gated.request(dtype) for dtype in DTYPES])


@pytest.fixture(scope="module")
def faulty(programs):
    build.build_all([gated.request(dtype, build.Fault(*edit)) for dtype, _, *edit in faults_gated.GATED])


def emulated(program, tensors, grads=None, **options):
    """What tests.linear's `run` gives, by the kernels."""
    (out, state), _ = gated.call(program, tensors, **options)
    if grads is None:
        grads = [grad_like(x.shape, out.dtype, 9 + i).to(x.dtype) for i, x in enumerate((out, state))]
    found, _ = gated.call(program, tensors, grads=grads, **options)
    names = [name for name in gated.NAMES if tensors[name] is not None]
    return {"out": out, "state": state, **{f"grad_{name}": grad for name, grad in zip(names, found)}}


def check(program, dtype, case, order="forward"):
    update, heads, length, dims, given = case
    options = dict(update=update, scale=0.7, qk_l2norm=given.get("qk_l2norm", False))
    made = {name: x for name, x in given.items() if name not in ("qk_l2norm", "rows_first")}
    tensors = inputs(dtype, update, heads, length, dims, **{"batch": 1, **made})
    actual = emulated(program, tensors, order=order, rows_first=given.get("rows_first", False), **options)
    cpu.check(tensors, actual, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_values_and_gradients(programs, dtype):
    """Every case, in every order once over the dtypes."""
    program, first = build.program(*gated.request(dtype)), DTYPES.index(dtype)
    for i, case in enumerate(CASES):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check(program, dtype, case, order)


def check_packed(program, dtype, update):
    """Packed sequences are sequences, bit by bit; rows behind the last one are 0."""
    count = len(SEQUENCES) - 1
    tensors = inputs(dtype, update, (2, 1, 2), 170, (16, 24), batch=1, sequences=count, state=True)
    grads = [grad_like(shape, dtype, 9) for shape in ((1, 2, 170, 24), (count, 2, 16, 24))]
    packed = emulated(program, tensors, grads, update=update, cu_seqlens=SEQUENCES, qk_l2norm=True)
    for n, (begin, end) in enumerate(zip(SEQUENCES, SEQUENCES[1:])):
        own = {name: x[n : n + 1] if name == "initial_state" else x[:, :, begin:end] for name, x in tensors.items()}
        given = [grads[0][:, :, begin:end], grads[1][n : n + 1]]
        if end - begin == 1:
            continue  # is taken as a step, which is another order of additions
        for name, x in emulated(program, own, given, update=update, qk_l2norm=True).items():
            of_one = packed[name][n : n + 1] if "state" in name else packed[name][:, :, begin:end]
            assert torch.equal(x, of_one), (name, n)
    for name, x in packed.items():
        assert "state" in name or not x[:, :, SEQUENCES[-1] :].any(), name
    return packed, tensors, grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("update", ["gated_delta", "kda"])
def test_packed_sequences_are_sequences(programs, update, dtype):
    packed, tensors, grads = check_packed(build.program(*gated.request(dtype)), dtype, update)
    if dtype != torch.float64:
        return
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    options = dict(update=update, cu_seqlens=torch.tensor(SEQUENCES), qk_l2norm=True, return_state=True)
    results = reference.gated_linear_attention(**leaves, **options)
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    expected = [*results, *found]
    for (name, x), y in zip(packed.items(), expected, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:])
def test_packed_tokens_are_steps(programs, dtype):
    """Generation: a row or two of each sequence, one without any."""
    program, ends = build.program(*gated.request(dtype)), [0, 1, 3, 3, 4]
    tensors = inputs(dtype, "kda", (2, 1, 2), 4, (20, 33), batch=1, sequences=4, state=True)
    (out, state), _ = gated.call(program, tensors, update="kda", cu_seqlens=ends)
    for n, (begin, end) in enumerate(zip(ends, ends[1:])):
        own = {name: x[n : n + 1] if name == "initial_state" else x[:, :, begin:end] for name, x in tensors.items()}
        (rows, last), _ = gated.call(program, own, update="kda")
        assert torch.equal(rows, out[:, :, begin:end]) and torch.equal(last[0], state[n])


NAN_TENSORS = ("key", "value", "query", "gate", "beta", "grad_out")


def check_nan(program, dtype, update, bad, at=41):
    """A NaN shows in the rows that see it and in no other; head 0 alone has it."""
    tensors = inputs(dtype, update, (2, 2, 2), 70, (16, 16), batch=1)
    grads = [torch.ones(1, 2, 70, 16, dtype=dtype), None]
    tensors = {name: None if x is None else x.clone() for name, x in tensors.items()}
    {**tensors, "grad_out": grads[0]}[bad][0, 0, at] = torch.nan
    results = emulated(program, tensors, grads, update=update)
    rows = {name: x[0, 0].reshape(70, -1).isnan().any(1).nonzero().flatten().tolist()
            for name, x in results.items() if "state" not in name}  # fmt: skip
    after, before = list(range(at, 70)), list(range(at + 1))
    assert rows["out"] == {"query": [at], "grad_out": []}.get(bad, after)
    if bad in ("query", "grad_out"):
        assert rows["grad_query"] == ([at] if bad == "grad_out" else [])  # out is linear in the query
        assert rows["grad_key"] == before and rows["grad_value"] == before
    else:
        assert rows["grad_query"] == after
    assert not any(x[0, 1].isnan().any() for x in results.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(programs, dtype):
    program, first = build.program(*gated.request(dtype)), DTYPES.index(dtype)
    for i, bad in enumerate(NAN_TENSORS):
        update = ("gated_delta", "kda")[(i + first) % 2]
        with run.named(f"{update}, {bad}"):
            check_nan(program, dtype, update, bad)


@pytest.mark.parametrize("update", ["gated", "gated_delta", "kda"])
@pytest.mark.parametrize("length", [2, 100])
def test_a_gate_of_minus_infinity_forgets_everything(programs, update, length):
    program, cut = build.program(*gated.request(torch.float64)), length // 2
    tensors = inputs(torch.float64, update, length=length, state=True, batch=1)
    tensors["gate"][:, :, cut] = -torch.inf
    results = emulated(program, tensors, update=update)
    rest = {n: None if x is None else x[:, :, cut:] for n, x in tensors.items() if n != "initial_state"}
    expected, state = reference.gated_linear_attention(**rest, update=update, return_state=True)
    assert (results["out"][:, :, cut:] - expected).abs().max() < 1e-12 and (
        results["state"] - state
    ).abs().max() < 1e-12
    assert all(x.isfinite().all() for x in results.values()) and not results["grad_initial_state"].any() == (cut < 1)


@pytest.mark.parametrize("update", UPDATES)
def test_only_what_is_wanted(programs, update):
    program = build.program(*gated.request(torch.float64))
    tensors = inputs(torch.float64, update, (2, 1, 2), 40, (20, 33), state=True, batch=1)
    grads = [grad_like((1, 2, 40, 33), torch.float64, 9), None]
    (whole, _) = gated.call(program, tensors, grads=grads, update=update)
    names = [name for name in gated.NAMES if tensors[name] is not None]
    for need in (1, 2, 4, 8, 16, 32, 5, 24):
        found, _ = gated.call(program, tensors, grads=grads, update=update, need=need)
        for name, x, y in zip(names, found, whole):
            wanted = need >> gated.NAMES.index(name) & 1
            assert torch.equal(x, y) if wanted else x.numel() == 0, (need, name)


def test_no_rows(programs):
    program = build.program(*gated.request(torch.float32))
    tensors = inputs(torch.float32, state=True, batch=1)
    none = {name: x if name == "initial_state" else x[:, :, :0] for name, x in tensors.items()}
    results = emulated(program, none)
    assert results["out"].shape == (1, 2, 0, 16) and torch.equal(results["state"], tensors["initial_state"])
    assert torch.equal(results["grad_initial_state"], grad_like((1, 2, 16, 16), torch.float32, 10))


@pytest.mark.parametrize("dtype,what,file,old,new", faults_gated.GATED, ids=[fault[1] for fault in faults_gated.GATED])
def test_a_fault_is_found(faulty, dtype, what, file, old, new):
    program = build.program(*gated.request(dtype, build.Fault(file, old, new)))
    checks = [partial(check, program, dtype, case) for case in FAULT_CASES]
    checks += [partial(check_packed, program, dtype, "kda"), partial(check_nan, program, dtype, "kda", "value")]
    checks += [partial(check, program, dtype, case, order) for order in ("reverse", "random") for case in FAULT_CASES]
    assert is_noticed(checks, what)
