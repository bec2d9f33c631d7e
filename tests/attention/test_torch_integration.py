"""`attention` inside PyTorch's machinery: opcheck, compile, export, checkpointing, autocast, modes, threads."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import attnjourney
from attnjourney import reference

ops = torch.ops.attnjourney
attention = attnjourney.attention


def qkv(q=(2, 2, 3, 4), k=None, v=None, dtype=torch.float32, requires_grad=True):
    k = k or q
    generator = torch.Generator().manual_seed(sum(q) + sum(k))
    shapes = (q, k, v or k)
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_(requires_grad) for s in shapes]


def clones(inputs):
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


def gradients(function, inputs):
    """(result, *gradients of a sum of squares)."""
    out = function(*inputs)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def ours(self):
        return [name.split(".")[1] for name in self.names if name.startswith("attnjourney.")]


class Block(nn.Module):
    """Self-attention between two projections, the smallest thing people compile and export."""

    def __init__(self, dropout_p=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.dropout_p = nn.Linear(8, 24), nn.Linear(8, 8), dropout_p

    def forward(self, x):  # (batch, length, 8)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(attention(q, k, v, dropout_p=self.dropout_p, is_causal=True).transpose(1, 2).flatten(2))


# ---------------------------------------------------------------------------------------------------- opcheck

OPCHECK = {
    "plain": ({}, None),
    "causal_scale": (dict(is_causal=True, scale=0.5), None),
    "float_mask": ({}, torch.zeros(3, 5)),
    "bool_mask": ({}, torch.ones(2, 1, 3, 5, dtype=torch.bool).tril()),
    "gqa": (dict(enable_gqa=True), None),
}


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck(name):
    options, mask = OPCHECK[name]
    inputs = qkv((2, 4, 3, 4), (2, 2 if name == "gqa" else 4, 5, 4), (2, 2 if name == "gqa" else 4, 5, 6))
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
    opcheck(ops.attention, (*inputs, mask), options)
    opcheck(ops.attention_forward, (*inputs, mask), options)
    inputs = [x.detach() for x in inputs]
    mask = None if mask is None else mask.detach()
    out, lse, stats = ops.attention_forward(*inputs, mask, **options)
    for grad_lse, need in ((None, 1), (torch.ones_like(lse), 15)):
        opcheck(ops.attention_backward, (out, grad_lse, *inputs, mask, out, lse, stats), {**options, "need": need})


def test_opcheck_dropout_and_bfloat16():
    inputs = qkv((2, 1, 3, 4), dtype=torch.bfloat16)
    options = dict(dropout_p=0.4, dropout_seed=torch.tensor(7))
    opcheck(ops.attention_forward, inputs, options)
    inputs = [x.detach() for x in inputs]
    out, lse, stats = ops.attention_forward(*inputs, **options)
    opcheck(ops.attention_backward, (out, None, *inputs, None, out, lse, stats), options)


@pytest.mark.parametrize("shapes", [((3, 4), (5, 4)), ((1, 3, 4), (6, 5, 4)), ((2, 1, 3, 4), (1, 4, 5, 4))])
def test_fake_shapes_equal_real(shapes):
    """Broadcast batch and head dimensions; the fake kernels also serve meta tensors."""
    inputs = qkv(*shapes)
    real = ops.attention_forward(*inputs)
    meta = [x.detach().to("meta").requires_grad_() for x in inputs]
    fake = ops.attention_forward(*meta)
    for r, f in zip(real, fake):
        assert f.device.type == "meta"
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())
    out = attention(*meta, dropout_p=0.5)
    out.sum().backward()
    assert [x.grad.shape for x in meta] == [x.shape for x in inputs]


# ---------------------------------------------------------------------------------------------------- compile, export


def compile_and_compare(backend, dropout_p=0.0):
    torch._dynamo.reset()
    module, x = Block(dropout_p), torch.randn(2, 3, 8)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    results = []
    for function in (module, compiled):
        torch.manual_seed(1)
        module.zero_grad()
        out = function(x)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0])
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x), results[0][0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_compile_aot_eager(dropout_p):
    compile_and_compare("aot_eager", dropout_p)


def test_compile_inductor():
    compile_and_compare("inductor")


def test_compile_float_mask_and_autocast():
    torch._dynamo.reset()
    inputs = [*qkv(), torch.randn(3, 3).requires_grad_()]

    def function(*x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(*x)

    eager = gradients(function, inputs)
    compiled = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs)
    assert compiled[0].dtype == torch.bfloat16
    torch.testing.assert_close(compiled, eager)


def test_compile_dynamic_shapes_one_frame():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), fullgraph=True, backend=counter)
    for batch, q_len, kv_len in ((2, 5, 7), (3, 7, 4), (4, 9, 9)):
        inputs = qkv((batch, 2, q_len, 4), (batch, 2, kv_len, 4))
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(
            gradients(compiled, inputs), gradients(lambda *x: attention(*x, is_causal=True), inputs)
        )
    assert counter.frame_count == 1


def test_compile_per_sample_gradients():
    torch._dynamo.reset()
    inputs = [x.detach() for x in qkv((3, 2, 4, 4))]
    per_sample = vmap(grad(lambda *x: attention(*x, is_causal=True).square().sum(), (0, 1, 2)))
    compiled = torch.compile(per_sample, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), per_sample(*inputs))


def test_compiled_errors_keep_their_type():
    torch._dynamo.reset()
    query, key, value = qkv()
    compiled = torch.compile(attention, backend="aot_eager")
    with pytest.raises(ValueError, match="dropout_p: expected a number between 0 and 1"):
        compiled(query, key, value, dropout_p=1.5)


def test_export():
    module, x = Block().eval(), torch.randn(2, 3, 8)
    dynamic = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}
    program = torch.export.export(module, (x,), dynamic_shapes=(dynamic,))
    assert "attnjourney.attention.default" in {str(node.target) for node in program.graph.nodes}
    longer = torch.randn(4, 6, 8)
    torch.testing.assert_close(program.module()(longer), module(longer))
    torch.testing.assert_close(program.run_decompositions().module()(longer), module(longer))


# ---------------------------------------------------------------------------------------------------- eager autograd


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint(use_reentrant, dropout_p):
    """The second forward drops the same weights."""
    inputs = qkv()
    torch.manual_seed(2)
    expected = gradients(lambda *x: attention(*x, dropout_p=dropout_p), inputs)
    torch.manual_seed(2)
    leaves = clones(inputs)
    out = checkpoint(lambda *x: attention(*x, dropout_p=dropout_p), *leaves, use_reentrant=use_reentrant)
    out.square().sum().backward()
    torch.testing.assert_close((out.detach(), *(x.grad for x in leaves)), expected)


@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpoint(keep):
    """A policy may keep what attention gave and recompute the rest."""

    def policy(context, operator, *args, **kwargs):
        ours = keep and operator is ops.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def function(*x):
        return attention(*x).sin()

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    inputs = qkv()
    with Names() as mode:
        checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts).square().sum().backward()
    torch.testing.assert_close([x.grad for x in inputs], list(gradients(function, clones(inputs))[1:]))
    assert mode.ours() == ["attention_forward"] * (1 if keep else 2) + ["attention_backward"]


def test_saved_tensor_hooks():
    inputs = qkv()
    packed = []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*inputs)
    out.square().sum().backward()
    assert packed == [(2, 2, 3, 4)] * 4 + [(2, 2, 3), (2, 2, 3, 2)]  # query, key, value, out, lse, stats
    torch.testing.assert_close([x.grad for x in inputs], list(gradients(attention, clones(inputs))[1:]))
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(gradients(attention, inputs), gradients(attention, clones(inputs)))


@pytest.mark.smoke
def test_inference_mode():
    inputs = [x.detach() for x in qkv()]
    expected = attention(*inputs)
    with torch.inference_mode():
        torch.testing.assert_close(attention(*inputs), expected)
        fresh = [x.clone() for x in inputs]
        out = attention(*fresh)
        assert out.is_inference()
        torch.manual_seed(4)
        dropped = attention(*fresh, dropout_p=0.5)
    torch.testing.assert_close(out.clone(), expected)
    torch.manual_seed(4)
    torch.testing.assert_close(dropped.clone(), attention(*inputs, dropout_p=0.5))


@pytest.mark.smoke
def test_dropout_follows_manual_seed():
    query, key, value = qkv((1, 2, 8, 4))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append([attention(query, key, value, dropout_p=0.5).detach() for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1]) and not torch.equal(draws[0][0], draws[2][0])
    state = torch.get_rng_state()
    attention(query, key, value)  # no dropout, no draw
    assert torch.equal(state, torch.get_rng_state())


def test_two_threads():
    failures = []

    def work(seed):
        try:
            inputs = [torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
            expected = gradients(reference.attention, inputs)
            for _ in range(100):
                torch.testing.assert_close(gradients(attention, inputs), expected)
        except BaseException as error:  # noqa: B036
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# ---------------------------------------------------------------------------------------------------- modes


def test_dispatch_mode_sees_raw_operators():
    inputs = qkv()
    with Names() as mode:
        attention(*inputs).sum().backward()
    assert mode.ours() == ["attention_forward", "attention_backward"]
    plain = [x.detach() for x in inputs]
    with torch.inference_mode(), Names() as mode:
        attention(*plain)
    assert mode.ours() == ["attention"]


@pytest.mark.parametrize("kv_heads, v_dim", [(4, 8), (2, 6)])
def test_flop_counter(kv_heads, v_dim):
    shapes = (2, 4, 5, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, v_dim)
    inputs = qkv(*shapes)
    options = dict(enable_gqa=kv_heads != 4)
    # torch's formula for grouped heads, written as the ungrouped one it equals
    full = shapes[0], (2, 4, 7, 8), (2, 4, 7, v_dim)
    forward = sdpa_flop_count(*full)
    backward = sdpa_backward_flop_count((2, 4, 5, v_dim), *full)
    with FlopCounterMode(display=False) as counter:
        out = attention(*inputs, **options)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == backward
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        attention(*inputs, **options)
    assert counter.get_total_flops() == forward
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(*(torch.randn(s) for s in full))
    assert counter.get_total_flops() == forward


# ---------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_autocast(dtype, mask):
    """The dtypes of SDPA, and exactly the values of a call with inputs cast by hand."""
    query, key, value = qkv((1, 2, 8, 8))
    key = key.detach().to(dtype).requires_grad_()  # as projections inside the region give
    if mask is not None:
        mask = torch.rand(8, 8) < 0.7 if mask == "bool" else torch.randn(8, 8).requires_grad_()
    inputs = [query, key, value, *([mask] if mask is not None and mask.requires_grad else [])]

    with torch.autocast("cpu", dtype=dtype):
        out = attention(query, key, value, mask)
        assert out.dtype == F.scaled_dot_product_attention(query, key, value, mask).dtype == dtype
        raw, lse, _ = ops.attention_forward(query, key, value, mask)
    assert torch.equal(raw, out) and lse.dtype == torch.float32
    cast = [x.to(dtype) for x in inputs]
    by_hand = attention(*cast, *([mask] if len(cast) == 3 else []))
    assert torch.equal(out, by_hand)
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]
    torch.testing.assert_close(grads, torch.autograd.grad(by_hand.float().square().sum(), inputs))


def test_autocast_leaves_float64_and_disabled_regions():
    double = qkv(dtype=torch.float64)
    single = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*double).dtype == F.scaled_dot_product_attention(*double).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert attention(*single).dtype == torch.float32


class _Kept(torch.nn.Module):
    """A function of some of the batch, whose number only a run tells."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, kept):
        return self.function(x[kept])


