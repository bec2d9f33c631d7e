"""attnjourney.capture around models: names, choices, training, generation, compiled graphs, use and misuse."""

import contextlib

import pytest
import torch

import attnjourney
from attnjourney import nn


class Block(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return x + self.attention(x)


def model(dtype=None):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        Block(nn.CausalSelfAttention(16, 4)),
        Block(nn.GroupedQueryAttention(16, 4, 2, rope=10000.0)),
        Block(
            nn.MultiheadLatentAttention(
                16, 2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, rope=1e4
            )
        ),
    ).to(dtype)


NAMES = ["0.attention", "1.attention", "2.attention"]


@pytest.mark.smoke
def test_modules_by_name_and_choice():
    m, x = model(), torch.randn(2, 6, 16)
    with attnjourney.capture(m) as seen:
        expected = m(x)
        m(x[:, :3])
    assert seen.names == NAMES and [r.step for r in seen] == [0, 0, 0, 1, 1, 1]
    assert [r.operator for r in seen[:3]] == ["gpt_attention", "gqa", "mla"]
    assert seen["0.attention"].weights.shape == (2, 4, 3, 3) and len(seen.of("0.attention")) == 2
    assert torch.equal(expected, m(x))
    for layers, names in (
        ("1", ["1.attention"]),
        (["*.attention"], NAMES),
        ([0, -1, 2], ["0.attention", "2.attention"]),
        (m[1], ["1.attention"]),
        ("", NAMES),
        (["0.attention", "2.attention"], ["0.attention", "2.attention"]),
    ):
        with attnjourney.capture(m, layers=layers, rows=slice(2)) as seen:
            m(x)
        assert seen.names == names and seen[0].weights.shape[-2:] == (2, 6)
    assert "0.attention" in repr(seen) and set(seen.as_dict()) == set(names)


def test_training_is_not_changed():
    m, x = model(), torch.randn(2, 6, 16)
    m[0].attention.dropout = 0.5
    results = []
    for block in (contextlib.nullcontext, lambda: attnjourney.capture(m, rows=[-1])):
        m.zero_grad()
        torch.manual_seed(3)
        with block() as seen:
            out = m(x)
            out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert seen.names == NAMES and not seen[0].weights.requires_grad
    torch.testing.assert_close(seen[0].weights.sum(-1), torch.ones(2, 4, 1))  # before dropout


def test_checkpoint_records_once_and_double_backward_nothing():
    m, x = model(torch.float64), torch.randn(1, 5, 16, dtype=torch.float64)
    with attnjourney.capture(m) as seen:
        torch.utils.checkpoint.checkpoint(m, x.requires_grad_(), use_reentrant=False).sum().backward()
        assert len(seen) == 3
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        g.sum().backward()
    assert len(seen) == 6


def test_autocast_and_vmap():
    m, x = model(), torch.randn(3, 2, 6, 16)
    with torch.no_grad(), attnjourney.capture(m) as seen:
        with torch.autocast("cpu", torch.bfloat16):
            m(x[0])
        assert seen[0].weights.dtype == torch.bfloat16
        torch.func.vmap(m)(x)
    with torch.no_grad(), attnjourney.capture(m) as each:
        m(x[1])
    mapped = seen.of("1.attention")[-1].weights  # (3, 2, 4, 6, 6): one call for all samples
    torch.testing.assert_close(mapped[1], each["1.attention"].weights)


def test_generation_with_caches():
    m = model(torch.float64)[1]
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    cache = attnjourney.KVCache(2, 2, 32, 4, dtype=torch.float64)
    with torch.no_grad(), attnjourney.capture(m, rows=[-1]) as seen:
        m(x)  # all at once
        m.attention(x[:, :4], cache=cache)
        m.attention(x[:, 4:5], cache=cache)
        m.attention(x[:, 5:], cache=cache)
    whole, *steps = seen.of("attention")
    assert [r.operator for r in steps] == ["decode"] * 3
    assert [r.weights.shape for r in steps] == [(2, 4, 1, n) for n in (4, 5, 6)]
    torch.testing.assert_close(steps[-1].weights, whole.weights)


