"""What callers pass and what tools do to modules: None for off, narrow index tensors, meta tensors, torch.fx, weights
of other classes, parametrizations."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import attnjourney
from attnjourney import nn as ours
from tests.support.testing import random_tensor

Q, K, V = (random_tensor((2, 4, 9, 8), torch.float64, seed) for seed in range(3))
X = random_tensor((2, 9, 32), torch.float64, 3)
OFF = {"softcap": None, "window_size": None}


def layers():
    like = {"dtype": torch.float64}
    yield functools.partial(ours.MultiheadAttention(32, 4, batch_first=True, **like), X, X, X)
    yield functools.partial(ours.CausalSelfAttention(32, 4, **like), X)
    yield functools.partial(ours.GroupedQueryAttention(32, 4, 2, **like), X)
    yield functools.partial(ours.LinearAttention(32, 4, **like), X)
    yield functools.partial(ours.InfiniAttention(32, 4, segment_length=3, **like), X)
    yield functools.partial(ours.LongformerSelfAttention(32, 4, window=2, **like), X)
    sizes = dict(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    yield functools.partial(ours.MultiheadLatentAttention(32, 4, **sizes, rope=10000.0, **like), X)


def name_of(layer):
    return type(layer.func).__name__


LAYERS = list(layers())


# ---------------------------------------------------------------------------------------------------- None, max lengths


def test_none_is_off():
    cu = torch.tensor([0, 4, 18])
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V)]
    lengths = torch.tensor([9, 7])
    cache = attnjourney.KVCache(2, 4, 16, 8, dtype=Q.dtype)
    cache.append(K, V)
    latent, weight = random_tensor((2, 9, 20), Q.dtype, 4), random_tensor((4 * 8, 12), Q.dtype, 5)
    for call in (
        functools.partial(attnjourney.attention, Q, K, V, is_causal=True),
        functools.partial(attnjourney.reference.attention, Q, K, V, is_causal=True),
        functools.partial(attnjourney.attention_weights, Q, K),
        functools.partial(attnjourney.varlen_attention, *packed, cu, cu),
        functools.partial(attnjourney.decode, Q, K, V, lengths),
        functools.partial(attnjourney.reference.decode, Q, K, V, lengths),
        functools.partial(attnjourney.mla_decode, random_tensor((2, 4, 1, 12), Q.dtype, 6), latent, lengths, weight),
        functools.partial(cache.attend, Q),
    ):
        assert torch.equal(call(**OFF), call())
    assert attnjourney.explain(Q, K, V, **OFF) == attnjourney.explain(Q, K, V)


def test_varlen_takes_the_longest_lengths():
    cu = torch.tensor([0, 4, 18], dtype=torch.int32)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V)]
    expected = attnjourney.varlen_attention(*packed, cu, cu)
    assert torch.equal(attnjourney.varlen_attention(*packed, cu, cu, max_seqlen_q=14, max_seqlen_k=14), expected)


# -------------------------------------------------------------------------------------------------------- index tensors

NARROW = {
    "int32": lambda *n: torch.tensor(n, dtype=torch.int32),
    "strided": lambda *n: torch.tensor([[i, -1] for i in n])[:, 0],
    "expanded": lambda n, _: torch.tensor([n]).expand(2),
}


@pytest.mark.parametrize("kind", NARROW)
def test_index_tensors(kind):
    index = NARROW[kind]
    same = kind == "expanded"
    wide = torch.tensor([6, 6] if same else [6, 9])
    narrow = index(6, 9)
    assert torch.equal(attnjourney.decode(Q, K, V, narrow), attnjourney.decode(Q, K, V, wide))
    assert torch.equal(
        attnjourney.attention(Q, K, V, key_lengths=narrow), attnjourney.attention(Q, K, V, key_lengths=wide)
    )
    latent, weight = random_tensor((2, 9, 20), Q.dtype, 4), random_tensor((4 * 8, 12), Q.dtype, 5)
    q = random_tensor((2, 4, 1, 12), Q.dtype, 6)
    assert torch.equal(
        attnjourney.mla_decode(q, latent, narrow, weight), attnjourney.mla_decode(q, latent, wide, weight)
    )


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("cache", ["KVCache", "WindowCache", "PagedKVCache"])
def test_index_tensors_of_caches(cache, kind):
    """As transformers' beam search hands them over."""
    index = NARROW[kind]
    results = []
    for own in (index, lambda *n: index(*n).to(torch.int64).contiguous()):
        held = getattr(attnjourney, cache)(2, 4, 16, 8, dtype=Q.dtype)
        held.append(K, V, own(6, 9))
        held.reorder(own(1, 0))
        held.truncate(own(5, 4))
        results.append((held.attend(Q[:, :, :2]), held.lengths))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------------ the tools


@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_meta_device(layer):
    """accelerate's init_empty_weights, estimates of shapes and FLOPs."""
    module = copy.deepcopy(layer.func).to("meta")
    out = module(*(x.to("meta") for x in layer.args))
    expected = layer()
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (out, expected)), strict=True):
        assert a.device.type == "meta" and a.shape == b.shape


def test_transforms_on_the_meta_device():
    q, k, v = (x.to("meta") for x in (Q, K, V))
    assert torch.vmap(attnjourney.attention)(q, k, v).shape == Q.shape
    assert torch.func.grad(lambda q: attnjourney.attention(q, k, v).sum())(q).shape == Q.shape


