"""What ranks do with modules: those of attnjourney.nn under torch's parallel wrappers against one rank."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import attnjourney
from attnjourney import attention
from attnjourney import nn as layers
from attnjourney.distributed import context_parallel, shard, tensor_parallel_plan, unshard
from tests.distributed.dtensor_calls import idle, mesh_of, numbers, whole
from tests.distributed.ranks import groups

MODULES = {
    "gqa": lambda: layers.GroupedQueryAttention(16, 8, 4, rope=1e4, bias=True),
    "gqa options": lambda: layers.GroupedQueryAttention(
        16, 4, 2, rope=1e4, window_size=(3, 0), softcap=5.0, sinks=True, qk_norm=True
    ),
    "mla": lambda: layers.MultiheadLatentAttention(
        16, 4, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=3, rope=1e4
    ),
    "mla direct": lambda: layers.MultiheadLatentAttention(
        16, 4, q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=3
    ),
    "linear": lambda: layers.LinearAttention(16, 4, 4),
    "gpt": lambda: layers.CausalSelfAttention(16, 4),
    "gqa dropout": lambda: layers.GroupedQueryAttention(16, 8, 4, dropout=0.5),
    "gpt dropout": lambda: layers.CausalSelfAttention(16, 4, dropout=0.5),
}


GLOBAL = torch.arange(12).view(2, 6) % 5 == 0
PADDING = torch.arange(12).view(2, 6) % 6 == 5
MASK = numbers(5, 2 * 4, 6, 6)
# by their plans alone; called as called(module)(x)
WHOLE = {
    "mha": lambda: layers.MultiheadAttention(16, 4, batch_first=True),
    "mha keys": lambda: layers.MultiheadAttention(16, 4, kdim=16, vdim=16, add_bias_kv=True, add_zero_attn=True),
    "mha masks": lambda: layers.MultiheadAttention(16, 4, kdim=16, vdim=8, bias=False, batch_first=True),
    "infini": lambda: layers.InfiniAttention(16, 4, segment_length=4, rope=1e4, bias=True, update="delta"),
    "infini grouped": lambda: layers.InfiniAttention(16, 4, 1, segment_length=3),
    "infini memory": lambda: layers.InfiniAttention(16, 4, segment_length=3),
    "longformer": lambda: layers.LongformerSelfAttention(16, 4, 2, dilation=[1, 2, 1, 3]),
    "longformer global": lambda: layers.LongformerSelfAttention(16, 4, 1, is_causal=True),
}
CALLS = {
    "mha": lambda m, x: m(x, x, x)[0],
    "mha keys": lambda m, x: with_weights(*m(x, x, x, is_causal=True)),
    "mha masks": lambda m, x: with_weights(
        *m(x, x, x[..., :8], key_padding_mask=PADDING, attn_mask=MASK, average_attn_weights=False)
    ),
    "infini memory": lambda m, x: m(x[:, 3:], memory=m(x[:, :3], return_memory=True)[1]),
    "longformer global": lambda m, x: m(x, global_mask=GLOBAL, key_padding_mask=PADDING),
}


def with_weights(out, weights):
    return out + weights.square().sum()


def called(name, module):
    return partial(CALLS[name], module) if name in CALLS else module


def made(name):
    torch.manual_seed(0)
    return (MODULES | WHOLE)[name]().double()


def step(module, x, owner=None):
    """(output, gradients) of x and of every parameter of the module, or of its owner."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)  # of dropout
    out = module(x)
    (out * numbers(1, *out.shape)).sum().backward()
    of_owner = {n: p.grad for n, p in (owner or module).named_parameters() if p.grad is not None}
    return out.detach(), {"x": x.grad} | of_owner


def difference(actual, expected):
    """What is wrong, as text."""
    if not torch.allclose(actual[0], expected[0], rtol=1e-9, atol=1e-11):
        return f"output off by {(actual[0] - expected[0]).abs().max()}"
    for name, e in expected[1].items():
        if name not in actual[1]:
            return f"no gradient of {name}"
        a = whole(actual[1][name])
        if not torch.allclose(a, e, rtol=1e-9, atol=1e-11):
            return f"gradient of {name} off by {(a - e).abs().max()}"
    return ""


