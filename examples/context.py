"""The trained GQA model beyond the length it was trained for, by each method of rotary positions that there is.

Nothing is trained again: only the tables of cos and sin change. A model sees positions it has never met; the methods
turn queries and keys more slowly, so that the angles stay within what it has met.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnjourney import rope_frequencies
from examples.config import Config
from examples.data import held_out_windows
from examples.model import GPT

VARIANT = "gqa"
FACTORS = (4, 3, 2)  # the first one that the held-out text is long enough for
WINDOWS = 24
LABELS = {
    "default": "unchanged",
    "linear": "linear (position interpolation)",
    "ntk": "NTK-aware",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
    "llama3": "Llama 3.1",
    "longrope": "LongRoPE",
}


@dataclass(frozen=True)
class Beyond:
    """Bits per byte at every position of windows `factor` times the trained context."""

    factor: int
    context: int  # trained
    bits: dict[str, Tensor]  # by method, (factor * context,)

    def means(self) -> dict[str, tuple[float, float]]:
        """By method: bits per byte within the trained length, and beyond it."""
        return {
            name: (b[: self.context].mean().item(), b[self.context :].mean().item()) for name, b in self.bits.items()
        }


def measure(model: GPT, config: Config, held_out: Tensor) -> Beyond | None:
    """None where the held-out text is too short for twice the context."""
    factor = next((f for f in FACTORS if len(held_out) > f * config.context), None)
    if factor is None:
        return None
    inputs, targets = held_out_windows(held_out, factor * config.context, WINDOWS)  # both (windows, factor * context)
    bits = {name: bits_per_position(model, tables(name, config, factor), inputs, targets) for name in LABELS}
    return Beyond(factor, config.context, bits)


def tables(method: str, config: Config, factor: int) -> tuple[Tensor, Tensor]:
    """cos, sin (factor * context, head_dim / 2)."""
    length, dim = factor * config.context, config.head_dim
    frequencies, attention_factor = rope_frequencies(method, dim, **parameters(method, config, factor))
    angles = torch.arange(length).double().unsqueeze(1) * frequencies  # (length, head_dim / 2)
    return (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()


def parameters(method: str, config: Config, factor: int) -> dict:
    trained = {"factor": float(factor), "original_max_position_embeddings": config.context}
    if method in ("yarn", "llama3"):
        return trained
    if method == "dynamic":  # its base grows with length / trained length
        length = {"max_position_embeddings": config.context, "seq_len": factor * config.context}
        return {"factor": 1.0, **length}
    if method == "longrope":  # the paper searches for its factors; these are those of YaRN
        plain, _ = rope_frequencies("default", config.head_dim)
        yarn, _ = rope_frequencies("yarn", config.head_dim, **trained)
        long = (plain / yarn).tolist()
        return {**trained, "short_factor": [1.0] * len(long), "long_factor": long, "seq_len": factor * config.context}
    return {} if method == "default" else {"factor": float(factor)}


@torch.no_grad()
def bits_per_position(model: GPT, cos_sin: tuple[Tensor, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log2 p(target) at each position: inputs and targets (windows, T) -> (T,)."""
    layers = [block.attention for block in model.blocks]
    kept = [(layer.cos, layer.sin) for layer in layers]
    try:
        for layer in layers:
            layer.cos, layer.sin = cos_sin
        nats = [
            F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")  # (8, 256, T), (8, T) -> (8, T)
            for x, y in zip(inputs.split(8), targets.split(8))
        ]
    finally:
        for layer, (cos, sin) in zip(layers, kept):
            layer.cos, layer.sin = cos, sin
    return torch.cat(nats).mean(0) / math.log(2)