def test_replaced_multihead_attention():
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    _, expected = encoder.layers[0].self_attn(x, x, x, padding, average_attn_weights=False)
    names = attnjourney.replace_attention(encoder)
    with torch.no_grad(), attnjourney.capture(encoder) as seen:
        encoder(x, src_key_padding_mask=padding)
    assert seen.names == names == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(seen[0].weights, expected.detach(), atol=1e-6, rtol=1e-4)


def test_the_demo_model():
    from examples.config import Config
    from examples.generate import attention_weights, generate
    from examples.model import GPT, OURS, VARIANTS

    config = Config(layers=2, embed=32, heads=4, context=32)
    for variant in OURS:
        demo = GPT(VARIANTS[variant], config)
        text = b"to be or not"
        with torch.no_grad(), attnjourney.capture(demo) as seen:
            demo(torch.tensor([list(text)]))
            assert seen.names == ["blocks.0.attention", "blocks.1.attention"]
            stacked = torch.cat([r.weights for r in seen])
            generate(demo, config, text, 2)  # calls no forward: named by what its functions work for
        torch.testing.assert_close(stacked, attention_weights(demo, text), atol=1e-5, rtol=1e-4)
        assert len(seen.of("blocks.1.attention")) == 3


def test_calls_without_modules_are_named_by_order():
    class Bare(torch.nn.Module):
        def forward(self, q):
            return attnjourney.attention(attnjourney.attention(q, q, q), q, q)

    m, q = Bare(), torch.randn(1, 2, 4, 8)
    with attnjourney.capture(m) as seen:
        m(q)
        attnjourney.attention(q, q, q)  # not the model's
        m(q)
    assert [(r.name, r.step) for r in seen] == [(f"attention.{i}", s) for s in (0, 1) for i in (0, 1)]
    with attnjourney.capture(m, layers=1) as seen:
        m(q)
    assert seen.names == ["attention.1"]


def test_longformer_and_infini_attention():
    """One record a layer, though several operators make it: weights of whole rows."""
    torch.manual_seed(0)
    m = torch.nn.Sequential(
        nn.LongformerSelfAttention(16, 2, 1, dilation=[1, 2]), nn.InfiniAttention(16, 4, 2, segment_length=3, rope=1e4)
    ).double()
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    first = m[0](x, global_mask=torch.arange(8).expand(2, -1) == 4)
    for rows in (None, [-1, 4]):
        with attnjourney.capture(m, rows=rows) as seen:
            m[1](m[0](x, global_mask=torch.arange(8).expand(2, -1) == 4)).sum().backward()
        assert seen.names == ["0", "1"] and [r.operator for r in seen] == ["longformer_attention", "infini_attention"]
        for module, record, inputs in ((m[0], seen[0], (x,)), (m[1], seen[1], (first,))):
            keywords = {"global_mask": torch.arange(8).expand(2, -1) == 4} if module is m[0] else {}
            expected = attnjourney.trace_module(module, *inputs, rows=rows, **keywords)
            torch.testing.assert_close(record.weights, expected.weights)
            torch.testing.assert_close(record.lse, expected.lse)
            torch.testing.assert_close(record.weights.sum(-1), torch.ones_like(record.lse))
            assert not record.weights.requires_grad
    assert seen[0].settings["window"] == 1 and seen[1].settings["segment_length"] == 3
    plain = m[1](first)
    with attnjourney.capture(m, hook=lambda record: None):
        assert torch.equal(m[1](first), plain)
    compiled = torch.compile(m[1], backend="eager", fullgraph=True)
    with torch.no_grad(), attnjourney.capture(compiled) as seen:
        torch.testing.assert_close(compiled(first), plain)
    assert {r.operator for r in seen} == {"attention"}  # the parts: segments of a batch


@pytest.mark.parametrize("backend", ["counter", "inductor"])
def test_compiled_models(backend):
    from torch._dynamo.testing import CompileCounter

    m, x = model(), torch.randn(2, 6, 16)
    with torch.no_grad(), attnjourney.capture(m) as expected:
        m(x)
    for warm in (False, True):
        torch._dynamo.reset()
        frames = CompileCounter() if backend == "counter" else backend
        compiled = torch.compile(m, backend=frames, fullgraph=True)
        if warm:
            plain = compiled(x)
        with attnjourney.capture(compiled) as seen:
            out = compiled(x)
        if warm:
            assert torch.equal(out, plain)
        if backend == "counter":
            assert frames.frame_count == 1  # it was compiled, and not once more
        assert len(seen) == 3
        for a, b in zip(seen, expected):
            torch.testing.assert_close(a.weights, b.weights)


