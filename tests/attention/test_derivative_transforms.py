"""Second derivatives of `attention` through torch.func and torch.autograd: every nesting, batched, as torch has it."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from attnjourney import attention, attention_weights, reference, varlen_attention
from tests.attention.test_torch_func import Names
from tests.support.options_cases import make

CASES = {
    "plain": (),
    "everything": ("mask", "sinks", "alibi", "softcap", "causal", "key_lengths"),
    "dropout": ("dropout", "window"),
}


def loss_and_input(function, names, of="query"):
    q, k, v, arguments = make(names, q_heads=2, kv_heads=1, q_len=3, kv_len=4, dim=3, v_dim=2)
    named = {"query": q, "key": k, "value": v, **arguments}

    def loss(x):
        call = {**named, of: x}
        tensors = [call.pop(name) for name in ("query", "key", "value")]
        out, lse = function(*tensors, return_lse=True, **call)
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).square().sum()

    return loss, named[of]


TRANSFORMS = {
    "hessian": hessian,
    "reverse_over_forward": lambda f: jacrev(jacfwd(f)),
    "reverse_over_reverse": lambda f: jacrev(jacrev(f)),
    "hvp_forward_over_reverse": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),))[1],
    "hvp_reverse_over_forward": lambda f: lambda x: grad(lambda y: jvp(f, (y,), (x.cos(),))[1])(x),
    "hvp_reverse_over_reverse": lambda f: lambda x: vjp(grad(f), x)[1](x.cos())[0],
    "gradient_of_a_gradient_norm": lambda f: grad(lambda x: grad(f)(x).square().sum()),
    "hvp_per_sample": lambda f: lambda x: vmap(lambda t: jvp(grad(f), (x,), (t,))[1])(torch.stack([x.cos(), x.sin()])),
}


@pytest.mark.parametrize("of", ["query", "key", "value"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, transform, of):
    if of != "query" and case == "dropout":
        pytest.skip("one input is enough: dropout batches by one call a sample")
    results = []
    for function in (attention, reference.attention):
        loss, x = loss_and_input(function, CASES[case], of)
        results.append(TRANSFORMS[transform](loss)(x))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    assert results[0].abs().max() > 1e-3


@pytest.mark.parametrize("of", ["attn_mask", "sinks", "alibi_slopes"])
def test_hessian_by_options(of):
    results = []
    for function in (attention, reference.attention):
        loss, x = loss_and_input(function, CASES["everything"], of)
        results += [hessian(loss)(x), jacrev(jacfwd(loss))(x)]
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-9, atol=1e-11)


def test_a_batch_of_directions_is_one_call():
    loss, x = loss_and_input(attention, CASES["everything"])
    with Names() as mode:
        hessian(loss)(x)
    assert sorted(mode.names) == ["attention_backward", "attention_backward_jvp", "attention_forward", "attention_jvp"]
    with Names() as mode:
        jacfwd(loss)(x)
    assert mode.names == ["attention_forward", "attention_jvp"]


def test_mixed_second_derivative():
    q, k, v, arguments = make(["sinks"], dim=3)
    results = []
    for function in (attention, reference.attention):
        f = lambda q, k, function=function: function(q, k, v, **arguments).square().sum()  # noqa: E731
        results.append(grad(lambda q: (grad(f, 1)(q, k) * k.cos()).sum())(q))  # noqa: B023
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_forward_mode_without_torch_func():
    """forward_ad: values, no tangents, and reverse over forward."""
    q, k, v, arguments = make(["mask", "causal"], dim=4)
    x = q.clone().requires_grad_()
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(attention(q, k, v, **arguments)).tangent is None
        out = forward_ad.unpack_dual(attention(forward_ad.make_dual(x, q.cos()), k, v, **arguments))
    # outside of the level: inside, the gradient would have a tangent of its own, a third derivative
    second = torch.autograd.grad(out.tangent.square().sum(), x)[0]

    def change(x):
        return jvp(lambda x: reference.attention(x, k, v, **arguments), (x,), (q.cos(),))

    torch.testing.assert_close((out.primal, out.tangent), change(q), rtol=1e-10, atol=1e-12)
    expected = grad(lambda x: change(x)[1].square().sum())(q)
    torch.testing.assert_close(second, expected, rtol=1e-10, atol=1e-12)


def test_forward_over_reverse_without_torch_func():
    q, k, v, _ = make(())
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    results = []
    for function in (attention, reference.attention):
        x = q.clone().requires_grad_()
        with forward_ad.dual_level():
            out = function(forward_ad.make_dual(x, q.cos()), k, v)
            (g,) = torch.autograd.grad(out.square().sum(), x)
            results.append(forward_ad.unpack_dual(g).tangent)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def penalty(function, x):
    """A training step with a gradient penalty (Gulrajani et al. 2017, arXiv 1704.00028)."""
    leaves = [t.detach().clone().requires_grad_() for t in x]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [t.grad for t in leaves]


def test_gradient_penalty_with_checkpoint_hooks_and_autocast():
    q, k, v, arguments = make(["causal", "sinks"])
    expected = penalty(lambda *x: reference.attention(*x, **arguments), (q, k, v))
    plain = lambda *x: attention(*x, **arguments)  # noqa: E731
    torch.testing.assert_close(penalty(plain, (q, k, v)), expected, rtol=1e-9, atol=1e-11)
    saved = penalty(lambda *x: checkpoint(plain, *x, use_reentrant=False), (q, k, v))
    torch.testing.assert_close(saved, expected, rtol=1e-9, atol=1e-11)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        torch.testing.assert_close(penalty(plain, (q, k, v)), expected, rtol=1e-9, atol=1e-11)
    q, k, v = (x.float() for x in (q, k, v))
    del arguments["sinks"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = penalty(plain, (q, k, v))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


def test_compile():
    q, k, v, arguments = make(["causal"])

    def product(q, t):
        return jvp(lambda x: attention(x, k, v, **arguments), (q,), (t,))[1]

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, q.cos()), product(q, q.cos()))


@pytest.mark.parametrize(
    "transform, message",
    [
        (lambda f: jacfwd(jacfwd(f)), "forward-mode automatic differentiation, nested twice"),
        (lambda f: lambda x: jvp(lambda y: jvp(f, (y,), (x,))[1], (x,), (x,)), "nested twice"),
        (lambda f: jacrev(hessian(f)), "the third derivative"),
        (lambda f: jacfwd(hessian(f)), "attnjourney::attention: "),
        (lambda f: grad(lambda x: jacrev(jacrev(f))(x).sum()), "the third derivative"),
    ],
    ids=["jacfwd_twice", "jvp_twice", "reverse", "forward", "reverse_three_times"],
)
def test_what_there_is_not_raises(transform, message):
    loss, x = loss_and_input(attention, ())
    with pytest.raises(NotImplementedError, match=message):
        transform(loss)(x)


def test_third_derivative_in_eager_mode_raises():
    q, k, v = (x.requires_grad_() for x in make(())[:3])
    g = torch.autograd.grad(attention(q, k, v, enable_gqa=True).square().sum(), q, create_graph=True)[0]
    g = torch.autograd.grad(g.square().sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="the third derivative"):
        g.sum().backward()


def test_varlen():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((9, 4, 3), (11, 2, 3), (11, 2, 2)))
    ends = torch.tensor([0, 4, 4, 8]), torch.tensor([0, 5, 7, 11])
    options = dict(is_causal=True, sinks=torch.randn(4, dtype=torch.float64, generator=generator), softcap=2.0)
    inputs = tuple(x.requires_grad_() for x in (q, k, v, options["sinks"]))

    def call(function):
        return lambda q, k, v, sinks: function(q, k, v, *ends, **{**options, "sinks": sinks})

    ours, theirs = call(varlen_attention), call(reference.varlen_attention)
    torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(ours, inputs, check_fwd_over_rev=True, fast_mode=True)
    plain = [x.detach() for x in inputs]
    for transform in (lambda f: hessian(lambda x: f(x, *plain[1:]).square().sum())(plain[0]),):
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rows", [(2, 3), (1, 4)])
def test_second_derivative_of_short_sequences(rows):
    """Two items of 4 heads' width, packed: the lengths take no part in the graph."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(rows), 4, dtype=torch.float64, generator=generator)
    ends = torch.tensor([0, rows[0], sum(rows)])
    results = []
    for function in (varlen_attention, reference.varlen_attention):
        leaf = x.clone().requires_grad_()
        heads = leaf.unflatten(-1, (2, 2))
        out = function(heads, heads, heads, ends, ends)
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        results.append((first, torch.autograd.grad(first.square().sum(), leaf)[0]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_weights_lose_no_tangent():
    q, k, _, _ = make((), q_heads=2)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="attention_weights"):
            attention_weights(forward_ad.make_dual(q, q), k)
    for transform in (lambda f: jvp(f, (q,), (q,)), lambda f: grad(lambda x: f(x).sum())(q)):
        with pytest.raises((NotImplementedError, RuntimeError), match="attention_weights"):
            transform(lambda x: attention_weights(x, k))
