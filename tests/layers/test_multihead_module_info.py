"""PyTorch's own samples of its modules that hold attention, with ours inside, beside PyTorch's results, in float64 and
float32."""

import copy

import pytest
import torch
from torch import nn

from attnjourney import replace_attention
from tests.support.testing import FLOOR_ULPS, GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

try:
    from torch.testing._internal.common_modules import module_db
except ImportError as missing:  # expecttest is not installed, or a torch that moved it
    pytest.skip(f"no ModuleInfo samples: {missing}", allow_module_level=True)

# how many there are in torch 2.13 that differ in more than `training`, which decides on dropout alone here
SAMPLES = {"MultiheadAttention": 64, "TransformerEncoder": 21, "TransformerEncoderLayer": 39,
           "TransformerDecoderLayer": 67, "Transformer": 64}  # fmt: skip


def signature(x):
    """Everything of an argument but a tensor's numbers."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), str(x.dtype)
    if isinstance(x, nn.Module):
        parts = [(m, {k: v for k, v in vars(m).items() if isinstance(v, (bool, int, float))}) for m in x.modules()]
        return [(type(m).__name__, facts) for m, facts in parts]
    if isinstance(x, dict):
        return {name: signature(y) for name, y in x.items()}
    if isinstance(x, (list, tuple)):
        return [signature(y) for y in x]
    return getattr(x, "__qualname__", x)


def in_dtype(x, dtype):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, x)


def samples(info):
    """(module, its arguments) in float32, every configuration once."""
    seen = set()
    for training in (False, True):
        torch.manual_seed(1)
        arguments = dict(device="cpu", dtype=torch.float32, requires_grad=False, training=training)
        for sample in info.module_inputs_func(info, **arguments):
            made, given = sample.constructor_input, sample.forward_input
            name = repr(signature([made.args, made.kwargs, given.args, given.kwargs]))
            if name not in seen:
                seen.add(name)
                torch.manual_seed(0)
                module = info.module_cls(*made.args, **made.kwargs).train(training)
                without_dropout(module)
                yield module, (given.args, given.kwargs)


def leaves(x):
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t, x
    )


def results(module, arguments):
    torch.manual_seed(0)
    args, kwargs = leaves(arguments)
    outputs = [y for y in torch.utils._pytree.tree_leaves(module(*args, **kwargs)) if isinstance(y, torch.Tensor)]
    inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    inputs = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    loss = sum(y.sum() if y.dim() == 0 else (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
               for y in outputs)  # fmt: skip
    return outputs, torch.autograd.grad(loss, inputs, allow_unused=True)


def without_dropout(module):
    """torch's bits of dropout are not ours."""
    for part in module.modules():
        if isinstance(part, (nn.Dropout, nn.MultiheadAttention)):
            setattr(part, "p" if isinstance(part, nn.Dropout) else "dropout", 0.0)


def nudged(module, arguments):
    """Both in float64, every number by half an ulp of float32 up or down: what rounding of the inputs alone brings."""

    def nudge(x):
        return x * (1 + 2.0**-24 * torch.randint(0, 2, x.shape).mul(2).sub(1)) if x.is_floating_point() else x

    module = copy.deepcopy(module)
    for p in module.parameters():
        p.data = nudge(p.data)
    return module, torch.utils._pytree.tree_map_only(torch.Tensor, nudge, arguments)


def pooled(kind, runs):
    """All numbers of several runs of a sample side by side, each tensor in units of its exact norm, the last run's."""
    rows = []
    for tensors in zip(*(run[kind] for run in runs), strict=True):
        if tensors[-1] is not None and tensors[-1].norm() > 0:
            rows.append([t.double().flatten() / tensors[-1].norm() for t in tensors])
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample(name):
    """In float64 the results are torch's. In float32 the tolerance rule holds for all samples of a module together, in
    L2 norm: a tensor of a sample has nine numbers or so, where plain PyTorch is now and then exact by luck, and so are
    we; and a layer norm of four numbers that are nearly one brings any rounding out, so that the largest error of all
    samples is one number of one of them."""
    info = next(info for info in module_db if info.module_cls.__name__ == name)
    checked, outputs, gradients = 0, [], []
    for plain, arguments in samples(info):
        exact, wide = copy.deepcopy(plain).double(), in_dtype(arguments, torch.float64)
        runs = []
        for theirs, given in ((plain, arguments), (exact, wide)):
            ours = copy.deepcopy(theirs)
            assert replace_attention(ours)
            runs.append((results(ours, given), results(theirs, given)))
        (single, rounded), (double, right) = runs
        torch.testing.assert_close(double, right, rtol=1e-9, atol=1e-9)
        torch.manual_seed(checked)
        near = results(*nudged(exact, wide))
        outputs += pooled(0, (single, rounded, near, right))
        gradients += pooled(1, (single, rounded, near, right))
        checked += 1
    assert checked >= SAMPLES[name]
    for what, rows, factor in (("outputs", outputs, OUTPUT_FACTOR), ("gradients", gradients, GRADIENT_FACTOR)):
        actual, plain, near, right = (torch.cat(column) for column in zip(*rows))
        rounding = FLOOR_ULPS * (near - right).abs()
        assert_close_to_reference(actual, plain, right, factor, f"{name}'s {what}", rounding, norms=("L2",))
