"""Gated linear attention under torch.compile, opcheck, torch.func, autocast; what it refuses."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import attnjourney
from attnjourney.ops.gated_linear_attention import UPDATES
from tests.linear.test_gated_linear_attention import NAMES, inputs

ops = torch.ops.attnjourney


def leaves(**options):
    options = dict(length=6, dims=(4, 3), heads=(2, 1, 2), state=True) | options
    return {n: None if t is None else t.requires_grad_() for n, t in inputs(torch.float32, **options).items()}


@pytest.mark.parametrize("update", UPDATES)
def test_opcheck(update):
    tensors = tuple(leaves(update=update).values())
    for op in (ops.gated_linear_attention, ops.gated_linear_attention_forward):
        torch.library.opcheck(op.default, tensors, dict(update=UPDATES.index(update), qk_l2norm=True))
    packed = tuple(leaves(update=update, batch=1, sequences=3).values())
    torch.library.opcheck(op.default, (*packed, torch.tensor([0, 2, 2, 5])), dict(update=UPDATES.index(update)))


def test_compile_and_export():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, gate, beta, initial_state):
            first = attnjourney.gated_linear_attention(
                query, key, value, gate, beta, initial_state=initial_state, return_state=True
            )
            return first[0] + attnjourney.gated_linear_attention(query, key, value, gate, beta, initial_state=first[1])

    tensors, layer = leaves(), Layer()
    wanted, loss = list(tensors.values()), torch.ones(2, 2, 6, 3).cumsum(-1)
    expected = torch.autograd.grad(layer(**tensors), wanted, loss)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(**tensors), wanted, loss), expected):
        torch.testing.assert_close(a, b)
    program = torch.export.export(layer, tuple(wanted))
    torch.testing.assert_close(program.module()(*wanted), layer(*wanted))


@pytest.mark.parametrize("update", ["gated_delta", "kda"])
def test_vmap_and_per_sample_gradients(update):
    tensors = inputs(torch.float64, update, length=6, dims=(4, 3), state=True)
    many = torch.randn(5, *tensors["query"].shape, dtype=torch.float64)
    others = [tensors[n] for n in NAMES[1:]]

    def loss(q, *others):
        return attnjourney.gated_linear_attention(q, *others[:4], initial_state=others[4], update=update).square().sum()

    in_dims, wanted = (0, *[None] * 5), tuple(range(6))
    grads = torch.func.vmap(torch.func.grad(loss, wanted), in_dims)(many, *others)
    for i in range(5):
        for a, b in zip(grads, torch.func.grad(loss, wanted)(many[i], *others)):
            torch.testing.assert_close(a[i], b)


def test_vmap_of_packed_sequences():
    tensors = inputs(torch.float64, length=6, dims=(4, 3), batch=1)
    many, cu_seqlens = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64), torch.tensor([0, 2, 6])

    def call(q):
        return attnjourney.gated_linear_attention(q, *list(tensors.values())[1:5], cu_seqlens=cu_seqlens)

    torch.testing.assert_close(torch.func.vmap(call)(many), torch.stack([call(q) for q in many]))


def test_second_derivatives_and_forward_mode_say_that_they_are_missing():
    tensors = leaves()
    query = tensors["query"]
    out = attnjourney.gated_linear_attention(**tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="gated_linear_attention: double backward"):
        torch.autograd.grad(grad.sum(), query)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attnjourney.gated_linear_attention(**{**tensors, "query": forward_ad.make_dual(query, query)})


def test_autocast_and_flops():
    tensors = leaves(heads=(2, 2, 2), length=8, dims=(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attnjourney.gated_linear_attention(**tensors).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        attnjourney.gated_linear_attention(**tensors).sum().backward()
    assert counter.get_total_flops() == 2 * 16 * 2 * 2 * 8 * (3 + 8)
    tensors = leaves(update="gated", heads=(2, 2, 2), length=8, dims=(4, 4))
    with FlopCounterMode(display=False) as counter:
        attnjourney.gated_linear_attention(**tensors, update="gated").sum().backward()
    assert counter.get_total_flops() == 2 * 16 * 2 * 2 * 8 * (2 + 5)


def test_a_gate_of_16_bits_gets_a_gradient_of_16_bits():
    tensors = {n: None if t is None else t.detach() for n, t in inputs(torch.bfloat16, length=9).items()}
    gate = tensors["gate"].bfloat16().requires_grad_()
    out = attnjourney.gated_linear_attention(**{**tensors, "gate": gate})
    wide = gate.detach().float().requires_grad_()
    expected = attnjourney.gated_linear_attention(**{**tensors, "gate": wide})
    assert torch.equal(out, expected)
    (a,), (b,) = (torch.autograd.grad(x.float().square().sum(), t) for x, t in ((out, gate), (expected, wide)))
    assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16())


Q, V, G = torch.zeros(2, 2, 6, 8), torch.zeros(2, 4, 6, 5), torch.zeros(2, 4, 6)
S = torch.zeros(2, 4, 8, 5)
REFUSED = {
    "query: expected 4 dimensions": ((Q[0], Q, V, G, G), {}),
    "key: expected shape .*got .2, 2, 6, 7": ((Q, Q[..., :7], V, G, G), {}),
    "value: expected shape": ((Q, Q, V[:, :, :5], G, G), {}),
    "key: expected a head count that divides": ((Q, torch.zeros(2, 3, 6, 8), V, G, G), {}),
    "query: expected a head count that divides": ((torch.zeros(2, 3, 6, 8), Q, V, G, G), {}),
    "update: expected .*'rwkv'": ((Q, Q, V, G, G), dict(update="rwkv")),
    "gate: expected a tensor with update 'gated_delta'": ((Q, Q, V, None, G), {}),
    "gate: expected None with update 'delta'": ((Q, Q, V, G, G), dict(update="delta")),
    "beta: expected a tensor with update 'kda'": ((Q, Q, V, G, None), dict(update="kda")),
    "beta: expected None with update 'gated'": ((Q, Q, V, G, G), dict(update="gated")),
    "gate: expected shape .batch, v_heads, len. = .2, 4, 6.": ((Q, Q, V, G[:, :2], G), {}),
    "gate: expected shape .batch, v_heads, len, head_dim.": ((Q, Q, V, G, G), dict(update="kda")),
    "beta: expected shape": ((Q, Q, V, G, G[..., None]), {}),
    "scale: expected": ((Q, Q, V, G, G), dict(scale=float("inf"))),
    "initial_state: expected shape": ((Q, Q, V, G, G), dict(initial_state=S[:1])),
    "query: expected a batch of 1 with cu_seqlens": ((Q, Q, V, G, G), dict(cu_seqlens=torch.tensor([0, 6]))),
    "cu_seqlens: expected shape": ((Q, Q, V, G, G), dict(cu_seqlens=torch.tensor([[0, 6]]))),
}
REFUSED_DTYPES = {
    "key: expected the dtype of query": ((Q, Q.double(), V, G, G), {}),
    "query: expected dtype": ((Q.int(), Q.int(), V.int(), G, G), {}),
    "gate: expected dtype torch.float32": ((Q, Q, V, G.double(), G), {}),
    "beta: expected dtype torch.float32": ((Q, Q, V, G, G.half()), {}),
    "gate: expected dtype torch.bfloat16 .query's. or torch.float32": (
        (Q.bfloat16(), Q.bfloat16(), V.bfloat16(), G.half(), G), {},
    ),
    "initial_state: expected dtype torch.float32": ((Q, Q, V, G, G), dict(initial_state=S.double())),
    "cu_seqlens: expected dtype": ((Q, Q, V, G, G), dict(cu_seqlens=torch.tensor([0.0, 6.0]))),
}  # fmt: skip
OFFSETS = {
    "cu_seqlens: expected to begin with 0, got 1": [1, 6],
    "cu_seqlens: expected numbers that never fall, got 2 after 4": [0, 4, 2],
    "cu_seqlens: expected at most the number of rows, 6, got 7": [0, 7],
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_value_that_does_not_fit(message):
    args, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        attnjourney.gated_linear_attention(*args, **options)


@pytest.mark.parametrize("message", REFUSED_DTYPES)
def test_a_dtype_that_does_not_fit(message):
    args, options = REFUSED_DTYPES[message]
    with pytest.raises(RuntimeError, match=message):
        attnjourney.gated_linear_attention(*args, **options)


@pytest.mark.parametrize("message", OFFSETS)
def test_offsets_that_do_not_fit(message):
    args = [x[:1] for x in (Q, Q, V, G, G)]
    with pytest.raises(ValueError, match=message):
        attnjourney.gated_linear_attention(*args, cu_seqlens=torch.tensor(OFFSETS[message]))
