"""python -m examples.recall: the small model must name a byte that was planted segments ago.

A sequence of noise holds, somewhere in its first segment, a marker and after it the byte to remember; it ends, segments
later, with a question mark: the next byte is the planted one. Local attention sees its own segment alone, so it cannot
do better than guess among the 16 bytes that are planted. Infini-attention, with the same segments, can: its memory
holds what the segments before it wrote.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnjourney
from examples.config import Config
from examples.model import GPT, Variant

SEGMENT, SEGMENTS = 16, 4
MARKER, QUESTION = ord("#"), ord("?")
PLANTED = torch.arange(ord("a"), ord("a") + 16)  # what may be planted
NOISE = torch.arange(ord("A"), ord("Z") + 1)


def sequences(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (batch, SEGMENT * SEGMENTS) and the planted bytes (batch,)."""

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    tokens = NOISE[draw(len(NOISE), batch, SEGMENT * SEGMENTS)]
    planted, at, rows = PLANTED[draw(len(PLANTED), batch)], draw(SEGMENT - 1, batch), torch.arange(batch)
    tokens[rows, at], tokens[rows, at + 1] = MARKER, planted
    tokens[:, -1] = QUESTION
    return tokens, planted


class Infini(attnjourney.nn.InfiniAttention):
    def __init__(self, config: Config):
        super().__init__(config.embed, config.heads, segment_length=SEGMENT)


class Local(Infini):
    """The same layer with its memory shut: causal attention inside a segment."""

    def forward(self, x: Tensor) -> Tensor:
        segments = x.unflatten(1, (-1, SEGMENT)).flatten(0, 1)  # one segment a call: there is nothing to remember
        return super().forward(segments).unflatten(0, (x.shape[0], -1)).flatten(1, 2)


def train(attention: type[nn.Module], steps: int, seed: int = 0) -> float:
    """The share of planted bytes that a model with this attention names after training, on sequences it never saw."""
    config = Config(layers=2, embed=64, heads=4, context=SEGMENT * SEGMENTS)
    model = GPT(Variant("", "", attention, learned_positions=True), config)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for _ in range(steps):
        tokens, planted = sequences(64, generator)
        loss = F.cross_entropy(model(tokens)[:, -1], planted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        tokens, planted = sequences(512, torch.Generator().manual_seed(seed + 1))
        return (model(tokens)[:, -1].argmax(-1) == planted).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.recall", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(f"planted {(SEGMENTS - 2) * SEGMENT + 1} to {SEGMENTS * SEGMENT - 1} bytes back, segments of {SEGMENT};")
    print(f"guessing names {1 / len(PLANTED):.0%}")
    for name, attention in (("local attention", Local), ("Infini-attention", Infini)):
        start = time.perf_counter()
        share = train(attention, steps)
        print(f"{name:18s} {share:4.0%} recalled after {steps} steps ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
