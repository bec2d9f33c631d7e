"""attnjourney.integrations.fla: flash-linear-attention's functions beside the recurrence in float64, and transformers'
models that look for them beside their own loops."""

import importlib
import sys

import pytest
import torch
from torch.nn.functional import softplus

import attnjourney
from attnjourney import reference
from attnjourney.integrations import fla
from tests.support.testing import random_tensor

CLOSE = dict(rtol=1e-10, atol=1e-11)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Those of our operator."""
    count, operator = [], fla.gated_linear_attention

    def counted(*args, **kwargs):
        count.append(args[0].shape[2])
        return operator(*args, **kwargs)

    monkeypatch.setattr(fla, "gated_linear_attention", counted)
    yield count
    fla.deactivate()


def tensors(batch=2, length=37, heads=2, v_heads=4, channels=False, sequences=None):
    """q, k, v, g, beta, state in flash-linear-attention's layout, float64."""
    like = torch.float64
    q, k = (random_tensor((batch, length, heads, 8), like, i, outliers=False) for i in (1, 2))
    v = random_tensor((batch, length, v_heads, 12), like, 3, outliers=False)
    shape = (batch, length, v_heads, 8) if channels else (batch, length, v_heads)
    g = -random_tensor(shape, like, 4, outliers=False).exp()
    beta = random_tensor((batch, length, v_heads), like, 5, outliers=False).sigmoid()
    state = random_tensor((sequences or batch, v_heads, 8, 12), like, 6, outliers=False)
    return [x.requires_grad_() for x in (q, k, v, g, beta, state)]


def recurrence(q, k, v, g, beta, state, **options):
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    out, state = reference.gated_linear_attention(
        q, k, v, g, beta, initial_state=state, return_state=True, **options
    )  # fmt: skip
    return out.transpose(1, 2), state


def same(found, expected, leaves, count):
    weights = [random_tensor(x.shape, x.dtype, 7 + i, outliers=False) for i, x in enumerate(expected)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    grads = [torch.autograd.grad(x, leaves, weights) for x in (found, expected)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, **CLOSE)
    assert len(count) == 1


GATED = [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule]
KDA = [fla.chunk_kda, fla.fused_recurrent_kda]


@pytest.mark.parametrize("function", GATED + KDA, ids=lambda f: f.__name__)
def test_values_and_gradients(function, calls):
    leaves = tensors(channels=function in KDA)
    q, k, v, g, beta, state = leaves
    found = function(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    same(found, recurrence(*leaves, update="kda" if function in KDA else "gated_delta", qk_l2norm=True), leaves, calls)


@pytest.mark.parametrize("function", GATED + KDA, ids=lambda f: f.__name__)
def test_packed_sequences_and_a_state_with_values_first(function, calls):
    leaves = tensors(batch=1, sequences=3, channels=function in KDA)
    q, k, v, g, beta, state = leaves
    cu_seqlens = torch.tensor([0, 5, 30, 37])
    out, last = function(
        q, k, v, g=g, beta=beta, initial_state=state.transpose(-1, -2), output_final_state=True, state_v_first=True,
        cu_seqlens=cu_seqlens, scale=0.7,
    )  # fmt: skip
    expected = recurrence(*leaves, update="kda" if function in KDA else "gated_delta", cu_seqlens=cu_seqlens, scale=0.7)
    same((out, last.transpose(-1, -2)), expected, leaves, calls)


@pytest.mark.parametrize("function", GATED + KDA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_and_betas_from_what_a_layer_projects(function, lower_bound, calls):
    leaves = tensors(channels=function in KDA)
    q, k, v, g, beta, state = leaves
    a_log, width = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_(), 32 if function in KDA else 4
    bias = torch.linspace(-1, 1, width, dtype=torch.float64).requires_grad_()
    options = {} if lower_bound is None else dict(lower_bound=lower_bound)
    if options and function in GATED:
        pytest.skip("has no lower_bound")
    found = function(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_gate_in_kernel=True, A_log=a_log,
        dt_bias=bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True, **options,
    )  # fmt: skip
    shape = (4, 8) if function in KDA else (4,)
    rate = a_log.exp().view(4, *[1] * (len(shape) - 1))
    raw = g + bias.view(shape)
    gate = -rate * softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    update = "kda" if function in KDA else "gated_delta"
    expected = recurrence(q, k, v, gate, 2 * beta.sigmoid(), state, update=update, qk_l2norm=True)
    same(found, expected, [*leaves, a_log, bias], calls)


def test_defaults_and_what_is_not_supported(calls):
    q, k, v, g, beta, _ = tensors()
    gates = torch.full((2, 37, 4, 8), -0.1, dtype=torch.float64)
    out, state = fla.fused_recurrent_gated_delta_rule(q, k, v)  # no gate, beta 1
    plain = reference.gated_linear_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, torch.ones(2, 4, 37, dtype=torch.float64), update="delta"
    )
    torch.testing.assert_close(out, plain.transpose(1, 2), **CLOSE)
    assert state is None and len(calls) == 1
    both, _ = fla.fused_recurrent_gated_delta_rule(q, k, v, g, gates, None, beta)
    summed, _ = fla.chunk_kda(q, k, v, g[..., None] + gates, beta)
    torch.testing.assert_close(both, summed)
    for name, call in {
        "gv": lambda: fla.fused_recurrent_gated_delta_rule(q, k, v, gv=gates),
        "cp_context": lambda: fla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=object()),
        "return_intermediate_states": lambda: fla.chunk_kda(q, k, v, gates, beta, return_intermediate_states=True),
    }.items():
        with pytest.raises(NotImplementedError, match=name):
            call()
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="expected q and k of shape"):
        fla.chunk_gated_delta_rule(q, k[:, :5], v, g, beta)
    with pytest.raises(ValueError, match="A_log: expected a tensor"):
        fla.chunk_kda(q, k, v, gates, beta, use_gate_in_kernel=True)


