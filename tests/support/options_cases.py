"""Every option of attention by name, and the check of a call with any of them against the fp64 reference."""

import torch

import attnjourney
from attnjourney import reference
from attnjourney.reference.dropout import keep_mask_of
from tests.support.testing import (
    GRADIENT_FACTOR,
    LSE_DTYPE,
    OUTPUT_FACTOR,
    ULPS,
    assert_close_to_reference,
    plain_run,
    random_tensor,
)

SEED = 5
TRAINED = ("attn_mask", "sinks", "alibi_slopes")  # options with a gradient, beside query, key and value


def lengths(batch, most):
    return torch.tensor([(most * (i + 1)) // batch if i else max(0, most - 3) for i in range(batch)])


# name -> the arguments it brings, for query (B, Hq, L, E) and key length S
OPTIONS = {
    "causal": lambda q, s: dict(is_causal=True),
    "bottom_right": lambda q, s: dict(is_causal=True, causal_alignment="bottom_right"),
    "window": lambda q, s: dict(window_size=(3, 2)),
    "left": lambda q, s: dict(is_causal=True, window_size=(4, -1)),
    "prefix": lambda q, s: dict(is_causal=True, window_size=(2, -1), prefix_length=3),
    "key_lengths": lambda q, s: dict(key_lengths=lengths(len(q), s)),
    "query_lengths": lambda q, s: dict(query_lengths=lengths(len(q), q.size(2)).int()),
    "softcap": lambda q, s: dict(softcap=1.5),
    "sinks": lambda q, s: dict(sinks=random_tensor((q.size(1),), q.dtype, 11)),
    "alibi": lambda q, s: dict(alibi_slopes=random_tensor((q.size(1),), q.dtype, 12).abs() / 8),
    "alibi_per_item": lambda q, s: dict(alibi_slopes=random_tensor(q.shape[:2], q.dtype, 12, outliers=False) / 8),
    "mask": lambda q, s: dict(attn_mask=random_tensor((q.size(1), q.size(2), s), q.dtype, 13, outliers=False)),
    "row_mask": lambda q, s: dict(attn_mask=random_tensor((len(q), 1, 1, s), q.dtype, 13, outliers=False)),
    "column_mask": lambda q, s: dict(
        attn_mask=random_tensor((1, q.size(1), q.size(2), 1), q.dtype, 13, outliers=False)
    ),
    "bool_mask": lambda q, s: dict(attn_mask=random_tensor((q.size(2), s), seed=14, outliers=False) > -1),
    "dropout": lambda q, s: dict(dropout_p=0.25, dropout_seed=torch.tensor(SEED)),
    "scale": lambda q, s: dict(scale=-0.3),
}
EXCLUSIVE = [
    {"mask", "row_mask", "column_mask", "bool_mask"},
    {"alibi", "alibi_per_item"},
    {"window", "left", "prefix"},
]


def compatible(names):
    return all(len(group & set(names)) < 2 for group in EXCLUSIVE)


def make(names, dtype=torch.float64, batch=2, q_heads=4, kv_heads=2, q_len=9, kv_len=11, dim=4, v_dim=3):
    """(query, key, value, arguments)."""
    shapes = ((batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim))
    q, k, v = (random_tensor(shape, dtype, s, outliers=False) for s, shape in enumerate(shapes))
    arguments = {"enable_gqa": True}
    for name in names:
        arguments.update(OPTIONS[name](q, kv_len))
    return q, k, v, arguments


def leaves_of(tensors, arguments, dtype=None):
    """The same call with leaves that require grad (in another dtype): (tensors, arguments, leaves by name)."""
    arguments, leaves = dict(arguments), {}

    def leaf(name, x):
        leaves[name] = x.detach().to(dtype or x.dtype).clone().requires_grad_()
        return leaves[name]

    tensors = [leaf(name, x) for name, x in zip(("query", "key", "value"), tensors)]
    for name in TRAINED:
        x = arguments.get(name)
        if x is not None and x.dtype != torch.bool:
            arguments[name] = leaf(name, x)
    return tensors, arguments, leaves


def run(function, tensors, arguments, dtype=None, grad_seed=20):
    """({name: out, lse or gradient}, (grad_out, grad_lse)) of a loss over out and lse."""
    tensors, arguments, leaves = leaves_of(tensors, arguments, dtype)
    out, lse = function(*tensors, return_lse=True, **arguments)
    grad_out = random_tensor(out.shape, torch.float64, grad_seed, outliers=False).to(tensors[0].dtype)
    grad_lse = random_tensor(lse.shape, torch.float64, grad_seed + 1, outliers=False).to(lse.dtype)
    grad_lse = grad_lse.masked_fill(~lse.isfinite(), 0.0)
    loss = (out * grad_out).sum() + torch.where(lse.isfinite(), lse, 0.0).mul(grad_lse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    results = {"out": out.detach(), "lse": lse.detach(), **{f"grad_{n}": g for n, g in zip(leaves, grads)}}
    return results, (grad_out, grad_lse)


def plain_attention(tensors, arguments, gradients, ulps):
    """plain_run of attention's arguments."""
    arguments = dict(arguments)
    keep, seed = None, arguments.pop("dropout_seed", None)
    if seed is not None:
        shape = (*tensors[0].shape[:-1], tensors[1].size(-2))
        keep = keep_mask_of(shape, seed, arguments["dropout_p"], arguments.pop("origin", (0, 0, 0, 0)))
    return plain_run((*tensors, arguments.pop("attn_mask", None)), *gradients, keep, ulps, **arguments)


def check(tensors, arguments, ours=attnjourney.attention, theirs=reference.attention, plain=plain_attention, label=""):
    """Asserts the rule of testing.py for out, lse and every gradient of a call through autograd."""
    __tracebackhide__ = True
    return compare(*run(ours, tensors, arguments), tensors, arguments, theirs, plain, label)


def compare(actual, gradients, tensors, arguments, theirs=reference.attention, plain=plain_attention, label=""):
    """The same for what `run` has given."""
    __tracebackhide__ = True
    exact, _ = run(theirs, tensors, arguments, torch.float64)
    values, roundings = plain(tensors, arguments, gradients, ULPS)
    for (name, x), same_dtype, rounding in zip(actual.items(), values, roundings, strict=True):
        expected = LSE_DTYPE.get(tensors[0].dtype, torch.float32) if name == "lse" else same_dtype.dtype
        assert x.dtype == expected, f"{label} {name}: {x.dtype}"
        factor = OUTPUT_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
        assert_close_to_reference(x, same_dtype, exact[name], factor, f"{label} {name}", rounding)
    return actual
