"""PyTorch's own samples of its modules that hold attention, with ours inside, beside PyTorch's results."""

import copy

import pytest
import torch
from torch import nn

from attnjourney import replace_attention

try:
    from torch.testing._internal.common_modules import module_db
except ImportError as missing:  # expecttest is not installed, or a torch that moved it
    pytest.skip(f"no ModuleInfo samples: {missing}", allow_module_level=True)

# how many there are in torch 2.13, in training and in evaluation
SAMPLES = {"MultiheadAttention": 128, "TransformerEncoder": 74, "TransformerEncoderLayer": 74,
           "TransformerDecoderLayer": 134, "Transformer": 128}  # fmt: skip


def leaves(x):
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t, x
    )


def results(module, given):
    torch.manual_seed(0)
    args, kwargs = leaves((given.args, given.kwargs))
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample(name):
    info = next(info for info in module_db if info.module_cls.__name__ == name)
    checked = 0
    for training in (False, True):
        arguments = dict(device="cpu", dtype=torch.float64, requires_grad=False, training=training)
        for sample in info.module_inputs_func(info, **arguments):
            made = sample.constructor_input
            torch.manual_seed(0)
            theirs = info.module_cls(*made.args, **made.kwargs).to(torch.float64).train(training)
            without_dropout(theirs)
            ours = copy.deepcopy(theirs)
            assert replace_attention(ours)
            expected, actual = results(theirs, sample.forward_input), results(ours, sample.forward_input)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
            checked += 1
    assert checked >= SAMPLES[name]
