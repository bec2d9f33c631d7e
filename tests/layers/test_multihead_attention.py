"""nn.MultiheadAttention beside torch.nn.MultiheadAttention: construction, state dicts, results, gradients, errors."""

import inspect
import itertools
import math

import pytest
import torch

from attnjourney import nn
from attnjourney.nn import _weights
from tests.support.testing import random_tensor

torch_module = torch.nn.MultiheadAttention
ARGUMENTS = [
    {}, dict(bias=False), dict(kdim=6), dict(vdim=10, bias=False), dict(kdim=6, vdim=10, batch_first=True),
    dict(add_bias_kv=True), dict(add_zero_attn=True), dict(add_bias_kv=True, add_zero_attn=True, batch_first=True),
    dict(kdim=6, add_bias_kv=True, add_zero_attn=True), dict(batch_first=True), dict(kdim=8, vdim=8),
]  # fmt: skip
IDS = ["-".join(f"{n}{'' if v is True else v}" for n, v in a.items()) or "default" for a in ARGUMENTS]


def pair(embed=8, heads=2, seed=5, dtype=torch.float64, **options):
    """Ours and torch's module with the same weights; biases that are not 0."""
    torch.manual_seed(seed)
    ours, theirs = (cls(embed, heads, dtype=dtype, **options) for cls in (nn.MultiheadAttention, torch_module))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.5)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


def inputs_for(module, length=5, keys=7, batch=3, batched=True, sharing="separate"):
    widths = (module.embed_dim, module.kdim, module.vdim)
    made = []
    for i, (seq, width) in enumerate(zip((length, keys, keys), widths)):
        shape = (seq, width) if not batched else (batch, seq, width) if module.batch_first else (seq, batch, width)
        made.append(random_tensor(shape, module.out_proj.weight.dtype, seed=i, outliers=False))
    q, k, v = made
    return {"separate": [q, k, v], "key is value": [q, k, k], "self": [q, q, q]}[sharing]


def run(module, inputs, grads=None, **options):
    """output, weights, gradients of the distinct inputs, parameters and floating masks."""
    leaves = {id(t): t.detach().requires_grad_() for t in inputs}
    options = {
        n: t.detach().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t
        for n, t in options.items()
    }
    out, weights = module(*[leaves[id(t)] for t in inputs], **options)
    loss = (out * random_tensor(out.shape, out.dtype, seed=9)).sum()
    if weights is not None:
        loss = loss + (weights * random_tensor(weights.shape, out.dtype, seed=8)).sum()
    wanted = [*leaves.values(), *module.parameters(), *[t for t in options.values() if torch.is_tensor(t)]]
    wanted = [t for t in wanted if t.requires_grad]
    return [out, weights, *torch.autograd.grad(loss, wanted)]


def assert_same(ours, theirs, tolerance=1e-10):
    __tracebackhide__ = True
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------- construction


def test_signatures_are_torchs():
    for name in ("__init__", "forward"):
        ours, theirs = (
            inspect.signature(getattr(cls, name)).parameters for cls in (nn.MultiheadAttention, torch_module)
        )
        assert [(p.name, p.default, p.kind) for p in ours.values() if p.name != "cache"] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]
        assert "cache" not in ours or (ours["cache"].default, ours["cache"].kind) == (
            None,
            inspect.Parameter.KEYWORD_ONLY,
        )


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=IDS)
def test_same_seed_same_parameters_and_state_dicts_load_either_way(arguments):
    modules = []
    for cls in (nn.MultiheadAttention, torch_module):
        torch.manual_seed(5)
        modules.append(cls(8, 2, **arguments))
    ours, theirs = modules
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    states = [m.state_dict() for m in modules]
    assert list(states[0]) == list(states[1]) and all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    ours.load_state_dict(states[1], strict=True), theirs.load_state_dict(states[0], strict=True)
    for module in modules:  # initialised once more
        torch.manual_seed(6)
        module._reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


# ---------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=IDS)
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "one"])
def test_results_and_gradients(arguments, batched):
    ours, theirs = pair(**arguments)
    inputs = inputs_for(ours, batched=batched)
    for need_weights, average in ((True, True), (True, False), (False, True)):
        options = dict(need_weights=need_weights, average_attn_weights=average)
        assert_same(run(ours, inputs, **options), run(theirs, inputs, **options))