def in_heads(rank, size):
    """{module: what is wrong} of modules by their plans; how much of each this rank has."""
    wrong = {}
    for name in () if idle(rank, size) else MODULES | WHOLE:
        module, x = made(name), numbers(2, 2, 6, 16)
        call = called(name, module)
        try:
            expected = step(call, x, module)
            module.zero_grad()
            parallelize_module(module, mesh_of(size), tensor_parallel_plan(module, size))
            wrong[name] = difference(step(call, x, module), expected)
            if not wrong[name]:
                module.requires_grad_(False)
                wrong[name] = difference(step(call, x, module), (expected[0], {"x": expected[1]["x"]}))
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    return {name: text for name, text in wrong.items() if text}


def wrapped(rank, how):
    """What is wrong with a module under DistributedDataParallel or fully_shard, each of four ranks with its rows."""
    module, x = made("gqa"), numbers(2, 4, 6, 16)
    expected = step(module, x)[1]
    module.zero_grad()
    if how == "ddp":
        run = torch.nn.parallel.DistributedDataParallel(module)
    else:
        run = fully_shard(module, mesh=mesh_of(4))
    run(x[rank : rank + 1]).mul(numbers(1, 4, 6, 16)[rank : rank + 1]).sum().backward()
    found = {n: whole(p.grad) * 4 for n, p in module.named_parameters()}  # both average
    off = [n for n, g in found.items() if not torch.allclose(g, expected[n], rtol=1e-9, atol=1e-11)]
    return {how: f"gradients of {off}"} if off else {}