@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_fx_takes_a_module_as_one_call(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer.func

        def forward(self, *inputs):
            out = self.layer(*inputs)
            return (out[0] if isinstance(self.layer, nn.MultiheadAttention) else out) + 1

    class Unary(Model):
        def forward(self, x):
            return Model.forward(self, *[x] * len(layer.args))

    graph = torch.fx.symbolic_trace(Unary())
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["layer"]
    torch.testing.assert_close(graph(X), Unary()(X), rtol=0, atol=0)


class Halves(torch.Tensor):
    """A weight that keeps something else than its numbers, as a quantised one; products are its class's own."""

    @staticmethod
    def __new__(cls, whole):
        self = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        self.half = whole.detach() / 2
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            raise NotImplementedError(f"Halves dispatch: unimplemented {func}")
        if func is torch.ops.aten.detach.default:
            return cls(args[0].half * 2)
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda x: x.half * 2, (args, kwargs or {}))
        return func(*unwrapped[0], **unwrapped[1])


@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_weights_of_another_class(layer):
    module = copy.deepcopy(layer.func)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(Halves(part.weight), requires_grad=False)
    with torch.no_grad():
        torch.testing.assert_close(module(*layer.args), layer(), rtol=1e-12, atol=1e-12)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_a_parametrization_is_computed_once_a_call(need_weights, cross):
    module = ours.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    counts = Counted(), Counted()
    parametrize.register_parametrization(module, "in_proj_weight", counts[0])
    parametrize.register_parametrization(module.out_proj, "weight", counts[1])
    before = [c.calls for c in counts]
    other = X if not cross else X + 1
    out = module(X, other, other, need_weights=need_weights)[0]
    assert [c.calls - b for c, b in zip(counts, before)] == [1, 1]
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(
        {
            "in_proj_weight": module.in_proj_weight,
            "in_proj_bias": module.in_proj_bias,
            "out_proj.weight": module.out_proj.weight,
            "out_proj.bias": module.out_proj.bias,
        }
    )
    torch.testing.assert_close(out, theirs(X, other, other)[0], rtol=1e-11, atol=1e-11)


def test_replace_attention_takes_parametrized_modules():
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    parametrizations.weight_norm(theirs, "in_proj_weight")
    module = copy.deepcopy(theirs)
    assert attnjourney.replace_attention(module) == [""]
    assert isinstance(module, ours.MultiheadAttention) and parametrize.is_parametrized(module, "in_proj_weight")
    torch.testing.assert_close(module(X, X, X), theirs(X, X, X), rtol=1e-11, atol=1e-11)
    assert attnjourney.replace_attention(module) == []
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert type(module) is ours.MultiheadAttention and type(copy.deepcopy(module)) is ours.MultiheadAttention


def test_equal_widths_are_said_to_be_equal():
    """peft, torch.ao and torch's own tests read it."""
    module = nn.MultiheadAttention(32, 4)
    attnjourney.replace_attention(module)
    assert module._qkv_same_embed_dim and copy.deepcopy(module)._qkv_same_embed_dim
    assert not ours.MultiheadAttention(32, 4, kdim=8)._qkv_same_embed_dim


def test_an_encoder_around_our_module_calls_it(monkeypatch):
    """Also where it was put in by hand: replace_attention shuts the inference kernel of the layer around it."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dtype=torch.float64).eval()
    layer.self_attn = ours.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64).eval()
    assert attnjourney.replace_attention(layer) == []
    calls = []
    layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        layer(X)
    assert calls


# ------------------------------------------------------------------------------ the gradient of attention_weights


@pytest.mark.parametrize("given_lse", [False, True])
@pytest.mark.parametrize("rows, heads", [(None, None), ([0, 8, 3], [2]), (torch.tensor([4]), [1, 1, 0])])
def test_gradient_of_the_weights(rows, heads, given_lse):
    mask = random_tensor((4, 9, 9), Q.dtype, 4).masked_fill(torch.rand(4, 9, 9) > 0.8, -torch.inf)
    sinks, slopes = random_tensor((4,), Q.dtype, 5), random_tensor((4,), Q.dtype, 6).abs()
    options = dict(
        is_causal=True, window_size=(6, -1), softcap=3.0, enable_gqa=True, key_lengths=torch.tensor([9, 4]), scale=0.4
    )
    results = []
    for compute in (attnjourney.attention_weights, attnjourney.reference.attention_weights):
        q, k, m, s, a = leaves = [x.clone().requires_grad_() for x in (Q, K[:, :2], mask, sinks, slopes)]
        more = dict(options, sinks=s, alibi_slopes=a)
        if given_lse and compute is attnjourney.attention_weights:
            more["lse"] = attnjourney.attention(q, k, k, m, return_lse=True, **more)[1]
        weights = compute(q, k, m, rows=rows, heads=heads, **more)
        weighing = random_tensor(weights.shape, Q.dtype, 7)
        results.append((weights, *torch.autograd.grad((weights * weighing).sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_the_last_captured_of_each_name():
    layer = ours.CausalSelfAttention(32, 4, dtype=torch.float64)
    with torch.no_grad(), attnjourney.capture(layer) as seen:
        layer(X)
    assert list(dict(seen)) == seen.names == seen.keys()
