"""attnjourney.activate: every way to F.scaled_dot_product_attention leads here and gives what torch's gives."""

import contextlib
import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnjourney
from attnjourney.integrations import flash_operators
from tests.support.testing import random_tensor

SHAPE = (2, 4, 9, 8)
Q, K, V = (random_tensor(SHAPE, torch.float64, seed) for seed in range(3))
VISIBLE = (torch.arange(9) <= torch.arange(9)[:, None] + 1)[None, None]
PADDING = torch.arange(9) >= torch.tensor([[9], [5]])  # True hides
SQUARE = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)


@pytest.fixture(autouse=True)
def left_as_it_was():
    torch._dynamo.reset()
    attnjourney.activity(reset=True)
    yield
    assert not attnjourney.activated()


def sdpa(*args, **options):
    return F.scaled_dot_product_attention(*args, **options)


def gradients(*tensors, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = sdpa(*leaves, **options)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


def mask_gradient():
    mask = torch.zeros(9, 9, dtype=Q.dtype, requires_grad=True)
    return torch.autograd.grad(sdpa(Q, K, V, attn_mask=mask).square().sum(), mask)


def twice_differentiated():
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    (g,) = torch.autograd.grad(sdpa(q, k, V).square().sum(), q, create_graph=True)
    return torch.autograd.grad(g.square().sum(), k)


def forward_mode():
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(sdpa(forward_ad.make_dual(Q, K), K, V)).tangent


def inference(function):
    with torch.inference_mode():
        tensors = Q.clone(), K.clone(), V.clone()  # tensors without an autograd key
        return function(*tensors).clone()


def autocast(function):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(Q.float(), K.float(), V.float())


class Model(nn.Module):
    def forward(self, q, k, v):
        return sdpa(q, k, v, is_causal=True)


def module(kind, **options):
    torch.manual_seed(0)
    return kind(32, 4, batch_first=True, dtype=torch.float64, **options)


def encoder():
    layer = module(nn.TransformerEncoderLayer, dim_feedforward=48, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


X = random_tensor((2, 9, 32), torch.float64, 3)

EAGER = {
    "no gradients": lambda: torch.no_grad()(sdpa)(Q, K, V),
    "gradients": lambda: gradients(Q, K, V, is_causal=True),
    "bool mask": lambda: gradients(Q, K, V, attn_mask=VISIBLE),
    "trained mask": mask_gradient,
    "grouped heads": lambda: gradients(Q, K[:, :2], V[:, :2], enable_gqa=True),
    "wide values": lambda: gradients(Q, K, torch.cat([V, V], -1), scale=0.2),
    "rank 2": lambda: sdpa(Q[0, 0], K[0, 0], V[0, 0]),
    "rank 3": lambda: gradients(Q[0], K[0], V[0]),
    "rank 5": lambda: gradients(Q[None], K[None], V[None]),
    "inference_mode": lambda: inference(sdpa),
    "vmap": lambda: torch.vmap(sdpa)(Q, K, V),
    "gradients a sample": lambda: torch.vmap(torch.func.grad(lambda *x: sdpa(*x).square().sum()))(Q, K, V),
    "jit": lambda: torch.jit.trace(Model(), (Q, K, V), check_trace=False)(Q, K, V),
    "nn.MultiheadAttention": lambda: module(nn.MultiheadAttention)(X, X, X, need_weights=False)[0],
    "nn.TransformerEncoder": lambda: encoder()(X, src_key_padding_mask=PADDING),
}
MATH_ELSEWHERE = {  # torch's fused function has no such derivative
    "forward mode": forward_mode,
    "jvp": lambda: torch.func.jvp(lambda q: sdpa(q, K, V), (Q,), (K,)),
    "second derivatives": twice_differentiated,
}
LOW_PRECISION = {
    "autocast": lambda: autocast(sdpa),
    "autocast, inference": lambda: inference(lambda *x: autocast(sdpa)),
}


def compare(run, without=contextlib.nullcontext, **tolerance):
    with without():
        expected = run()
    seen = attnjourney.activity()
    assert seen.pop("reasons") == {} and set(seen.values()) == {0}
    with attnjourney.active():
        actual = run()
    torch.testing.assert_close(actual, expected, **(tolerance or {"rtol": 1e-11, "atol": 1e-11}))
    return attnjourney.activity(reset=True)


@pytest.mark.parametrize("name", [*EAGER, *MATH_ELSEWHERE, *LOW_PRECISION])
def test_eager(name):
    if name in MATH_ELSEWHERE:
        seen = compare(MATH_ELSEWHERE[name], without=lambda: sdpa_kernel(SDPBackend.MATH))
    elif name in LOW_PRECISION:
        seen = compare(LOW_PRECISION[name], rtol=2e-2, atol=2e-2)
    else:
        seen = compare(EAGER[name])
    assert seen["attnjourney"] >= 1 and seen["torch"] == 0, seen


@pytest.mark.parametrize("mode", ["gradients", "no_grad", "inference_mode", "dynamic"])
def test_compiled_code_holds_our_operator(mode):
    """Also where the function was compiled before: a switch drops what torch.compile holds."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=backend)
    compiled = torch.compile(sdpa, backend=compiler, fullgraph=True, dynamic=mode == "dynamic")

    def run():
        if mode == "gradients":
            leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
            out = compiled(*leaves)
            return out, *torch.autograd.grad(out.square().sum(), leaves)
        if mode == "inference_mode":
            return inference(compiled)
        return torch.no_grad()(compiled)(Q, K, V)

    seen = compare(run)
    assert seen["traced"] >= 1 and seen["torch"] == 0, seen

    def operators(graph):
        return {str(node.target) for node in graph.graph.nodes if "attention" in str(node.target)}

    torchs, ours = (graphs[:2], graphs[2:]) if mode == "gradients" else (graphs[:1], graphs[1:])
    assert not any("attnjourney" in name for graph in torchs for name in operators(graph))
    assert operators(ours[0]) == {"attnjourney.attention_forward.default"}
    if mode == "gradients":
        assert operators(ours[1]) == {"attnjourney.attention_backward.default"}


def test_what_torch_caches_on_disk_is_told_apart():
    keys = [torch.compiler.config.cache_key_tag]
    with attnjourney.active():
        keys.append(torch.compiler.config.cache_key_tag)
    keys.append(torch.compiler.config.cache_key_tag)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_stay_portable(strict):
    with attnjourney.active():
        program = torch.export.export(Model(), (Q, K, V), strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.scaled_dot_product_attention.default]
    attnjourney.activity(reset=True)
    assert compare(lambda: program.module()(Q, K, V))["attnjourney"] == 1


# ------------------------------------------------------------------------------------ the kernel of nn's inference


def evaluated(model, *args, **options):
    with torch.no_grad():
        return model.eval()(*args, **options)


FAST = {
    "attention": lambda: evaluated(module(nn.MultiheadAttention), X, X, X, need_weights=False)[0],
    "weights": lambda: evaluated(module(nn.MultiheadAttention), X, X, X),
    "weights of heads": lambda: evaluated(module(nn.MultiheadAttention), X, X, X, average_attn_weights=False),
    "padding": lambda: evaluated(module(nn.MultiheadAttention), X, X, X, key_padding_mask=PADDING, need_weights=False)[
        0
    ],
    "both masks": lambda: evaluated(
        module(nn.MultiheadAttention), X, X, X, key_padding_mask=PADDING, attn_mask=~VISIBLE[0, 0]
    ),
    "layer": lambda: evaluated(module(nn.TransformerEncoderLayer, dim_feedforward=48), X),
    "layer, causal": lambda: evaluated(
        module(nn.TransformerEncoderLayer, dim_feedforward=48), X, src_mask=SQUARE == -torch.inf
    ),
    "encoder": lambda: evaluated(encoder(), X),
    "encoder, nested": lambda: evaluated(encoder(), X, src_key_padding_mask=PADDING),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", FAST)
def test_inference_kernel(name):
    seen = compare(FAST[name])
    assert seen["fast_path"] == (2 if "encoder" in name else 1) and seen["torch"] == 0, seen


def test_compiled_inference_kernel():
    model = encoder()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    with attnjourney.active():
        actual = evaluated(compiled, X)
    assert attnjourney.activity(reset=True)["fast_path"] == 2
    torch.testing.assert_close(actual, evaluated(model, X), rtol=1e-11, atol=1e-11)


def test_inference_kernel_leaves_what_it_cannot_serve():
    heads = module(nn.MultiheadAttention).eval()
    key = X.clone()
    arguments = 32, 4, heads.in_proj_weight, heads.in_proj_bias, heads.out_proj.weight, heads.out_proj.bias
    with torch.no_grad(), attnjourney.active(), contextlib.suppress(RuntimeError):
        torch._native_multi_head_attention(X, key, key, *arguments)
    assert attnjourney.activity()["reasons"] == {"inference kernel: not self-attention": 1}


# ---------------------------------------------------------------------------------------------- what is left to torch


class Ruled(torch.Tensor):
    """A tensor whose class decides what operators do with it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def first_math():
    return sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True)


@pytest.mark.parametrize(
    "context, run, reason",
    [
        (lambda: sdpa_kernel(SDPBackend.MATH), lambda: sdpa(Q, K, V), "FLASH_ATTENTION is not among"),
        (lambda: sdpa_kernel(SDPBackend.MATH), lambda: torch.vmap(sdpa)(Q, K, V), "FLASH_ATTENTION is not among"),
        (first_math, lambda: sdpa(Q, K, V), "MATH comes before"),
        (contextlib.nullcontext, lambda: sdpa(Q, K, V, attn_mask=VISIBLE, is_causal=True), "together with is_causal"),
        (contextlib.nullcontext, lambda: sdpa(Q.as_subclass(Ruled), K, V), "query: a Ruled"),
        (contextlib.nullcontext, lambda: sdpa(Q, K[:, :3], V[:, :3]), "key: expected 4 heads"),
        (contextlib.nullcontext, lambda: sdpa(Q, K.float(), V), "key: expected"),
    ],
)
def test_left_to_torch_with_a_reason(context, run, reason):
    def result():
        try:
            return run().as_subclass(torch.Tensor)
        except RuntimeError as error:
            return str(error)

    with context():
        expected = result()
        with attnjourney.active():
            actual = result()
    seen = attnjourney.activity()
    assert seen["attnjourney"] == 0 and seen["torch"] == 1
    assert len(seen["reasons"]) == 1 and reason in next(iter(seen["reasons"]))
    torch.testing.assert_close(actual, expected) if isinstance(expected, torch.Tensor) else None
    assert type(actual) is type(expected)


def test_other_devices_are_not_touched():
    with attnjourney.active():
        assert sdpa(*(x.to("meta") for x in (Q, K, V))).device.type == "meta"


def test_deterministic_mode_gives_the_same_bits():
    torch.use_deterministic_algorithms(True)
    try:
        with attnjourney.active():
            first, second = gradients(Q, K, V), gradients(Q, K, V)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second)) and attnjourney.activity()["torch"] == 0