@pytest.mark.parametrize("sharing", ["separate", "key is value", "self"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_inputs_that_are_one_tensor(sharing, batch_first, need_weights):
    ours, theirs = pair(batch_first=batch_first)
    inputs = inputs_for(ours, 5, 5 if sharing == "self" else 7, sharing=sharing)
    assert_same(run(ours, inputs, need_weights=need_weights), run(theirs, inputs, need_weights=need_weights))


def make_masks(ours, attn, padding, length=5, keys=7, batch=3, batched=True, same_type=True):
    """attn_mask and key_padding_mask of torch's kinds; key 0 stays visible."""
    samples = batch if batched else 1
    shapes = {"2d": (length, keys), "3d": (samples * ours.num_heads, length, keys)}
    masks = {}
    for name, spec, shape in (
        ("attn_mask", attn, shapes.get(attn and attn[:2])),
        ("key_padding_mask", padding, (batch, keys) if batched else (keys,)),
    ):
        if spec is None:
            continue
        blocked = random_tensor(shape, torch.float64, seed=len(shape), outliers=False) > 0.4
        blocked[..., 0] = False
        values = random_tensor(shape, torch.float64, seed=3, outliers=False).masked_fill(blocked, -math.inf)
        masks[name] = blocked if spec.endswith("bool") else values
    return masks


MASKS = [
    ("2d bool", None), ("2d float", None), ("3d bool", None), ("3d float", None), (None, "bool"), (None, "float"),
    ("2d bool", "bool"), ("3d float", "float"), ("3d bool", "bool"), ("2d float", "float"),
]  # fmt: skip


@pytest.mark.parametrize("attn, padding", MASKS, ids=[f"{a}-{p}" for a, p in MASKS])
@pytest.mark.parametrize("arguments", [{}, dict(kdim=6, add_bias_kv=True, add_zero_attn=True, batch_first=True)])
def test_masks(attn, padding, arguments):
    ours, theirs = pair(**arguments)
    for batched, need_weights in itertools.product((True, False), (True, False)):
        inputs, masks = inputs_for(ours, batched=batched), make_masks(ours, attn, padding, batched=batched)
        assert_same(
            run(ours, inputs, need_weights=need_weights, **masks),
            run(theirs, inputs, need_weights=need_weights, **masks),
        )


def test_masks_of_different_types():
    ours, theirs = pair()
    inputs = inputs_for(ours)
    for attn, padding in (("2d bool", "float"), ("3d float", "bool")):
        masks = make_masks(ours, attn, padding)
        spelled = {n: torch.zeros(m.shape).double().masked_fill(m, -math.inf) if m.dtype == torch.bool else m
                   for n, m in masks.items()}  # fmt: skip
        assert_same(ours(*inputs, **masks), theirs(*inputs, **spelled))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("arguments", [{}, dict(add_bias_kv=True), dict(add_zero_attn=True, vdim=4)])
def test_is_causal_needs_no_mask(need_weights, arguments):
    ours, theirs = pair(**arguments)
    inputs = inputs_for(ours, 6, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    # torch: is_causal without need_weights also hides the keys of add_bias_kv, so the mask says it there
    expected = run(theirs, inputs, need_weights=need_weights, attn_mask=causal)
    assert_same(run(ours, inputs, need_weights=need_weights, is_causal=True), expected)
    assert_same(run(ours, inputs, need_weights=need_weights, is_causal=True, attn_mask=causal), expected)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_weights_in_blocks(monkeypatch, average, is_causal):
    ours, theirs = pair()
    inputs, masks = inputs_for(ours), make_masks(ours, "3d float", None)
    options = dict(average_attn_weights=average, **masks)
    expected = run(ours, inputs, is_causal=is_causal, **options)
    monkeypatch.setattr(_weights, "BLOCK", 3 * 2 * 7 * 2)  # two of five rows
    blocks = run(ours, inputs, is_causal=is_causal, **options)
    assert_same(blocks, expected, 1e-14)
    if not is_causal:
        assert_same(blocks, run(theirs, inputs, **options))


def test_weights_in_blocks_hold_one_block_for_backward(monkeypatch):
    monkeypatch.setattr(_weights, "BLOCK", 64 * 8)
    module = nn.MultiheadAttention(8, 2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        module(*[torch.randn(64, 1, 8).requires_grad_()] * 3)
    assert max(saved) <= 3 * 64 * 8, saved  # the packed projection; all weights are 2 * 64 * 64


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradcheck(need_weights):
    ours, _ = pair(4, 2, kdim=3, add_bias_kv=True)
    plain, _ = pair(4, 2)
    for module in (ours, plain):
        inputs = [t.requires_grad_() for t in inputs_for(module, 2, 3, batch=2)]
        mask = random_tensor((2, 3), torch.float64, outliers=False).requires_grad_()
        function = lambda q, k, v, m, module=module: [  # noqa: E731
            t for t in module(q, k, v, need_weights=need_weights, attn_mask=m) if t is not None
        ]
        assert torch.autograd.gradcheck(function, (*inputs, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    ours, theirs = pair(16, 2, dtype=dtype)
    inputs = inputs_for(ours)
    exact = theirs.double()
    out, weights = ours(*inputs)
    expected = exact(*[t.double() for t in inputs])
    assert out.dtype == weights.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights.double(), expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_in_training_only(need_weights):
    module = nn.MultiheadAttention(8, 2, dropout=0.5, dtype=torch.float64)
    x = random_tensor((5, 2, 8), torch.float64)
    call = lambda: module(x, x, x, need_weights=need_weights)[0]  # noqa: E731
    module.eval()
    assert torch.equal(call(), call())
    module.train()
    torch.manual_seed(1)
    first = call()
    assert not torch.equal(first, call())
    torch.manual_seed(1)
    assert torch.equal(first, call())


def test_torch_func_and_compile():
    ours, theirs = pair(batch_first=True)
    inputs = inputs_for(ours)
    parameters = dict(ours.named_parameters())

    def gradients(module):
        def loss(parameters, *inputs):
            out, weights = torch.func.functional_call(module, parameters, inputs)
            return out.square().sum() + weights.square().sum()

        return torch.func.grad(loss)(parameters, *inputs)

    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-10, atol=1e-10)
    for options in (dict(need_weights=True), dict(need_weights=False, is_causal=True)):
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert_same(run(compiled, inputs, **options), run(ours, inputs, **options), 1e-12)


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_heads=3), "num_heads: expected a divisor of embed_dim, 8, got 3"),
        (dict(num_heads=-1), "num_heads: expected a positive number, got -1"),
        (dict(kdim=0), "kdim: expected a positive number, got 0"),
        (dict(dropout=1.5), "dropout: expected a number between 0 and 1, got 1.5"),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        nn.MultiheadAttention(8, **{"num_heads": 2, **options})


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


ERRORS = [
    (dict(query=zeros(5, 3, 6)), ValueError, r"query: expected shape \(5, 3, 8\), got \(5, 3, 6\)"),
    (dict(query=zeros(1, 5, 3, 8)), ValueError, r"query: expected \(seq, embed_dim\)"),
    (dict(key=zeros(7, 2, 6)), ValueError, r"key: expected shape \(7, 3, 6\) beside query's .*got \(7, 2, 6\)"),
    (dict(key=zeros(7, 6)), ValueError, r"key: expected shape \(S, 3, 6\) beside"),
    (dict(value=zeros(6, 3, 8)), ValueError, r"value: expected shape \(7, 3, 8\).*got \(6, 3, 8\)"),
    (dict(value=zeros(7, 3, 8).double()), RuntimeError, "value: expected the dtype of query, torch.float32"),
    (dict(key_padding_mask=zeros(7, 3)), ValueError, r"key_padding_mask: expected shape \(3, 7\), got \(7, 3\)"),
    (dict(key_padding_mask=zeros(3, 7).int()), RuntimeError, "key_padding_mask: expected dtype torch.bool.*int32"),
    (dict(attn_mask=zeros(7, 5)), ValueError, r"attn_mask: expected shape \(5, 7\) or .*\(6, 5, 7\), got \(7, 5\)"),
    (dict(attn_mask=zeros(3, 5, 7)), ValueError, r"attn_mask: expected shape .*got \(3, 5, 7\)"),
    (dict(attn_mask=zeros(5, 7).double()), RuntimeError, "attn_mask: expected dtype torch.bool.*float64"),
    (dict(attn_mask=zeros(5, 7).to("meta")), RuntimeError, "attn_mask: expected to be on the device of query"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", ERRORS, ids=[str(i) for i in range(len(ERRORS))])
@pytest.mark.parametrize("need_weights", [True, False])
def test_forward_errors(change, error, message, need_weights):
    module = nn.MultiheadAttention(8, 2, kdim=6)
    arguments = dict(query=zeros(5, 3, 8), key=zeros(7, 3, 6), value=zeros(7, 3, 8), need_weights=need_weights)
    with pytest.raises(error, match=message):
        module(**{**arguments, **change})


def test_nested_tensors_and_other_dtypes_are_refused():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.nested.nested_tensor([zeros(3, 8), zeros(2, 8)])
    with pytest.raises(RuntimeError, match="query: expected a dense tensor"):
        module(x, x, x)
    x = zeros(2, 3, 8).double()
    with pytest.raises(RuntimeError, match="query: expected the dtype of the parameters, torch.float32, got"):
        module(x, x, x)
