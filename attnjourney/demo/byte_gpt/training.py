"""A small model, trained in seconds: what there is to see without a model of one's own."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...nn import GroupedQueryAttention
from .model import ByteGPT

LAYERS, HEADS, EMBED, CONTEXT, BATCH = 4, 4, 96, 128, 8
LEARNING_RATE = 3e-3


def small(seed: int = 1) -> ByteGPT:
    """4 layers of 4 heads, 96 wide, with rotary positions: texts of any length."""
    model = ByteGPT([GroupedQueryAttention(EMBED, HEADS, HEADS, rope=10000.0) for _ in range(LAYERS)], EMBED, None)
    model.initialise(seed)
    return model


def python_sources(limit: int = 4 << 20) -> Tensor:
    """The first bytes of the sources of Python's standard library, (n,) uint8. FileNotFoundError if there are none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for file in sorted(folder.glob("*.py")):
        data += file.read_bytes()[: limit - len(data)]
    if len(data) <= CONTEXT:
        raise FileNotFoundError(f"{folder}: no sources of Python's standard library to train on")
    return torch.frombuffer(data, dtype=torch.uint8)


def train(
    model: ByteGPT, text: Tensor, steps: int, *, seed: int = 1, on_step: Callable[[int, float], None] | None = None
) -> list[float]:
    """AdamW on random pieces of `text`, (n,) uint8; returns the loss of each step in nats per byte."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, max(1, steps), pct_start=0.1)
    losses = []
    for step in range(steps):
        start = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        piece = text[start + torch.arange(CONTEXT + 1)].long()  # (BATCH, CONTEXT + 1): each byte's target is the next
        loss = F.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if on_step:
            on_step(step + 1, losses[-1])
    return losses