def _with_weights():
    layer = attnjourney.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    return lambda x: layer(x.flatten(2), x.flatten(2), x.flatten(2))[1]


def _block_mask(batch):
    seen = torch.tensor([[True, False], [True, True]])
    return attnjourney.BlockMask.from_dense(seen.expand(batch, 1, 2, 2), 16)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: attnjourney.attention(x, x, x),
        lambda x: attnjourney.attention(x, x, x, torch.ones(x.shape[0], 1, 2, 2, dtype=torch.bool)),
        lambda x: attnjourney.attention(x, x[:, :1], x[:, :1], key_lengths=torch.ones(x.shape[0], dtype=torch.int64)),
        lambda x: attnjourney.attention(x[:, 0], x[:, 0], x[:, 1]),
        lambda x: attnjourney.attention_weights(x, x),
        lambda x: attnjourney.infini_attention(x, x, x, torch.zeros(6), segment_length=2),
        lambda x: attnjourney.longformer_attention(x, x, x, window=1),
        _with_weights(),
        lambda x: attnjourney.attention(x, x, x, _block_mask(x.shape[0])),
    ],
    ids=[
        "attention",
        "mask",
        "lengths",
        "rank 3",
        "attention_weights",
        "infini",
        "longformer",
        "mha weights",
        "blocks",
    ],
)
def test_exports_with_a_batch_known_at_run_time(function):
    x, module = torch.randn(5, 6, 2, 8), _Kept(function)
    exported = torch.export.export(module, (x, torch.tensor([True, False, True, True, False]))).module()
    for kept in ([1], [], [0, 1, 2, 3, 4]):
        chosen = torch.zeros(5, dtype=torch.bool)
        chosen[kept] = True
        torch.testing.assert_close(exported(x, chosen), module(x, chosen))
