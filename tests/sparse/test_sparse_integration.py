"""Token-sparse attention and its indexer: opcheck, compile, torch.func, autocast, derivatives; what they refuse."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attnjourney
from attnjourney import reference
from tests.sparse.test_lightning_indexer import exact_inputs, loss_inputs
from tests.sparse.test_sparse_attention import make_indices
from tests.support import options_cases

ops = torch.ops.attnjourney


def leaves(names=("causal", "sinks", "softcap"), dtype=torch.float32, **sizes):
    *tensors, options = options_cases.make(names, dtype, **(dict(q_len=6, kv_len=9) | sizes))
    tensors, options, found = options_cases.leaves_of(tensors, options)
    options |= dict(indices=make_indices((2, 2, 3, 4), 9), query_block_size=2)
    return tensors, options, list(found.values())


def test_opcheck():
    tensors, options, _ = leaves()
    for op in (ops.sparse_attention, ops.sparse_attention_forward):
        torch.library.opcheck(op.default, tuple(tensors), options)
    query, key, weights = exact_inputs(torch.float32)
    torch.library.opcheck(ops.lightning_indexer.default, (query, key, weights, 5))
    inputs = [x.requires_grad_() for x in loss_inputs(torch.float32)]
    inputs = (*inputs[:3], *(x.detach() for x in inputs[3:]), make_indices((2, 9, 4), 11))
    for op in (ops.lightning_indexer_loss, ops.lightning_indexer_loss_forward):
        torch.library.opcheck(op.default, inputs, dict(enable_gqa=True))


@pytest.mark.parametrize("names", [(), ("causal", "sinks", "softcap")])
def test_gradcheck(names):
    tensors, options, wanted = leaves(names, torch.float64)

    def function(*given):
        call = dict(options) | ({"sinks": given[3]} if len(given) > 3 else {})
        return attnjourney.sparse_attention(*given[:3], **call, return_lse=True)

    assert torch.autograd.gradcheck(function, wanted)
    assert torch.autograd.gradgradcheck(function, wanted)


def test_gradcheck_of_the_loss():
    inputs = loss_inputs(torch.float64, lengths=(4, 6), dims=(3, 4))
    indices = make_indices((2, 4, 3), 6)

    def function(*index):
        return attnjourney.lightning_indexer_loss(*index, *inputs[3:], indices, enable_gqa=True)

    wanted = [x.requires_grad_() for x in inputs[:3]]
    assert torch.autograd.gradcheck(function, wanted)
    assert torch.autograd.gradgradcheck(function, wanted)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
@pytest.mark.parametrize("of", ["out", "lse"])
def test_only_what_needs_a_gradient(wanted, of):
    tensors, options, found = leaves(dtype=torch.float64)
    for i, x in enumerate(found):
        x.requires_grad_(i == wanted)
    grads = []
    for function in (attnjourney.sparse_attention, reference.sparse_attention):
        out, lse = function(*tensors, **options, return_lse=True)
        loss = out.square().sum() if of == "out" else lse[lse.isfinite()].square().sum()
        if wanted == 2 and of == "lse":
            continue
        grads.append(torch.autograd.grad(loss, found[wanted])[0])
    if grads:
        torch.testing.assert_close(*grads)


def test_compile_and_export():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, index_query, index_key, weights):
            indices = attnjourney.lightning_indexer(index_query, index_key, weights, 4)
            loss = attnjourney.lightning_indexer_loss(
                index_query, index_key, weights, query, key, indices, enable_gqa=True
            )
            out, lse = attnjourney.sparse_attention(
                query, key, value, indices, enable_gqa=True, is_causal=True, return_lse=True
            )
            return out * lse.unsqueeze(-1) + loss[:, None, :, None]

    *tensors, _ = options_cases.make((), torch.float32, q_len=9, kv_len=9)
    inputs = [*tensors, *loss_inputs(torch.float32, lengths=(9, 9))[:3]]
    inputs, layer = [x.requires_grad_() for x in inputs], Layer()
    grad = torch.ones(2, 4, 9, 3).cumsum(-1)
    expected = torch.autograd.grad(layer(*inputs), inputs, grad)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs, grad), expected):
        torch.testing.assert_close(a, b)
    program = torch.export.export(layer, tuple(inputs))
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


def test_vmap_and_per_sample_gradients():
    tensors, options, _ = leaves(("causal",), torch.float64)
    many = torch.randn(3, *tensors[0].shape, dtype=torch.float64)

    def loss(query, key, value):
        return attnjourney.sparse_attention(query, key, value, **options).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None))(many, *tensors[1:])
    for i in range(3):
        for a, b in zip(grads, torch.func.grad(loss, (0, 1, 2))(many[i], *tensors[1:])):
            torch.testing.assert_close(a[i], b)
    query, key, weights = exact_inputs(torch.float64)
    rows = torch.stack([query, -query])
    found = torch.func.vmap(lambda q: attnjourney.lightning_indexer(q, key, weights, 3))(rows)
    assert torch.equal(found, torch.stack([attnjourney.lightning_indexer(q, key, weights, 3) for q in rows]))


def test_forward_mode():
    tensors, options, wanted = leaves(("causal",), torch.float64)
    wanted = [x.detach() for x in wanted]
    directions = tuple(torch.randn_like(x) for x in wanted)

    def call(function):
        return torch.func.jvp(lambda *x: function(*x, **options), tuple(wanted), directions)

    for a, b in zip(call(attnjourney.sparse_attention), call(reference.sparse_attention)):
        torch.testing.assert_close(a, b)


def test_autocast_and_flops():
    tensors, options, _ = leaves(())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attnjourney.sparse_attention(*tensors, **options).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        attnjourney.sparse_attention(*tensors, **options).sum().backward()
    pairs = 2 * 4 * 6 * 4  # of the indices
    assert counter.get_total_flops() == 2 * pairs * ((4 + 3) + (3 * 4 + 2 * 3))
    query, key, weights = exact_inputs(torch.float32, batch=1, heads=2, rows=4, keys=4, dim=8)
    with FlopCounterMode(display=False) as counter:
        attnjourney.lightning_indexer(query, key, weights, 2)
    assert counter.get_total_flops() == 2 * 2 * 8 * (1 + 2 + 3 + 4)


def test_meta():
    tensors, options, _ = leaves()
    on_meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = attnjourney.sparse_attention(*(x.to("meta") for x in tensors), **on_meta, return_lse=True)
    assert out.shape == (2, 4, 6, 3) and lse.shape == (2, 4, 6) and out.device.type == "meta"
    indices, scores = attnjourney.lightning_indexer(
        *(x.to("meta") for x in exact_inputs(torch.bfloat16)), 5, return_scores=True
    )
    assert indices.shape == scores.shape == (2, 9, 5)
    assert (indices.dtype, scores.dtype) == (torch.int32, torch.float32)


Q, K, V = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 5)
NAMED = torch.zeros(2, 6, 3, dtype=torch.int32)
GQA = dict(enable_gqa=True)
REFUSED = {
    "query: expected 4 dimensions": ((Q[0], K, V, NAMED), GQA),
    "key: expected shape .*got .2, 2, 9, 7": ((Q, K[..., :7], V, NAMED), GQA),
    "value: expected shape": ((Q, K, V[:, :, :5], NAMED), GQA),
    "key: expected a head count that divides": ((Q, torch.zeros(2, 3, 9, 8), torch.zeros(2, 3, 9, 5), NAMED), GQA),
    "key: expected 4 heads .* or 1, got 2": ((Q, K, V, NAMED), {}),
    "indices: expected shape": ((Q, K, V, NAMED[:, :5]), GQA),
    "indices: expected shape .*kv_heads": ((Q, K, V, torch.zeros(2, 4, 6, 3).int()), GQA),
    "indices: expected shape .batch, ceil.q_len / block., k. = .2, 2, k.": (
        (Q, K, V, NAMED),
        GQA | dict(query_block_size=3),
    ),
    "query_block_size: expected a number from 1 to .*, got 0": ((Q, K, V, NAMED), GQA | dict(query_block_size=0)),
    "scale: expected": ((Q, K, V, NAMED), GQA | dict(scale=float("inf"))),
    "causal_alignment: expected": ((Q, K, V, NAMED), GQA | dict(causal_alignment="left")),
    "key_lengths: expected shape": ((Q, K, V, NAMED), GQA | dict(key_lengths=torch.tensor([1]))),
    "sinks: expected shape": ((Q, K, V, NAMED), GQA | dict(sinks=torch.zeros(3))),
    "softcap: expected": ((Q, K, V, NAMED), GQA | dict(softcap=-1.0)),
}
REFUSED_DTYPES = {
    "key: expected the dtype of query": ((Q, K.double(), V, NAMED), GQA),
    "query: expected dtype": ((Q.int(), K.int(), V.int(), NAMED), GQA),
    "indices: expected dtype torch.int32 or torch.int64": ((Q, K, V, NAMED.float()), GQA),
    "indices: expected dtype": ((Q, K, V, NAMED.short()), GQA),
    "key_lengths: expected dtype": ((Q, K, V, NAMED), GQA | dict(key_lengths=torch.ones(2))),
    "sinks: expected dtype": ((Q, K, V, NAMED), GQA | dict(sinks=torch.zeros(4).half())),
}
IQ, IK, W = torch.zeros(2, 3, 6, 8), torch.zeros(2, 9, 8), torch.zeros(2, 3, 6)
REFUSED_BY_THE_INDEXER = {
    "query: expected 4 dimensions": ((IQ[0], IK, W, 2), {}),
    "key: expected shape .batch, kv_len, head_dim.": ((IQ, IK[..., :7], W, 2), {}),
    "weights: expected shape .batch, heads, q_len.": ((IQ, IK, W[:, :2], 2), {}),
    "topk: expected a number from 1": ((IQ, IK, W, 0), {}),
    "key_lengths: expected numbers from 0 to 9, got -1": ((IQ, IK, W, 2), dict(key_lengths=torch.tensor([3, -1]))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_value_that_does_not_fit(message):
    args, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        attnjourney.sparse_attention(*args, **options)


@pytest.mark.parametrize("message", REFUSED_DTYPES)
def test_a_dtype_that_does_not_fit(message):
    args, options = REFUSED_DTYPES[message]
    with pytest.raises(RuntimeError, match=message):
        attnjourney.sparse_attention(*args, **options)


@pytest.mark.parametrize("message", REFUSED_BY_THE_INDEXER)
def test_a_value_that_does_not_fit_the_indexer(message):
    args, options = REFUSED_BY_THE_INDEXER[message]
    with pytest.raises(ValueError, match=message):
        attnjourney.lightning_indexer(*args, **options)


def test_what_the_indexer_and_its_loss_refuse():
    with pytest.raises(RuntimeError, match="weights: expected dtype torch.float32"):
        attnjourney.lightning_indexer(IQ, IK, W.double(), 2)
    loss = attnjourney.lightning_indexer_loss
    with pytest.raises(ValueError, match="indices: expected shape"):
        loss(IQ, IK, W, Q, K, NAMED[:1], enable_gqa=True)
    with pytest.raises(ValueError, match="indices: expected shape"):
        loss(IQ, IK, W, Q, K, torch.zeros(2, 2, 6, 3).int(), enable_gqa=True)
    with pytest.raises(ValueError, match="indices: .* got 9 at number 1 of row 2"):
        bad = NAMED.clone()
        bad[0, 2, 1] = 9
        loss(IQ, IK, W, Q, K, bad, enable_gqa=True)
    with pytest.raises(RuntimeError, match="query: expected the dtype of index_query"):
        loss(IQ, IK, W, Q.double(), K.double(), NAMED, enable_gqa=True)
