"""PyTorch's own samples of scaled_dot_product_attention, through `attention` with autograd, beside PyTorch's result."""

import math

import pytest
import torch
import torch.nn.functional as F

import attnjourney
from attnjourney import reference
from tests.support.testing import DTYPES, assert_close_to_reference, describe, plain_run

try:
    from torch.testing._internal.common_methods_invocations import op_db
except ImportError as missing:  # expecttest is not installed, or a torch that moved it
    pytest.skip(f"no OpInfo samples: {missing}", allow_module_level=True)

OPERATOR = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


def samples(dtype):
    torch.manual_seed(0)
    return list(OPERATOR.sample_inputs("cpu", dtype, requires_grad=True))


def grad_out_of(out):
    return torch.ones_like(out).cumsum(-1)


def outcome(function, tensors, options, dtype):
    """[out, gradients...] in `dtype` under one seed."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    options = {
        n: t.detach().to(dtype).requires_grad_() if isinstance(t, torch.Tensor) else t for n, t in options.items()
    }
    torch.manual_seed(1)
    out = function(*leaves, **options)
    wanted = leaves + [t for t in options.values() if isinstance(t, torch.Tensor)]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad_out_of(out))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample(dtype):
    checked = 0
    for sample in samples(dtype):
        tensors, options = (sample.input, *sample.args), dict(sample.kwargs)
        if tensors[0].dim() != tensors[1].dim():
            # PyTorch broadcasts a query without a batch dimension against keys that have one; here ranks are equal
            with pytest.raises(ValueError, match="rank of query"):
                attnjourney.attention(*tensors, **options)
            continue
        dropout = options.get("dropout_p", 0) > 0
        # PyTorch's dropout draws other bits: compare with the reference, which draws ours
        function = reference.attention if dropout else F.scaled_dot_product_attention
        expected, plain, got = (
            outcome(f, tensors, options, t)
            for f, t in ((function, torch.float64), (function, dtype), (attnjourney.attention, dtype))
        )
        mask, keep = options.pop("attn_mask", None), None
        if dropout:
            *lead, q_len = tensors[0].shape[:-1]
            torch.manual_seed(1)
            seed = torch.randint(1 << 62, (), dtype=torch.int64)
            keep = reference.dropout_keep_mask(seed, 1, math.prod(lead), q_len, tensors[1].size(-2), 0.5)
            keep = keep.view(*lead, q_len, tensors[1].size(-2))
        _, roundings = plain_run((*tensors, mask), grad_out_of(got[0]), keep=keep, **options)
        del roundings[1]  # of lse
        text = describe(*tensors, mask, **options)
        for i, results in enumerate(zip(got, plain, expected)):
            assert_close_to_reference(*results, 3.0 if i else 2.0, f"result {i} of {text}", roundings[i])
        checked += 1
    assert checked >= 10


def test_the_same_call_without_gradients():
    for sample in samples(torch.float64):
        if sample.input.dim() == sample.args[0].dim() and not sample.kwargs.get("dropout_p"):
            with torch.no_grad():
                expected = F.scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)
                torch.testing.assert_close(attnjourney.attention(sample.input, *sample.args, **sample.kwargs), expected)