class Residual(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer = made(name)

    def forward(self, x):
        return x + self.layer(x)


def in_pipeline(rank, schedule):
    """{parameter: what is wrong} of layers that two ranks have one after the other, microbatches going through both."""
    if idle(rank, 2):
        return {}
    stages = [torch.nn.Sequential(*map(Residual, names)) for names in (("gqa", "linear"), ("mla", "gpt"))]
    x, weights = numbers(2, 4, 6, 16), numbers(1, 1, 6, 16)
    out = stages[1](stages[0](x))
    (out * weights).sum().backward()
    expected = [{n: p.grad for n, p in stage.named_parameters()} for stage in stages]
    for stage in stages:
        stage.zero_grad()

    stage = pipelining.PipelineStage(stages[rank], rank, 2, torch.device("cpu"), group=groups[2])
    run = getattr(pipelining, schedule)(stage, 2, loss_fn=lambda y, t: (y * weights).sum(), scale_grads=False)
    found = run.step(x) if rank == 0 else run.step(target=torch.zeros_like(x))
    wrong = {} if rank == 0 or torch.allclose(found, out, rtol=1e-9, atol=1e-11) else {"output": "differs"}
    for name, p in stages[rank].named_parameters():
        if not torch.allclose(p.grad, expected[rank][name], rtol=1e-9, atol=1e-11):
            wrong[name] = f"off by {(p.grad - expected[rank][name]).abs().max()}"
    return wrong


def refused(rank):
    """The errors of calls that DTensor has no rule for, as text."""
    q = numbers(0, 4, 4, 6, 8)
    mesh, other = mesh_of(2), mesh_of(4)
    shared = distribute_tensor(q, mesh, [Shard(1)], src_data_rank=None)
    elsewhere = distribute_tensor(q, other, [Shard(1)], src_data_rank=None)
    lengths = torch.zeros(4, dtype=torch.int64)
    batch = distribute_tensor(q, mesh, [Shard(0)], src_data_rank=None)
    rows = distribute_tensor(q[0], mesh, [Shard(0)], src_data_rank=None)
    packed = numbers(1, 24, 8), None, numbers(2, 8, 8), None

    def append():
        torch.ops.attnjourney.kv_cache_append(batch.clone(), shared.clone(), lengths, batch, batch)

    calls = (
        lambda: attnjourney.mha(rows, rows, rows, 1, *packed, dropout_p=0.5),
        lambda: attention(shared, elsewhere, shared),
        append,
        lambda: tensor_parallel_plan(made("gqa"), 3),
        lambda: tensor_parallel_plan(torch.nn.Linear(2, 2), 2),
        lambda: context_parallel(torch.nn.Linear(2, 2)),
        lambda: context_parallel(made("linear"), order="zigzag"),
        lambda: tensor_parallel_plan(layers.MultiheadAttention(16, 4, dropout=0.5), 2),
    )
    texts = []
    for call in calls:
        try:
            call()
            texts.append("")
        except (ValueError, RuntimeError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def by_the_rule_of_another_call(rank, trained_first):
    """Whether gradients are those of one rank where calls of the same shapes, but other options, came before."""
    mesh, q = mesh_of(2), numbers(0, 4, 4, 6, 8)
    if idle(rank, 2):
        return
    options = ({}, dict(is_causal=True), dict(window_size=(2, 0)), dict(return_lse=True), dict(softcap=3.0))
    for trained in (trained_first, not trained_first):
        for option in options:
            for dim in (2, 1):
                whole = q.clone().requires_grad_(trained)
                shared = distribute_tensor(q, mesh, [Shard(dim)], src_data_rank=None).requires_grad_(trained)
                actual, expected = (attention(x, x, x, **option) for x in (shared, whole))
                actual, expected = ((x if isinstance(x, tuple) else (x,)) for x in (actual, expected))
                for a, e in zip(actual, expected, strict=True):
                    torch.testing.assert_close(a.full_tensor(), e)
                if trained:
                    actual[-1].full_tensor().sum().backward()
                    expected[-1].sum().backward()
                    torch.testing.assert_close(shared.grad.full_tensor(), whole.grad)


def through_shards(module, group, order, x):
    return unshard(module(shard(x, group, order, 1)), group, order, 1)


def in_context(rank, size, order, scheme, in_heads):
    """{module: what is wrong} of modules over shards of the sequence; in_heads: and of heads, on 2 x 2 ranks."""
    wrong = {}
    rows, heads = (groups["across"], 2) if in_heads else (groups[size], 1)
    for name in () if idle(rank, size) else (*MODULES, "infini"):
        module, x = made(name), numbers(2, 2, 15, 16)
        if (name in ("linear", "infini") and order != "contiguous") or (in_heads and name == "gqa options"):
            continue
        try:
            expected = step(module, x)
            module.zero_grad()
            plan = tensor_parallel_plan(module, heads) if in_heads else None
            if plan is not None and scheme != "ring":  # either may come first
                parallelize_module(module, mesh_of(2), plan)
            context_parallel(module, rows, order=order, scheme=scheme)
            if plan is not None and scheme == "ring":
                parallelize_module(module, mesh_of(2), plan)
            out, gradients = step(partial(through_shards, module, rows, order), x, module)
            total = {n: whole(g).clone() for n, g in gradients.items()}
            for g in total.values():
                dist.all_reduce(g, group=rows)
            wrong[name] = difference((out, total), expected)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    return {name: text for name, text in wrong.items() if text}


def under(rank, how):
    """Whether attention on shares of heads gives one rank's result and gradient."""
    if idle(rank, 2):
        return True
    q = numbers(0, 4, 4, 6, 8)
    shared = distribute_tensor(q, mesh_of(2), [Shard(1)], src_data_rank=None)

    def loss(x):
        return attention(x, x, x, is_causal=True).square()

    if how == "inference":
        with torch.inference_mode():
            return torch.allclose(loss(shared).full_tensor(), loss(q))
    if how == "func":
        grads = [torch.func.grad(lambda x: whole(loss(x)).sum())(x) for x in (shared, q)]
        return torch.allclose(grads[0].full_tensor(), grads[1])
    run = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = shared.requires_grad_(), q.clone().requires_grad_()
    outs = run(leaves[0]).full_tensor(), loss(leaves[1])
    for out in outs:
        out.sum().backward()
    return torch.allclose(*outs) and torch.allclose(leaves[0].grad.full_tensor(), leaves[1].grad)
