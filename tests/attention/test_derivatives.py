"""Forward-mode derivatives and double backward of `attention`: values for every option, gradcheck, threads, memory."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.support.derivative_checks import check, directions, double_backward, function_of, jvp
from tests.support.options_cases import OPTIONS, TRAINED, compatible, leaves_of, make
from tests.support.testing import DTYPES, poison_memory, threads

PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if compatible(pair)]
ops = torch.ops.attnjourney


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_values(name, dtype):
    *tensors, arguments = make([] if name == "plain" else [name], dtype, 1, q_len=70, kv_len=150, dim=24, v_dim=17)
    check(tensors, arguments, label=name)


@pytest.mark.parametrize("i", range(len(PAIRS)), ids=["-".join(p) for p in PAIRS])
def test_values_of_pairs(i):
    dtype = DTYPES[i % 4]
    q_len, kv_len = [(9, 11), (33, 20), (50, 170)][i % 3]
    *tensors, arguments = make(PAIRS[i], dtype, q_len=q_len, kv_len=kv_len, dim=16, v_dim=8)
    check(tensors, arguments, label=PAIRS[i])


@pytest.mark.parametrize("sizes", [(1, 1), (5, 0), (0, 5), (97, 145), (200, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_values_at_lengths(sizes, dtype):
    *tensors, arguments = make(["causal", "sinks"], dtype, 1, q_len=sizes[0], kv_len=sizes[1], dim=8, v_dim=40)
    check(tensors, arguments, label=sizes)


@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_gradcheck(name):
    names = [] if name == "plain" else [name]
    *tensors, arguments = make(names, q_len=4, kv_len=6, q_heads=2, kv_heads=1, dim=3, v_dim=2)
    tensors, arguments, leaves = leaves_of(tensors, arguments)
    call = function_of(attnjourney.attention, arguments, leaves)
    inputs = tuple(leaves.values())
    options = dict(fast_mode=True, atol=1e-6, rtol=1e-5)
    torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_forward_grad=True, **options)
    torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, **options)


def test_gradcheck_in_full():
    """Not in fast mode; reverse over forward and the other way round; batched."""
    names = ["mask", "sinks", "alibi", "softcap", "dropout", "causal"]
    *tensors, arguments = make(names, batch=1, q_len=3, kv_len=4, q_heads=2, kv_heads=1, dim=2, v_dim=2)
    tensors, arguments, leaves = leaves_of(tensors, arguments)
    call = function_of(attnjourney.attention, arguments, leaves)
    inputs = tuple(leaves.values())
    torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, check_batched_grad=True)


class Arguments(torch.utils._python_dispatch.TorchDispatchMode):
    """What our operators are called with, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "attnjourney":
            names = [a.name for a in function._schema.arguments]
            self.calls.append((function._opname, dict(zip(names, args)) | (kwargs or {})))
        return function(*args, **(kwargs or {}))


NAMES = ("mask", "sinks", "alibi", "softcap")
INPUTS = ("query", "key", "value", *TRAINED)


def names_and_inputs():
    *tensors, arguments = make(NAMES, dim=4)
    return {**arguments, **dict(zip(INPUTS, tensors))}


@pytest.mark.parametrize("moving", [*[(n,) for n in INPUTS], ("query", "value"), ("key", "sinks")], ids="-".join)
def test_a_missing_tangent_costs_nothing_and_counts_as_zero(moving):
    arguments = names_and_inputs()
    inputs = tuple(arguments[name] for name in moving)
    results = []
    for function in (attnjourney.attention, reference.attention):
        with Arguments() as mode:
            results.append(
                torch.func.jvp(function_of(function, arguments, moving), inputs, tuple(directions(inputs)))[1]
            )
        if function is attnjourney.attention:
            calls = mode.calls
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
    assert [name for name, _ in calls] == ["attention_forward", "attention_jvp"]
    given = {n.removesuffix("_tangent") for n, x in calls[1][1].items() if n.endswith("_tangent") and x is not None}
    assert given == set(moving)


@pytest.mark.parametrize("trained", [*[(n,) for n in INPUTS], ("query", "value"), ("key", "sinks")], ids="-".join)
def test_frozen_inputs_cost_nothing(trained):
    results = []
    for function in (attnjourney.attention, reference.attention):
        arguments = names_and_inputs()
        inputs = [arguments[name].requires_grad_() for name in trained]
        out, lse = function_of(function, arguments, trained)(*inputs)
        first = torch.autograd.grad((out.square().sum() + lse.square().sum(),), inputs, create_graph=True)
        with Arguments() as mode:
            results.append(torch.autograd.grad(first, inputs, directions(first), retain_graph=True))
        if function is attnjourney.attention:
            calls = mode.calls
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
    names = [name for name, _ in calls]
    # the jvp and its backward_jvp for the second derivative, the backward for that of the loss by out and lse
    assert sorted(names) == ["attention_backward", "attention_backward_jvp", "attention_jvp"]
    bits = sum(1 << INPUTS.index(name) for name in trained)
    assert [c["need"] for n, c in calls if n != "attention_jvp"] == [bits] * 2


@pytest.mark.parametrize("names", [("mask", "dropout"), ("alibi", "sinks", "key_lengths"), ("row_mask", "causal")])
def test_threads(names):
    *tensors, arguments = make(names, torch.float32, batch=1, q_len=150, kv_len=310, dim=16, v_dim=16)
    results = []
    for count in (1, 3, 3):
        poison_memory()
        with threads(count):
            results.append(check(tensors, arguments, label=f"{names} {count} threads"))
    for name in results[0]:
        assert torch.equal(results[1][name], results[2][name]), name
        if name.endswith("tangent"):
            assert torch.equal(results[0][name], results[1][name]), name