def test_dropout_follows_the_seed():
    def run():
        torch.manual_seed(0)
        return gradients(Q, K, V, dropout_p=0.5)

    with attnjourney.active():
        first, second = run(), run()
    torch.manual_seed(0)
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[0], attnjourney.attention(Q, K, V, dropout_p=0.5))


# ----------------------------------------------------------------------------------------------------------- switching


def test_switching():
    def here():
        attnjourney.activity(reset=True)
        sdpa(Q, K, V)
        return attnjourney.activity()["attnjourney"] == 1

    assert not here()
    attnjourney.activate()
    attnjourney.activate()
    assert here() and attnjourney.activated()
    with attnjourney.active(False):
        assert not here()
        with attnjourney.active():
            assert here()
    assert here()
    attnjourney.deactivate()
    attnjourney.deactivate()
    assert not here()


def test_the_state_of_before_comes_back_after_an_error():
    with pytest.raises(KeyError), attnjourney.active():
        raise KeyError
    assert not attnjourney.activated()


def test_registry_of_torch():
    assert "attnjourney" in torch.nn.attention.list_flash_attention_impls()
    assert not attnjourney.activated()
    kernels = [(f"aten::{name}", "CUDA") for name in flash_operators.FUNCTIONS]
    before = [torch._C._dispatch_dump(name) for name, _ in kernels]
    torch.nn.attention.activate_flash_attention_impl("attnjourney")
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(*kernel) for kernel in kernels)
    sdpa(Q, K, V)
    torch.nn.attention.restore_flash_attention_impl()
    assert attnjourney.activity()["attnjourney"] == 1 and not attnjourney.activated()
    assert [torch._C._dispatch_dump(name) for name, _ in kernels] == before


def test_not_inside_compiled_code():
    def switches(x):
        attnjourney.activate()
        return x + 1

    with pytest.raises(Exception, match="outside of the function"):
        torch.compile(switches, backend="eager", fullgraph=True)(Q)
    assert not attnjourney.activated()


def test_explain_says_who_would_run():
    assert attnjourney.explain(Q, K, V)["sdpa"] == {"active": False, "refusal": None}
    with attnjourney.active(), sdpa_kernel(SDPBackend.MATH):
        told = attnjourney.explain(Q, K, V)["sdpa"]
    assert told["active"] and "FLASH_ATTENTION" in told["refusal"]
