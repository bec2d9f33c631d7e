"""Text from a trained model, one byte at a time, with a cache of the earlier tokens' keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.config import Config
from examples.model import GPT


class Cache:
    """What each layer keeps of the tokens so far: keys and values (MHA, GPT, GQA), or the latent (MLA)."""

    def __init__(self, model: GPT, config: Config, batch: int = 1):
        self.length = 0
        self.layers = [
            torch.zeros(batch, block.attention.cache_heads, config.context, block.attention.cache_width)
            for block in model.blocks
        ]

    def bytes_per_token(self) -> int:
        return sum(layer[:, :, 0].nbytes // layer.shape[0] for layer in self.layers)


@torch.no_grad()
def forward_cached(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """The logits (B, T, 256) of the next T tokens (B, T): a whole prompt on an empty cache, or one token."""
    assert cache.length == 0 or tokens.shape[1] == 1
    x = model.embed(tokens, start=cache.length)
    for block, layer in zip(model.blocks, cache.layers):
        x = x + attend_cached(block.attention, block.attention_norm(x), layer, cache.length)
        x = x + block.mlp(block.mlp_norm(x))
    cache.length += tokens.shape[1]
    return model.head(model.norm(x))


def attend_cached(attention: nn.Module, x: Tensor, layer: Tensor, start: int) -> Tensor:
    """x (B, T, E) at positions start ... start + T - 1; layer (B, K, context, width) is filled up to start + T."""
    stop = start + x.shape[1]
    query, layer[:, :, start:stop] = attention.project(x, start)  # (B, H, T, width of a key), (B, K, T, width)
    key, value = attention.keys_values(layer[:, :, :stop])  # views of the cache: (B, K, stop, ...)
    out = torch.ops.attnjourney.attention(
        query, key, value, is_causal=x.shape[1] > 1, scale=attention.scale, enable_gqa=True
    )  # (B, H, T, width of a value); one query row alone sees all keys
    return attention.merge(out)


def generate(
    model: GPT, config: Config, prompt: bytes, count: int, temperature: float = 0.0, seed: int = 0
) -> tuple[bytes, Cache]:
    """`count` more bytes after the prompt, with a cache. Temperature 0 takes the likeliest byte (greedy)."""
    generator = torch.Generator().manual_seed(seed)
    cache = Cache(model, config)
    text = bytearray(prompt)
    tokens = torch.tensor([list(prompt)])  # (1, prompt)
    for _ in range(count):
        logits = forward_cached(model, tokens, cache)[0, -1]  # (256,)
        if temperature == 0:
            token = logits.argmax()
        else:
            token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = token.view(1, 1)
        text.append(int(token))
    return bytes(text[len(prompt) :]), cache


@torch.no_grad()
def generate_without_cache(model: GPT, prompt: bytes, count: int) -> bytes:
    """The greedy text once more, each byte from the whole sequence before it: what the cache must agree with."""
    text = bytearray(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([list(text)]))[0, -1].argmax()))
    return bytes(text[len(prompt) :])


@torch.no_grad()
def attention_weights(model: GPT, text: bytes) -> Tensor:
    """Each layer's and head's causal attention weights over a short text: (layers, heads, T, T), rows sum to 1."""
    maps = []
    x = model.embed(torch.tensor([list(text)]))  # (1, T, E)
    hidden = torch.ones(len(text), len(text), dtype=torch.bool).triu(1)  # (T, T), True = in the future
    for block in model.blocks:
        query, kept = block.attention.project(block.attention_norm(x), start=0)
        key, _ = block.attention.keys_values(kept)  # (1, K, T, width)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # (1, H, T, width)
        scores = query @ key.transpose(-2, -1) * block.attention.scale  # (1, H, T, T)
        maps.append(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)[0])
        x = block(x)
    return torch.stack(maps)
