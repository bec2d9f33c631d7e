"""PyTorch's own samples of multi_head_attention_forward, through nn.MultiheadAttention, beside PyTorch's results."""

import pytest
import torch
import torch.nn.functional as F

from attnjourney import nn

try:
    from torch.testing._internal.common_methods_invocations import op_db
except ImportError as missing:  # expecttest is not installed, or a torch that moved it
    pytest.skip(f"no OpInfo samples: {missing}", allow_module_level=True)

OPERATOR = next(op for op in op_db if op.name == "nn.functional.multi_head_attention_forward")
NAMES = ("key", "value", "embed_dim", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
         "add_zero_attn", "dropout_p", "out_proj.weight", "out_proj.bias")  # fmt: skip


def module_of(sample, dropout_p):
    """Our module with the sample's weights as leaves; torch has bias_k as (embed,), the module as (1, 1, embed)."""
    a, kwargs = dict(zip(NAMES, sample.args)), sample.kwargs
    module = nn.MultiheadAttention(
        a["embed_dim"], a["num_heads"], dropout_p, add_bias_kv=True, dtype=sample.input.dtype
    )
    if kwargs["use_separate_proj_weight"]:
        del module.in_proj_weight
        module.register_parameter("in_proj_weight", None)
        module._qkv_same_embed_dim = False
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            setattr(module, name, torch.nn.Parameter(kwargs[name].detach()))
    else:
        module.in_proj_weight.data = a["in_proj_weight"].detach()
    module.in_proj_bias.data = a["in_proj_bias"].detach()
    module.out_proj.weight.data, module.out_proj.bias.data = a["out_proj.weight"].detach(), a["out_proj.bias"].detach()
    module.bias_k.data, module.bias_v.data = (a[n].detach().reshape(1, 1, -1) for n in ("bias_k", "bias_v"))
    return module


def test_every_sample_forward():
    checked = 0
    for sample in OPERATOR.sample_inputs("cpu", torch.float64, requires_grad=False):
        args = list(sample.args)
        args[NAMES.index("dropout_p")] = 0.0  # torch's bits are not ours
        key, value = args[:2]
        masks = dict(attn_mask=sample.kwargs["attn_mask"])
        for need_weights in (True, False):
            expected = F.multi_head_attention_forward(
                sample.input, *args, **{**sample.kwargs, "training": False}, need_weights=need_weights
            )
            actual = module_of(sample, 0.0)(sample.input, key, value, need_weights=need_weights, **masks)
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
        checked += 1
    assert checked >= 100


def test_every_sample_backward():
    checked = 0
    for sample in OPERATOR.sample_inputs("cpu", torch.float64, requires_grad=True):
        args = list(sample.args)
        args[NAMES.index("dropout_p")] = 0.0
        inputs = [sample.input, *args[:2], sample.kwargs["attn_mask"]]
        weights = [dict(zip(NAMES, args))[n] for n in NAMES if n.endswith(("weight", "bias", "bias_k", "bias_v"))]
        expected = F.multi_head_attention_forward(sample.input, *args, **{**sample.kwargs, "training": False})
        module = module_of(sample, 0.0)
        actual = module(sample.input, *args[:2], attn_mask=sample.kwargs["attn_mask"])
        parameters = dict(module.named_parameters())
        parameters = [parameters[n] for n in NAMES if n.endswith(("weight", "bias", "bias_k", "bias_v"))]
        gradients = []
        for (out, averaged), wanted in ((expected, weights), (actual, parameters)):
            loss = out.cumsum(-1).sum() + averaged.cumsum(-1).square().sum()
            gradients.append(torch.autograd.grad(loss, inputs + wanted))
        for a, b in zip(*gradients, strict=True):
            # the samples' scores are in the thousands: an ulp of them, 1e-12, enters the weights and what follows
            torch.testing.assert_close(b.reshape(a.shape), a, rtol=1e-8, atol=1e-8)
        checked += 1
    assert checked >= 1
