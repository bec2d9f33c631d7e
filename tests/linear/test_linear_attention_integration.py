"""Linear attention under torch.compile, opcheck, torch.func, autocast; what it refuses; its module."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import attnjourney

ops = torch.ops.attnjourney


def tensors(*shape, count=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("normalize", [True, False])
def test_opcheck(normalize):
    q, k, v = tensors(2, 2, 5, 4)
    state, z = torch.ones(2, 2, 4, 4, requires_grad=True), torch.ones(2, 2, 4, requires_grad=True)
    mask = torch.tensor([[False] * 5, [False, True, False, False, True]])
    args = (q, k, v, mask, state, z if normalize else None)
    for op in (ops.linear_attention, ops.linear_attention_forward):
        torch.library.opcheck(op.default, args, dict(normalize=normalize))
        torch.library.opcheck(op.default, (q, k, v), dict(normalize=normalize, is_causal=False))


def test_compile_and_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            out, state = attnjourney.linear_attention(q, k, v, return_state=True)
            return attnjourney.linear_attention(q, k, v, initial_state=state) + out

    q, k, v = tensors(1, 2, 7, 4)
    layer, loss = Layer(), torch.ones(1, 2, 7, 4).cumsum(-1)
    expected = torch.autograd.grad(layer(q, k, v), (q, k, v), loss)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), loss), expected):
        torch.testing.assert_close(a, b)
    program = torch.export.export(layer, (q, k, v))
    torch.testing.assert_close(program.module()(q, k, v), layer(q, k, v))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 0), (None, 2, None)])
def test_vmap_and_per_sample_gradients(in_dims):
    one, many = torch.randn(2, 3, 6, 4), torch.randn(5, 2, 3, 6, 4)
    args = [one if d is None else many.movedim(0, d) for d in in_dims]

    def loss(q, k, v):
        return attnjourney.linear_attention(q, k, v).square().sum()

    def sample(i):
        return [x if d is None else x.select(d, i) for x, d in zip(args, in_dims)]

    out = torch.func.vmap(attnjourney.linear_attention, in_dims)(*args)
    torch.testing.assert_close(out, torch.stack([attnjourney.linear_attention(*sample(i)) for i in range(5)]))
    grads = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims)(*args)
    for i in range(5):
        for a, b in zip(grads, torch.func.grad(loss, (0, 1, 2))(*sample(i))):
            torch.testing.assert_close(a[i], b)


def test_second_derivatives_and_forward_mode_say_that_they_are_missing():
    q, k, v = tensors(1, 1, 3, 2)
    out = attnjourney.linear_attention(q, k, v)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_attention: double backward"):
        torch.autograd.grad(grad.sum(), q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attnjourney.linear_attention(forward_ad.make_dual(q, q), k, v)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attnjourney.linear_attention(q, k, v), (q,), (q,))


def test_autocast_and_flops():
    q, k, v = tensors(1, 2, 8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attnjourney.linear_attention(q, k, v).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        attnjourney.linear_attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 2 * 16 * 2 * 8 * (2 + 5)


Q, K, V = (torch.zeros(2, 4, 6, 8) for _ in range(3))
S, Z = torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 8)
REFUSED = {
    "query: expected 4 dimensions": ((Q[0], K, V), {}),
    "key: expected shape .*got .2, 4, 6, 7": ((Q, K[..., :7], V), {}),
    "value: expected shape": ((Q, K, V[:, :, :5]), {}),
    "head count that divides": ((Q, K[:, :3], V[:, :3]), {}),
    "as many keys as query rows": ((Q, K[:, :, :5], V[:, :, :5]), {}),
    "feature_map: expected .*'exp'": ((Q, K, V), dict(feature_map="exp")),
    "eps: expected": ((Q, K, V), dict(eps=-1.0)),
    "scale: expected": ((Q, K, V), dict(scale=float("nan"))),
    "initial_state: expected a pair": ((Q, K, V), dict(initial_state=S)),
    "initial_state: expected shape": ((Q, K, V), dict(initial_state=(S[:1], Z))),
    "initial_normalizer: expected a tensor": ((Q, K, V), dict(initial_state=(S, None))),
    "initial_normalizer: expected None": ((Q, K, V), dict(initial_state=(S, Z), normalize=False)),
    "key_padding_mask: expected shape": ((Q, K, V), dict(key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))),
}
REFUSED_DTYPES = {
    "key: expected the dtype of query": ((Q, K.double(), V), {}),
    "query: expected dtype": ((Q.int(), K.int(), V.int()), {}),
    "key_padding_mask: expected dtype torch.bool": ((Q, K, V), dict(key_padding_mask=torch.zeros(2, 6))),
    "initial_state: expected dtype torch.float32": ((Q, K, V), dict(initial_state=(S.double(), Z))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_value_that_does_not_fit(message):
    args, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        attnjourney.linear_attention(*args, **options)


@pytest.mark.parametrize("message", REFUSED_DTYPES)
def test_a_dtype_that_does_not_fit(message):
    args, options = REFUSED_DTYPES[message]
    with pytest.raises(RuntimeError, match=message):
        attnjourney.linear_attention(*args, **options)


def test_module_streams_and_trains():
    torch.manual_seed(0)
    layer = attnjourney.nn.LinearAttention(24, 4, 2, dtype=torch.float64)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    whole, state, parts = layer(x), None, []
    for piece in x.split((4, 1, 6), 1):
        out, state = layer(piece, initial_state=state, return_state=True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    whole.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[:, 7:] = True
    torch.testing.assert_close(layer(x, key_padding_mask=mask)[:, :7], whole[:, :7])
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor"):
        attnjourney.nn.LinearAttention(24, 4, 3)
    assert "feature_map='elu+1'" in repr(layer)
