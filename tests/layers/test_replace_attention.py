"""replace_attention: models written for torch.nn.MultiheadAttention, with ours inside."""

import copy
import math

import pytest
import torch
from torch import nn

import attnjourney
from attnjourney import replace_attention
from tests.support.testing import random_tensor


@pytest.fixture
def calls(monkeypatch):
    """The number of forwards of our module so far, in a list of one."""
    count, forward = [0], attnjourney.nn.MultiheadAttention.forward

    def counted(self, *args, **kwargs):
        count[0] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(attnjourney.nn.MultiheadAttention, "forward", counted)
    return count


def encoder(layers=2, dtype=torch.float64, norm_first=False, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first, dtype=dtype)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first, **options).eval()


def padded(lengths, width=16, dtype=torch.float64):
    x = random_tensor((len(lengths), max(lengths), width), dtype, outliers=False)
    return x, torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_in_evaluation_calls_ours_and_stays_dense(calls, grad, norm_first):
    theirs = encoder(norm_first=norm_first)
    ours = copy.deepcopy(theirs)
    assert replace_attention(ours) == ["layers.0.self_attn", "layers.1.self_attn"]
    x, padding = padded([5, 3, 4])
    with torch.set_grad_enabled(grad):
        actual = ours(x, src_key_padding_mask=padding)
        expected = theirs.train()(
            x, src_key_padding_mask=padding
        )  # dropout 0: training is torch's path without packing
    assert calls == [2]
    assert actual.shape == x.shape
    torch.testing.assert_close(actual[~padding], expected[~padding], rtol=1e-10, atol=1e-10)


def test_encoder_built_from_a_replaced_layer(calls):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
    replace_attention(layer)
    with pytest.warns(UserWarning, match="activation_relu_or_gelu"):
        model = nn.TransformerEncoder(layer, 3).eval()
    x, padding = padded([2, 4])
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding).shape == x.shape
    assert calls == [3]


def test_whole_transformer(calls):
    torch.manual_seed(0)
    theirs = nn.Transformer(16, 4, 2, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    names = replace_attention(ours)
    assert len(names) == 6 and "decoder.layers.1.multihead_attn" in names
    (source, source_padding), target = padded([6, 4]), random_tensor((2, 5, 16), torch.float64, seed=1, outliers=False)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    options = dict(tgt_mask=causal, tgt_is_causal=True, src_key_padding_mask=source_padding)
    options["memory_key_padding_mask"] = source_padding
    results = []
    for model in (ours, theirs):
        out = model(source, target, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    assert calls == [6]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_shared_modules_parameters_and_hooks_stay():
    attention = nn.MultiheadAttention(8, 2)
    hooked = []
    attention.register_forward_hook(lambda *_: hooked.append(1))
    model = nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention]), "c": nn.MultiheadAttention(8, 2)})
    parameters = list(model.parameters())
    assert replace_attention(model) == ["a", "b.0", "c"]
    assert model["a"] is model["b"][0] is attention
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(3, 2, 8)
    model["b"][0](x, x, x)
    assert hooked == [1]
    assert replace_attention(model) == []


def test_the_model_itself_and_what_is_left_alone():
    class Custom(nn.MultiheadAttention):
        pass

    custom, plain = Custom(8, 2), nn.MultiheadAttention(8, 2)
    assert replace_attention(custom) == [] and type(custom) is Custom
    assert replace_attention(plain) == [""] and type(plain) is attnjourney.nn.MultiheadAttention
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.func.functional_call(copy.deepcopy(plain), {}, (x, x, x)), plain(x, x, x))
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got int"):
        replace_attention(3)


# ---------------------------------------------------------------------------------------------------- training


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, pre-norm blocks with nn.MultiheadAttention, as torchvision's."""

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x):
            y = self.norm1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    def __init__(self, width=32, heads=4, layers=2, image=16, patch=4, classes=5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[self.Block(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class SequenceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(2, torch.float32), nn.Linear(16, 5)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[1:, -3:] = True
        causal = torch.full((x.shape[1],) * 2, -math.inf).triu(1)
        return self.head(self.encoder(x, causal, padding.float().masked_fill(padding, -math.inf))[:, 0])


@pytest.mark.parametrize("make, shape", [(VisionTransformer, (6, 3, 16, 16)), (SequenceModel, (6, 9, 16))])
def test_training_gives_torchs_losses(make, shape, calls):
    losses = {}
    for name in ("ours", "torch"):
        torch.manual_seed(0)
        model = make().train()
        if name == "ours":
            assert len(replace_attention(model)) == 2
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x, target = torch.randn(shape), torch.randint(5, (shape[0],))
        losses[name] = []
        for _ in range(15):
            loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses[name].append(loss.item())
    assert calls == [30]
    assert losses["ours"][-1] < 0.5 * losses["ours"][0]
    torch.testing.assert_close(torch.tensor(losses["ours"]), torch.tensor(losses["torch"]), rtol=1e-4, atol=1e-4)
