"""Models of other packages, unmodified, under attnjourney.activate: values and gradients beside torch's function."""

import importlib

import pytest
import torch

import attnjourney

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
NEAR = 2e-5  # relative, of float32 through a few layers; their gradients five times it


def package(name):
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision beside another torch
        pytest.skip(f"not here: {name} ({str(error)[:80]})")


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def unet():
    model = package("diffusers").UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    sample, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 16, generator=generator)
    return model, lambda: model(sample, 3, encoder_hidden_states=text).sample


def dit():
    model = package("diffusers").DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    sample = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    steps, labels = torch.tensor([3, 5]), torch.tensor([1, 2])
    return model, lambda: model(sample, timestep=steps, class_labels=labels).sample


def autoencoder():
    model = package("diffusers").AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, latent_channels=2)
    return model, lambda: model(images()).sample


def x_transformer(**options):
    x = package("x_transformers")
    layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=True, **options)
    model = x.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    return model, lambda: model(ids)


def timm(name, **options):
    model = package("timm").create_model(name, img_size=32, num_classes=5, **options)
    return model, lambda: model(images())


def torchvision():
    vit = package("torchvision.models.vision_transformer")
    model = vit.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=5)
    return model, lambda: model(images())


VIT = dict(patch_size=8, embed_dim=32, depth=2, num_heads=4)
MODELS = {
    "diffusers UNet": unet,
    "diffusers DiT": dit,
    "diffusers AutoencoderKL": autoencoder,
    "x-transformers": x_transformer,
    "x-transformers, rotary": lambda: x_transformer(rotary_pos_emb=True),
    "x-transformers, grouped": lambda: x_transformer(attn_kv_heads=2),
    "x-transformers, ALiBi": lambda: x_transformer(alibi_pos_bias=True),
    "timm ViT": lambda: timm("vit_tiny_patch16_224", **VIT),
    "timm DeiT3": lambda: timm("deit3_small_patch16_224", **VIT),
    "torchvision ViT": torchvision,
}


def results(model, run):
    model.zero_grad()
    out = run()
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_equals_torchs_attention(name):
    torch.manual_seed(0)
    model, run = MODELS[name]()
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():  # heads that begin as zeros would hide what is before them
        p.data.add_(torch.randn(p.shape, generator=generator) * 0.05)
    model.eval()  # no dropout
    expected = results(model, run)
    attnjourney.activity(reset=True)
    with attnjourney.active():
        actual = results(model, run)
    seen = attnjourney.activity()
    assert seen["attnjourney"] >= 1 and seen["torch"] == 0, seen
    for got, wanted, bound in zip(actual, expected, (NEAR, 5 * NEAR)):
        assert ((got - wanted).norm() / wanted.norm()).item() < bound