# ---- transformers

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, head_dim=16,
    num_key_value_heads=1, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)


def qwen3_next(T):
    return T.Qwen3NextForCausalLM, T.Qwen3NextConfig(
        **COMMON, **LINEAR, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16
    )


def qwen3_5(T):
    return T.Qwen3_5ForCausalLM, T.Qwen3_5TextConfig(**COMMON, **LINEAR)


def kimi_linear(T):
    return T.KimiLinearForCausalLM, T.KimiLinearConfig(
        **COMMON, **EXPERTS, num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, num_local_experts=4, n_shared_experts=1, linear_head_dim=8, linear_num_heads=2,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip


MODELS = [qwen3_next, qwen3_5, kimi_linear]


def built(make):
    transformers = pytest.importorskip("transformers")
    try:
        model, config = make(transformers)
    except AttributeError as error:
        pytest.skip(f"not in transformers {transformers.__version__}: {error}")
    torch.manual_seed(0)
    return model(config).eval()


def results(model):
    """Logits, the gradients of all parameters, and tokens of a prompt padded on the left."""
    ids = torch.randint(3, 64, (2, 70), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    logits = model(ids).logits
    (logits * random_tensor(logits.shape, logits.dtype, 3, outliers=False)).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    padding = torch.ones_like(ids)
    padding[1, :9] = 0
    tokens = model.generate(ids.masked_fill(padding == 0, 0), attention_mask=padding, max_new_tokens=6, do_sample=False)
    return logits.detach(), grads, tokens


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_models_of_transformers_unchanged(make, calls):
    model = built(make)
    logits, grads, tokens = results(model)
    assert not calls  # the control: without activate they run transformers' own loops
    fla.activate()
    ours, our_grads, our_tokens = results(model)
    assert calls == [70, 70, *[1] * 5]  # one linear layer: a forward, a prompt, and the tokens after the first
    scale = logits.abs().max()
    assert (ours - logits).abs().max() < 2e-5 * scale and torch.equal(our_tokens, tokens)
    assert our_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert (our_grads[name] - grad).abs().max() < 1e-4 * grad.abs().max().clamp_min(1e-3), name
    fla.deactivate()
    calls.clear()
    model(torch.ones(1, 5, dtype=torch.int64))
    assert not calls


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore:(?!capture)")
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_what_the_state_layers_of_a_model_keep(make, calls):
    model, ids = built(make), torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with pytest.warns(UserWarning, match="nothing was recorded"), attnjourney.capture(model) as seen:
            model(ids)  # the control: transformers' own loops
        assert not calls and len(seen) == len(seen.states) == 0
        fla.activate()
        expected = model(ids).logits
        calls.clear()
        with attnjourney.capture(model, state_weights=True) as seen:
            logits = model(ids).logits
            tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(logits, expected) and tokens.shape == (2, 23)
    assert calls == [20, 20, 1, 1] and len(seen) == 0
    assert [r.weights.shape[-1] for r in seen.states] == calls
    (name,) = seen.states.names
    assert name.startswith("model.layers.0.")
    whole, prompt, _, step = seen.states.of(name)
    kimi = make is kimi_linear
    assert torch.equal(whole.state, prompt.state) and whole.state.shape == ((2, 2, 8, 8) if kimi else (2, 4, 8, 12))
    assert whole.half_life.shape == ((2, 2, 20, 8) if kimi else (2, 4, 20)) and whole.half_life.min() > 0
    assert step.nbytes == whole.nbytes == whole.state.nbytes
    assert whole.settings["update"] == ("kda" if kimi else "gated_delta")
    assert ((whole.effective_rank >= 1) & (whole.effective_rank <= 8)).all()
    assert not whole.weights.triu(1).any() and whole.weights.diagonal(dim1=-2, dim2=-1).all()


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
def test_a_model_imported_after_activate_finds_the_functions(calls, monkeypatch):
    pytest.importorskip("transformers")
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("fla is installed")
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    fla.activate()
    for loaded in [n for n in sys.modules if n == name]:
        monkeypatch.delitem(sys.modules, loaded)
    module = importlib.import_module(name)
    q, k, v, g, beta, _ = (x.detach() for x in tensors())
    module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert calls == [37]
    fla.deactivate()
    assert "fla" not in sys.modules


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
def test_packed_sequences_of_a_model(calls):
    """transformers' own loops refuse cu_seqlens; with these functions each sequence is by itself."""
    pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    fla.activate()
    q, k, v, g, beta, _ = (x.detach() for x in tensors(batch=1))
    packed, _ = module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=torch.tensor([0, 20, 37]))
    alone, _ = module.torch_chunk_gated_delta_rule(*(x[:, 20:] for x in (q, k, v)), g=g[:, 20:], beta=beta[:, 20:])
    torch.testing.assert_close(packed[:, 20:], alone)
    assert calls == [37, 17]
