"""Numbers for the report: bits per byte on held-out text, a bigram model's beside them, speed and cache size."""

import math
import statistics
import time

import torch
import torch.nn.functional as F

from examples.config import Config
from examples.data import Text, random_batch
from examples.model import GPT, VARIANTS, VOCABULARY
from examples.train import make_optimizer, train_step


@torch.no_grad()
def bits_per_byte(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean of -log2 p(target) over inputs and targets (windows, T)."""
    nats = 0.0
    for x, y in zip(inputs.split(16), targets.split(16)):
        nats += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()  # (16 T, 256), (16 T,)
    return nats / targets.numel() / math.log(2)


def bigram_bits_per_byte(train: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The same for p(byte | byte before it), counted on the training text with one added to each count."""
    pairs = train[:-1].long() * VOCABULARY + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + 1
    log_p = (counts / counts.sum(dim=1, keepdim=True)).log2()  # (byte before, byte)
    return -log_p[inputs, targets].mean().item()


def tokens_per_second(config: Config, text: Text, rounds: int) -> dict[str, float]:
    """Training speed: median of `rounds` steps of each variant, taken in turns so that all meet the same machine."""
    seconds = {name: [] for name in VARIANTS}
    models = {name: GPT(variant, config) for name, variant in VARIANTS.items()}
    optimizers = {name: make_optimizer(model, config) for name, model in models.items()}
    batches = torch.Generator().manual_seed(config.seed)
    for turn in range(rounds + 1):
        inputs, targets = random_batch(text.train, config.batch, config.context, batches)
        for name, model in models.items():
            start = time.perf_counter()
            train_step(model, optimizers[name], inputs, targets)
            if turn > 0:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: config.batch * config.context / statistics.median(values) for name, values in seconds.items()}


def cache_bytes_per_token(config: Config, bytes_per_number: int = 4) -> dict[str, tuple[int, str]]:
    """What generation must remember of each token, over all layers, and the formula it comes from."""
    layers, embed, size = config.layers, config.embed, bytes_per_number
    kv_heads, head_dim = config.kv_heads, config.head_dim
    rank, rope = config.kv_lora_rank, config.rope_head_dim
    full = (2 * layers * embed * size, f"2 · {layers} layers · {embed} embed · {size} bytes")
    return {
        "mha": full,
        "gpt": full,
        "gqa": (
            2 * layers * kv_heads * head_dim * size,
            f"2 · {layers} layers · {kv_heads} kv heads · {head_dim} head dim · {size} bytes",
        ),
        "mla": (layers * (rank + rope) * size, f"{layers} layers · ({rank} latent + {rope} rope) · {size} bytes"),
    }
