"""Longformer's attention beside its dense formula and transformers' layer; nothing of size N x N."""

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.reference.longformer_attention import visible
from tests.support.testing import DTYPES, FLOOR_ULPS, assert_close_to_reference, pairs, plain_run, random_tensor, row_id

B, H, D = 2, 4, 8


def inputs(dtype, length, seed=0):
    return [random_tensor((B, H, length, D), dtype, seed=seed + i, outliers=False) for i in range(6)]


def masks(length, globals_, padding):
    """global_mask (a different number a batch item) and key_padding_mask."""
    is_global = torch.zeros(B, length, dtype=torch.bool)
    is_global[0, 0] = is_global[0, length // 2] = is_global[1, length - 1] = True
    padded = torch.zeros(B, length, dtype=torch.bool)
    padded[0, 2 * length // 3 :] = True  # also a global token of the second item, and one in the middle
    padded[1, length // 3] = True
    return is_global if globals_ else None, padded if padding else None


def run(function, tensors, dtype, **options):
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = function(*leaves, **options)
    grad = random_tensor(out.shape, tensors[0].dtype, seed=9, outliers=False).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [out.detach()] + [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads)]


def roundings(tensors, global_mask, key_padding_mask, window, dilation, is_causal):
    """What rounding alone may do to [out, gradients]: of the local rows' attention and of the global rows'."""
    local, everything, is_global, exists = visible(
        tensors[0], window, dilation, global_mask, key_padding_mask, is_causal
    )
    grad = random_tensor(tensors[0].shape, tensors[0].dtype, seed=9, outliers=False) * exists[:, None, :, None]
    rows = is_global[:, None, :, None]
    _, own = plain_run([*tensors[:3], local], grad * ~rows)
    if global_mask is None:
        return [own[0], *own[2:5], 0, 0, 0]
    _, all_ = plain_run([*tensors[3:], everything], grad * rows)
    return [torch.where(rows, all_[0], own[0]), *own[2:5], *all_[2:5]]


ROWS = pairs(
    dtype=DTYPES,
    length=[1, 7, 40, 65],
    window=[0, 1, 5, 100],
    dilation=[1, 3, (1, 2, 1, 4)],
    is_causal=[False, True],
    globals_=[False, True],
    padding=[False, True],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_equals_the_dense_formula(row):
    dtype, length = row["dtype"], row["length"]
    global_mask, key_padding_mask = masks(length, row["globals_"], row["padding"])
    options = dict(window=row["window"], dilation=row["dilation"], is_causal=row["is_causal"])
    options |= dict(global_mask=global_mask, key_padding_mask=key_padding_mask)
    tensors = inputs(dtype, length)
    actual = run(attnjourney.longformer_attention, tensors, dtype, **options)
    expected = run(reference.longformer_attention, tensors, torch.float64, **options)
    plain = run(reference.longformer_attention, tensors, dtype, **options)
    unavoidable = roundings(tensors, **options)
    for i, (a, p, e) in enumerate(zip(actual, plain, expected)):
        if dtype == torch.float64:
            assert (a - e).abs().max() < 1e-12, i
        else:
            rounding = FLOOR_ULPS * torch.finfo(dtype).eps * e.abs() + unavoidable[i]
            assert_close_to_reference(a, p, e, 2 if i == 0 else 3, f"result {i}", rounding)


def test_a_global_key_inside_the_window_counts_once():
    query, key, value = (torch.zeros(1, 1, 5, 2) for _ in range(3))
    value[0, 0, 2] = 1.0
    mask = torch.tensor([[False, False, True, False, False]])
    out = attnjourney.longformer_attention(query, key, value, window=1, global_mask=mask)[0, 0, :, 0]
    torch.testing.assert_close(out, torch.tensor([1 / 3, 1 / 3, 1 / 5, 1 / 3, 1 / 3]))


def test_padded_tokens_may_hold_nan_and_give_nothing():
    tensors = inputs(torch.float32, 30)
    global_mask, padding = masks(30, True, True)
    results = []
    for filler in (0.0, torch.nan):
        filled = [t.masked_fill(padding[:, None, :, None], filler) for t in tensors]
        results.append(
            run(
                attnjourney.longformer_attention, filled, torch.float32, window=3,
                global_mask=global_mask, key_padding_mask=padding,
            )
        )  # fmt: skip
    for a, b in zip(*results):
        assert a.isfinite().all() and torch.equal(a, b)
        assert a.masked_select(padding[:, None, :, None]).count_nonzero() == 0


@pytest.mark.parametrize("globals_", [True, False])
def test_transformers_layer(globals_):
    transformers = pytest.importorskip("transformers")
    longformer = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        hidden_size=24, num_attention_heads=3, attention_window=[8], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = longformer.LongformerSelfAttention(config, 0)
    ours = attnjourney.nn.LongformerSelfAttention.from_transformers(theirs)
    assert ours.window == 4  # attention_window is the total width
    x = torch.randn(2, 32, 24)  # in float64 their -finfo.max overflows in a softmax that is float32, and gives NaN
    is_global, padding = torch.zeros(2, 32, dtype=torch.bool), torch.zeros(2, 32, dtype=torch.bool)
    if globals_:
        is_global[0, 0] = is_global[0, 9] = is_global[1, 3] = True
    padding[1, 25:] = True
    given = torch.zeros(2, 32).masked_fill(padding, -10000.0).masked_fill(is_global, 10000.0)
    expected = theirs(
        x, attention_mask=given, is_index_masked=padding, is_index_global_attn=is_global, is_global_attn=globals_
    )[0]
    out = ours(x, global_mask=is_global, key_padding_mask=padding)
    seen = ~padding  # theirs leaves padded rows as they fall where they are not 0
    near = dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[seen], expected[seen], **near)
    assert out[padding].count_nonzero() == 0
    grad = torch.randn_like(out)[seen]
    names = [name for name, _ in theirs.named_parameters() if globals_ or "global" not in name]
    wanted = torch.autograd.grad(expected[seen], [theirs.get_parameter(n) for n in names], grad)
    for name, a, b in zip(names, torch.autograd.grad(out[seen], [ours.get_parameter(n) for n in names], grad), wanted):
        torch.testing.assert_close(a, b, **near, msg=lambda text, name=name: f"{name}: {text}")


def test_long_sequences_keep_memory_linear():
    length = 32_768
    leaves = [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]
    is_global = torch.zeros(1, length, dtype=torch.bool)
    is_global[0, [0, 1, length // 2]] = True
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage()) or t, lambda t: t):
        out = attnjourney.longformer_attention(*leaves, window=32, global_mask=is_global, dilation=2)
    kept = sum({s.data_ptr(): s.nbytes() for s in saved}.values())
    assert kept < 40 * leaves[0].nbytes  # an N x N bool mask alone would be 1024 times one of them
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


REFUSED = {
    "query: expected 4 dimensions": dict(query=torch.zeros(2, 3)),
    "key: expected shape": dict(key=torch.zeros(1, 2, 5, 4)),
    "expected all three or none": dict(global_query=torch.zeros(1, 2, 6, 4)),
    "window: expected": dict(window=-1),
    "dilation: expected": dict(dilation=[1, 2, 3]),
    "dilation: expected a positive": dict(dilation=0),
    "global_mask: expected shape": dict(global_mask=torch.zeros(1, 5, dtype=torch.bool)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit(message):
    arguments = {name: torch.zeros(1, 2, 6, 4) for name in ("query", "key", "value")} | REFUSED[message]
    with pytest.raises(ValueError, match=message):
        attnjourney.longformer_attention(**arguments)
    with pytest.raises(RuntimeError, match="key_padding_mask: expected dtype torch.bool"):
        attnjourney.longformer_attention(*(torch.zeros(1, 2, 6, 4),) * 3, key_padding_mask=torch.zeros(1, 6))


def test_module_trains():
    torch.manual_seed(0)
    layer = attnjourney.nn.LongformerSelfAttention(24, 4, 3, dilation=(1, 1, 2, 2), is_causal=True, dropout=0.1)
    x, is_global = torch.randn(2, 20, 24), torch.zeros(2, 20, dtype=torch.bool)
    is_global[:, 0] = is_global[:, 5] = True
    layer(x, global_mask=is_global).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert layer.eval()(x).shape == x.shape  # no global token: their projections are not computed
