"""A training step of a small model whose attention takes trainable options, under everything that wraps a step."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnjourney

WIDTH, HEADS, KV_HEADS = 24, 4, 2


class Model(torch.nn.Module):
    """Grouped heads, a causal window with a prefix, softcap; sinks, slopes and a bias by distance are trained."""

    def __init__(self, dropout_p=0.0):
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, WIDTH + 2 * WIDTH * KV_HEADS // HEADS)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))
        self.slopes = torch.nn.Parameter(attnjourney.alibi_slopes(HEADS))
        self.bias = torch.nn.Parameter(torch.randn(HEADS, 1, 40))
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.dropout_p = dropout_p

    def attend(self, x, lengths):
        q, k, v = (
            self.project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
        )
        return attnjourney.attention(
            q, k, v, self.bias[..., : x.shape[1]], self.dropout_p, True, enable_gqa=True, window_size=(8, -1),
            prefix_length=2, softcap=3.0, key_lengths=lengths, query_lengths=lengths, sinks=self.sinks,
            alibi_slopes=self.slopes,
        )  # fmt: skip

    def forward(self, x, lengths):
        return self.out(self.attend(x, lengths).transpose(1, 2).flatten(2))


def batch(length=21):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(3, length, WIDTH, generator=generator), torch.tensor([length, 5, length - 3])


def model(**options):
    torch.manual_seed(0)
    return Model(**options)


def step(module, forward=None, length=21):
    """The parameters after a step of gradient descent, from one seed."""
    module = copy.deepcopy(module) if forward is None else module
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.zero_grad()
    torch.manual_seed(5)
    x, lengths = batch(length)
    loss = (module if forward is None else forward)(x, lengths).square().mean()
    loss.backward()
    assert all(p.grad.any() for p in module.parameters())
    optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same(first, second, **tolerance):
    for name in first:
        torch.testing.assert_close(first[name], second[name], **tolerance or dict(rtol=0, atol=0), msg=name)


@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_compiled_with_dynamic_lengths_and_no_recompilation(dropout_p):
    torch._dynamo.reset()
    compiled_model, eager = model(dropout_p=dropout_p), model(dropout_p=dropout_p)
    compiled = torch.compile(compiled_model, fullgraph=True, dynamic=True, backend="aot_eager")
    step(compiled_model, compiled)
    step(eager, eager)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (13, 34):
            assert_same(step(compiled_model, compiled, length), step(eager, eager, length), rtol=1e-5, atol=1e-6)


def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled_model = model()
    compiled = torch.compile(compiled_model, fullgraph=True)
    assert_same(step(compiled_model, compiled), step(model()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_activation_checkpointing(use_reentrant):
    module = model(dropout_p=0.3)

    def forward(x, lengths):
        return checkpoint(module, x.requires_grad_(), lengths, use_reentrant=use_reentrant)

    assert_same(step(module, forward), step(model(dropout_p=0.3)))


def test_saved_tensor_hooks_see_no_matrix_of_weights():
    module, sizes = model(), []

    def forward(x, lengths):
        def pack(t):
            sizes.append(t.numel())
            return t.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return module(x, lengths)

    assert_same(step(module, forward), step(model()))
    x, _ = batch()
    module(torch.cat([x] * 2, 1)[:, :40], torch.tensor([40, 5, 30]))
    assert sizes and max(sizes) < 3 * HEADS * 21 * 21


def test_autocast():
    module, seen = model(), []

    def forward(x, lengths):
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(module.attend(x, lengths).dtype)
            return module(x, lengths)

    assert_same(step(module, forward), step(model()), rtol=0.05, atol=0.01)
    assert seen == [torch.bfloat16]


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(step(model(dropout_p=0.3)), step(model(dropout_p=0.3)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_exported_with_a_dynamic_length():
    module = model()
    length = torch.export.Dim("length", min=4, max=39)
    program = torch.export.export(module, batch(), dynamic_shapes=({1: length}, None))
    for n in (9, 33):
        torch.testing.assert_close(program.module()(*batch(n)), module(*batch(n)))


def test_compiled_ahead_of_time(tmp_path):
    module = model().eval()
    length = torch.export.Dim("length", min=4, max=39)
    with torch.no_grad():
        program = torch.export.export(module, batch(), dynamic_shapes=({1: length}, None))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for n in (9, 33):
            torch.testing.assert_close(loaded(*batch(n)), module(*batch(n)), rtol=1e-5, atol=1e-6)
