"""Inputs, weights and masks for the tests of mha, and the operator's formula in plain PyTorch."""

import math

import torch
import torch.nn.functional as F

from attnjourney.reference.mha import attention_mask
from tests.support.arithmetic import roundings_of
from tests.support.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference, plain_run, random_tensor

MASKS = ("attn_mask", "key_padding_mask")


def make_weights(embed, dtype=torch.float64, bias=True):
    """in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias; biases that are not 0, unlike at initialisation."""
    shapes = (3 * embed, embed), (3 * embed,), (embed, embed), (embed,)
    tensors = [random_tensor(s, dtype, seed=20 + i, outliers=False) / math.sqrt(embed) for i, s in enumerate(shapes)]
    return [t if bias or t.dim() == 2 else None for t in tensors]


def make_inputs(sharing, batch, q_len, kv_len, embed, dtype=torch.float64):
    """query, key, value; names written together in `sharing` are one tensor."""
    tensors = {
        group: random_tensor((batch, q_len if "q" in group else kv_len, embed), dtype, seed=i, outliers=False)
        for i, group in enumerate(sharing.split())
    }
    return [next(t for group, t in tensors.items() if name in group) for name in "qkv"]


def make_mask(kind, shape, dtype):
    """kind: none, bool (True is blocked), float (some -inf) or float32. Key 0 stays visible to every row."""
    if kind == "none":
        return None
    blocked = random_tensor(shape, torch.float64, seed=30 + len(shape), outliers=False) > 0.3
    blocked[..., 0] = False
    if kind == "bool":
        return blocked
    mask = random_tensor(shape, torch.float32 if kind == "float32" else dtype, seed=40 + len(shape), outliers=False)
    return mask.masked_fill(blocked, -math.inf)


def leaf_of(t, dtype=None):
    """A leaf with t's numbers that requires grad, if t is floating."""
    return t if t is None or t.dtype == torch.bool else t.detach().to(dtype or t.dtype).requires_grad_()


def run(function, inputs, heads, weights, masks, grad_out, dtype=None, **options):
    """[out, gradients of the distinct inputs, of the weights, of the floating masks]."""
    distinct = {id(t): leaf_of(t, dtype) for t in inputs}
    weights, masks = [leaf_of(t, dtype) for t in weights], [leaf_of(t, dtype) for t in masks]
    out = function(*[distinct[id(t)] for t in inputs], heads, *weights, **dict(zip(MASKS, masks)), **options)
    leaves = [t for t in (*distinct.values(), *weights, *masks) if t is not None and t.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def torch_mha(
    query, key, value, heads, in_weight, in_bias, out_weight, out_bias, *, attn_mask, key_padding_mask, is_causal
):
    """torch.nn.MultiheadAttention on these tensors; is_causal, which is a hint there, written into the mask."""
    module = torch.nn.MultiheadAttention(
        query.size(-1), heads, bias=in_bias is not None, batch_first=True, dtype=query.dtype
    )
    names = dict(
        zip(
            ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"),
            (in_weight, in_bias, out_weight, out_bias),
        )
    )
    if is_causal:
        future = torch.ones(query.size(1), key.size(1), dtype=torch.bool).triu(1)
        if attn_mask is None or attn_mask.dtype == torch.bool:
            attn_mask = future if attn_mask is None else attn_mask | future
        else:
            attn_mask = attn_mask.masked_fill(future, -math.inf)
    masks = [attn_mask, key_padding_mask]
    if len({m.dtype for m in masks if m is not None}) > 1:  # torch wants one dtype for both
        zero = torch.zeros((), dtype=query.dtype)
        masks = [zero.masked_fill(m, -math.inf) if m.dtype == torch.bool else m.to(query.dtype) for m in masks]
    kwargs = dict(attn_mask=masks[0], key_padding_mask=masks[1], need_weights=False)
    parameters = {name: t for name, t in names.items() if t is not None}
    return torch.func.functional_call(module, parameters, (query, key, value), kwargs)[0]


class PlainAttention(torch.autograd.Function):
    """attention and its gradients by testing.plain_run: the operator's own formula, untiled, in the inputs' dtype."""

    @staticmethod
    def forward(ctx, query, key, value, attn_mask, is_causal):
        ctx.inputs, ctx.options = (query, key, value, attn_mask), dict(is_causal=is_causal)
        with torch.enable_grad():
            return plain_run(ctx.inputs, torch.zeros_like(query), **ctx.options)[0][0]

    @staticmethod
    def backward(ctx, grad_out):
        with torch.enable_grad():
            _, _, *gradients = plain_run(ctx.inputs, grad_out, **ctx.options)[0]
        return (*gradients, *[None] * (5 - len(gradients)))


def plain_mha(
    query, key, value, heads, in_weight, in_bias, out_weight, out_bias, *, attn_mask, key_padding_mask, is_causal
):
    biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), in_weight.chunk(3), biases)
    )
    out = PlainAttention.apply(q, k, v, attention_mask(attn_mask, key_padding_mask, heads), is_causal)
    return F.linear(out.transpose(1, 2).flatten(-2), out_weight, out_bias)


def assert_results(actual, plain, expected, in_double):
    """The rule of testing.py on what run() gives, the first being the output.

    in_double(): the layer's formula in plain PyTorch in float64, from which comes what rounding must cost
    (arithmetic.py; in 16 bits the rule's own 4 ulp).
    """
    __tracebackhide__ = True
    roundings = [None] * len(actual)
    if actual[0].dtype.itemsize > 2:
        roundings = roundings_of(in_double, expected, actual[0].dtype)
    for i, results in enumerate(zip(actual, plain, expected, roundings, strict=True)):
        got, same_dtype, exact, rounding = results
        factor = GRADIENT_FACTOR if i else OUTPUT_FACTOR
        if rounding is not None and got.dtype.itemsize < actual[0].dtype.itemsize:  # a float32 mask's gradient
            rounding = rounding() + torch.finfo(got.dtype).eps * exact.abs()
        assert_close_to_reference(got, same_dtype, exact, factor, f"result {i}", rounding)
