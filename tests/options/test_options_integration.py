"""The options under torch.compile, torch.func, autocast, checkpointing and opcheck."""

import ast
from pathlib import Path

import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import attnjourney
from tests.support.options_cases import OPTIONS, check, compatible, make
from tests.support.testing import random_tensor

attention = attnjourney.attention
SETS = [
    ("left", "bottom_right", "sinks", "softcap"),
    ("prefix", "alibi", "key_lengths"),
    ("alibi_per_item", "query_lengths", "row_mask"),
    ("mask", "sinks", "window", "dropout"),
]


def trained(names, dtype=torch.float32, **sizes):
    """(tensors, arguments) whose float tensors require grad, and those."""
    assert compatible(names)
    *tensors, arguments = make(names, dtype, **sizes)
    leaves = [*tensors, *(x for x in arguments.values() if isinstance(x, torch.Tensor) and x.is_floating_point())]
    return tensors, arguments, [x.requires_grad_() for x in leaves]


@pytest.mark.parametrize("names", SETS, ids="-".join)
def test_compiles_whole_with_dynamic_shapes(names):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for q_len, kv_len in ((9, 11), (17, 23)):
        tensors, arguments, leaves = trained(names, q_len=q_len, kv_len=kv_len)
        results = [function(*tensors, return_lse=True, **arguments) for function in (attention, compiled)]
        for ours, theirs in zip(*results):
            assert torch.equal(ours, theirs)
        grads = [torch.autograd.grad(out.sum(), leaves) for out, _ in results]
        for ours, theirs in zip(*grads):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("names", SETS, ids="-".join)
def test_opcheck(names):
    tensors, arguments, _ = trained(names)
    mask, is_causal = arguments.pop("attn_mask", None), arguments.pop("is_causal", False)
    dropout_p = arguments.pop("dropout_p", 0.0)
    if "causal_alignment" in arguments:
        arguments["causal_alignment"] = 1
    for operator in (torch.ops.attnjourney.attention.default, torch.ops.attnjourney.attention_forward.default):
        torch.library.opcheck(operator, (*tensors, mask, dropout_p, is_causal), arguments)


@pytest.mark.parametrize("names", SETS[:3], ids="-".join)
def test_vmap_and_per_sample_gradients_equal_a_loop(names):
    tensors, arguments, _ = trained(names, torch.float64)
    trainable = [n for n in ("attn_mask", "sinks", "alibi_slopes") if n in arguments]
    samples = [torch.stack([x.detach(), 2 * x.detach(), -x.detach()]) for x in tensors]
    fixed = [arguments.pop(n).detach() for n in trainable]

    def loss(q, k, v, *others):
        out, lse = attention(q, k, v, return_lse=True, **arguments, **dict(zip(trainable, others)))
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()

    for batched in (True, False):  # the options per sample, or one for all
        others = [torch.stack([x, x + 0.1, x - 0.1]) if batched else x for x in fixed]
        dims = (0, 0, 0, *[0 if batched else None] * len(fixed))
        argnums = tuple(range(3 + len(fixed)))
        together = vmap(grad(loss, argnums), dims)(*samples, *others)
        for i in range(3):
            own = [x[i] for x in samples] + [x[i] if batched else x for x in others]
            for ours, theirs in zip(together, grad(loss, argnums)(*own)):
                torch.testing.assert_close(ours[i], theirs)


def test_autocast_leaves_sinks_and_slopes():
    q, k, v, arguments = make(["alibi", "sinks", "mask"], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(q, k, v, return_lse=True, **arguments)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    arguments["attn_mask"] = arguments["attn_mask"].bfloat16()
    assert torch.equal(out, attention(*(x.bfloat16() for x in (q, k, v)), **arguments))


def test_checkpointing_and_a_given_seed():
    tensors, arguments, leaves = trained(("dropout", "sinks", "left"))
    first = torch.autograd.grad(attention(*tensors, **arguments).square().sum(), leaves)
    again = checkpoint(lambda *x: attention(*x, **arguments), *tensors, use_reentrant=False).square().sum()
    for a, b in zip(first, torch.autograd.grad(again, leaves)):
        assert torch.equal(a, b)


def test_only_lse_is_differentiated():
    tensors, arguments, leaves = trained(("sinks",), torch.float64)
    _, lse = attention(*tensors, return_lse=True, **arguments)
    grads = torch.autograd.grad(lse.sum(), leaves, allow_unused=True)
    assert grads[0].any() and grads[3].any() and not grads[2].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_rank_five(name):
    *tensors, arguments = make([name])
    whole = attention(*tensors, **arguments)
    tensors = [x.unflatten(0, (1, 2)) for x in tensors]
    assert torch.equal(attention(*tensors, **arguments)[0], whole)
    check(tensors, arguments)


def test_explain_takes_every_option():
    for name in OPTIONS:
        q, k, v, arguments = make([name])
        arguments.pop("dropout_seed", None)
        assert attnjourney.explain(q, k, v, **arguments)["forward"]["items"] > 0


def test_a_plain_call_with_the_defaults_spelled_out_is_the_same():
    q, k, v = (random_tensor((2, 3, 20, 8), seed=s) for s in range(3))
    spelled = dict(window_size=(-1, -1), prefix_length=0, softcap=0.0, causal_alignment="top_left")
    assert torch.equal(attention(q, k, v), attention(q, k, v, **spelled))


def test_a_window_is_an_argument_of_a_compiled_function():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, window: attention(x, x, x, window_size=window), fullgraph=True, backend="eager", dynamic=True
    )
    x = random_tensor((1, 2, 12, 8))
    for window in ((3, 0), (5, 2), (-1, -1)):
        torch.testing.assert_close(compiled(x, window), attention(x, x, x, window_size=window))


def test_no_tuples_are_compared_by_identity():
    """Dynamo of torch 2.11 and 2.12 does not trace it, and an equal tuple of the caller's is another object."""
    package = Path(attnjourney.__file__).parent
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    constants = {
        target.id
        for _, node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }
    assert "UNBOUNDED" in constants
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path, node in nodes
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Tuple) or getattr(side, "id", getattr(side, "attr", None)) in constants
    ]
    assert not found