# ---------------------------------------------------------------------------------------------------- use and misuse


def test_nested_reentrant_and_exceptions():
    m, x = model(), torch.randn(2, 6, 16)
    one, two = attnjourney.capture(m), attnjourney.capture(m, layers="0", rows=[0])
    with one as outer, two as inner:
        m(x)
        with one as again:
            m(x)
        assert again is outer
    assert len(outer) == 6 and len(inner) == 2
    with one:
        m(x)
    assert len(outer) == 9
    with pytest.raises(ZeroDivisionError), one:
        m(x)
        raise ZeroDivisionError
    m(x)  # nothing left behind
    assert len(outer) == 12 and not m._forward_pre_hooks
    records = []
    with attnjourney.capture(m, hook=records.append) as seen:
        m(x)
    assert [r.name for r in records] == NAMES and len(seen) == 0


def test_misuse():
    m, x = model(), torch.randn(2, 6, 16)
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module or None, got int"):
        attnjourney.capture(3)
    for layers in ("3.attention", [torch.nn.Linear(1, 1)]):
        with pytest.raises(ValueError, match="layers: expected names of modules of the model, '0', '0.attention'"):
            attnjourney.capture(m, layers=layers)
    with (
        pytest.raises(ValueError, match="rows: expected numbers from -6 to 5, got 6"),
        attnjourney.capture(m, rows=[6]),
    ):
        m(x)
    with pytest.raises(ValueError, match="heads: expected numbers from -4 to 3, got -5"):
        with attnjourney.capture(m, heads=[-5]):
            m(x)
    with pytest.warns(UserWarning, match="nothing was recorded"), attnjourney.capture(m):
        pass
    torch_model = torch.nn.TransformerEncoderLayer(16, 4, 32)
    with pytest.warns(UserWarning, match="replace_attention"), attnjourney.capture(torch_model):
        torch_model(x)
    with pytest.raises(RuntimeError, match="capture: expected tensors with numbers, got those of a tracer"):
        with attnjourney.capture(m):
            torch.export.export(m, (x,))
    exported = torch.export.export(m, (x,)).module()
    with attnjourney.capture(None) as seen:
        exported(x)
    assert seen.names == ["gpt_attention.0", "gqa.1", "mla.2"]


def test_beside_other_watchers():
    """torch.func and the FLOP counter inside and outside: counted once, recorded once."""
    from torch.utils.flop_counter import FlopCounterMode

    m, x = model(), torch.randn(2, 6, 16)

    def run():
        m(x)
        with torch.no_grad():
            m[2].attention(x, cache=attnjourney.LatentCache(2, 8, 8, 4))

    with FlopCounterMode(display=False) as counter:
        run()
    expected = counter.get_total_flops()
    for order in (1, -1):
        with contextlib.ExitStack() as stack:
            blocks = [FlopCounterMode(display=False), attnjourney.capture(m)][::order]
            entered = [stack.enter_context(block) for block in blocks][::order]
            run()
        assert entered[0].get_total_flops() == expected and len(entered[1]) == 4
    for call in (torch.func.grad(lambda x: m(x).sum()), lambda x: torch.func.jvp(m, (x,), (x,))):
        with attnjourney.capture(m) as seen:
            call(x)
        assert seen.names == NAMES and len(seen) == 3


def test_memory_follows_the_rows():
    """Rows of 32,768 keys: the peak of what is allocated stays far below one head's N x N."""
    q = torch.randn(1, 1, 32768, 16)
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        with attnjourney.capture(None, rows=[-1, 5]) as seen:
            attnjourney.attention(q, q, q, is_causal=True, window_size=(64, -1))
    assert seen[0].weights.shape == (1, 1, 2, 32768)
    assert max(e.self_cpu_memory_usage for e in profile.events()) < 64 * 2**20