def test_hidden_numbers_do_not_leak_and_visible_ones_show():
    """A NaN in a key, value or tangent that no row sees changes nothing; one that is seen does."""
    q, k, v, arguments = make(["key_lengths", "bool_mask"], q_len=20, kv_len=30, dim=4)
    del arguments["attn_mask"]
    arguments["key_lengths"] = torch.tensor([30, 20])
    arguments["attn_mask"] = torch.ones(20, 30, dtype=torch.bool)
    arguments["attn_mask"][:, 7] = False
    results = []
    for bad in (0.0, float("nan")):
        k, v = k.clone(), v.clone()
        for x in (k, v):
            x[:, :, 7] = x[1, :, 20:] = bad
        tangents = directions([q, k, v])
        for t in tangents[1:]:
            t[:, :, 7] = t[1, :, 20:] = bad
        call = function_of(attnjourney.attention, arguments, INPUTS[:3])
        first = torch.func.jvp(call, (q, k, v), tuple(tangents))[1]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(call(*leaves)[0].square().sum(), leaves, create_graph=True)
        directed = [g * torch.where(t.isnan(), 0.0, t) for g, t in zip(grads, tangents)]
        second = torch.autograd.grad(sum(x.sum() for x in directed), leaves)
        results.append([*first, *second])
    for clean, dirty in zip(*results):
        torch.testing.assert_close(clean, dirty, rtol=1e-12, atol=1e-13)
    k[0, 0, 3, 0] = float("nan")
    assert torch.func.jvp(call, (q, k, v), tuple(tangents))[1][0].isnan().any()


MEMORY = """
import resource, sys, torch, attnjourney
from pathlib import Path
torch.set_num_threads(1)
n, which, options = int(sys.argv[1]), sys.argv[2], dict(is_causal=True, softcap=5.0)
def run(n):
    torch.manual_seed(0)
    q, k, v, t = (torch.randn(1, 1, n, 16) for _ in range(4))
    mask = torch.zeros(1, n, requires_grad=True)
    if which == "jvp":
        inputs, tangents = (q, k, v, mask.detach()), (t, t, t, torch.ones(1, n))
        return torch.func.jvp(lambda *x: attnjourney.attention(*x, **options), inputs, tangents)
    x = [x.requires_grad_() for x in (q, k, v)] + [mask]
    grads = torch.autograd.grad(attnjourney.attention(*x, **options).square().sum(), x, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), x)
run(256)
Path("/proc/self/clear_refs").write_text("5")
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
run(n)
print((peak() - before) << 10)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak memory that can be reset")
@pytest.mark.parametrize("which", ["jvp", "double_backward"])
def test_memory_grows_with_the_length_alone(which):
    n = 8192
    command = [sys.executable, "-c", MEMORY, str(n), which]
    root = str(Path(__file__).parents[2])
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root})
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < n * n  # bytes; (n, n) in float32 is four times that


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "query_tangent",
            torch.ones(2, 4, 9, 3).double(),
            r"query_tangent: expected shape \(2, 4, 9, 4\), got \(2, 4, 9, 3\)",
        ),
        ("key_tangent", torch.ones(2, 2, 11, 4), "key_tangent: expected the dtype of key"),
        ("sinks_tangent", torch.ones(4).double(), "sinks_tangent: expected None where sinks is None"),
        ("lse", torch.ones(2, 4, 9), "lse: expected dtype torch.float64"),
    ],
    ids=["shape", "dtype", "absent", "lse"],
)
def test_errors(name, value, message):
    q, k, v, arguments = make([])
    out, lse, stats = ops.attention_forward(q, k, v, **arguments)
    call = {**arguments, "query": q, "key": k, "value": v, "attn_mask": None, "out": out, "lse": lse, "stats": stats}
    call[name] = value
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.attention_jvp(**call)


@pytest.mark.parametrize("names", [(), ("mask", "sinks", "alibi", "dropout")], ids="-".join)
def test_opcheck(names):
    q, k, v, arguments = make(names)
    mask = arguments.pop("attn_mask", None)
    out, lse, stats = ops.attention_forward(q, k, v, mask, **arguments)
    tangents = {f"{n}_tangent": torch.ones_like(x) for n, x in (("query", q), ("value", v))}
    options = {**arguments, **tangents}
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attention_jvp.default, (q, k, v, mask, out, lse, stats), options, test_utils=tests)
    given = (out, None, q, k, v, mask, out, lse, stats, out, lse)
    torch.library.opcheck(ops.attention_backward_jvp.default, given, options, test_utils=tests)


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    pair = 2 * 2 * 8 * 8 * 4
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(attnjourney.attention, (q, k, v), (q, k, v))
    assert counter.get_total_flops() == pair * (2 + 5)
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(lambda q: attnjourney.attention(q, k, v), (q,), (q,))
    assert counter.get_total_flops() == pair * (2 + 3)
    q.requires_grad_()
    grad = torch.autograd.grad(attnjourney.attention(q, k, v).sum(), q, create_graph=True)[0]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(grad.sum(), q)
    assert counter.get_total_flops() == pair * (3 + 7)


def test_jvp_and_double_backward_take_part_in_every_check():
    """The checks above compare what is not zero."""
    *tensors, arguments = make(NAMES)
    for kind in (jvp, double_backward):
        assert all(x.abs().max() > 1e-3 for x in kind(attnjourney.attention, tensors, arguments).values())
