"""nn.MultiheadAttention beside torch.nn.MultiheadAttention."""

import pytest
import torch
from testing import random_tensor

from attnjourney import nn


@pytest.mark.parametrize("bias", [True, False])
def test_module_has_torchs_parameters(bias):
    modules = []
    for cls, options in ((nn.MultiheadAttention, {}), (torch.nn.MultiheadAttention, dict(batch_first=True))):
        torch.manual_seed(5)
        modules.append(cls(8, 2, bias=bias, **options))
    ours, theirs = (m.state_dict() for m in modules)
    assert list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert [n for n, _ in modules[0].named_parameters()] == [n for n, _ in modules[1].named_parameters()]
    modules[0].load_state_dict(theirs, strict=True)
    modules[1].load_state_dict(ours, strict=True)
    x = random_tensor((2, 3, 8))
    torch.testing.assert_close(modules[0](x), modules[1](x, x, x)[0])
    y = random_tensor((2, 4, 8), seed=1)
    torch.testing.assert_close(modules[0](x, y), modules[1](x, y, y)[0])


def test_module_drops_in_training_only():
    module = nn.MultiheadAttention(8, 2, dropout=0.5, dtype=torch.float64)
    x = random_tensor((2, 3, 8), torch.float64)
    module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    torch.manual_seed(1)
    first = module(x)
    assert not torch.equal(first, module(x))
    torch.manual_seed(1)
    assert torch.equal(first, module(x))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(num_heads=3), ValueError, "num_heads: expected a divisor of embed_dim, 8, got 3"),
        (dict(num_heads=0), ValueError, "num_heads"),
        (dict(add_bias_kv=True), NotImplementedError, "add_bias_kv: only False"),
        (dict(add_zero_attn=True), NotImplementedError, "add_zero_attn"),
        (dict(kdim=4), NotImplementedError, "kdim: only 8"),
        (dict(vdim=4), NotImplementedError, "vdim: only 8"),
        (dict(batch_first=False), NotImplementedError, "batch_first: only True"),
    ],
)
def test_module_refuses_what_it_does_not_do(options, error, message):
    with pytest.raises(error, match=message):
        nn.MultiheadAttention(8, **{"num_heads": 2, **options})
    nn.MultiheadAttention(8, 2, kdim=8, vdim=8)
