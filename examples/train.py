"""The training loop, the same for every variant: same seed, same batches, same number of steps."""

import math
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F

from examples import checkpoint
from examples.config import Config
from examples.data import Text, random_batch
from examples.model import GPT, VARIANTS
from examples.progress import Progress

CHECKPOINT_SECONDS = 10


def make_optimizer(model: GPT, config: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.99), fused=True)


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up over the first tenth, then half a cosine down to a twentieth."""
    warm_up = (step + 1) / max(1, config.steps // 10)
    decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * min(warm_up, decay)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """One step on inputs and targets (B, T); returns the loss in nats per byte."""
    logits = model(inputs)  # (B, T, 256)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # (B T, 256), (B T,)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(name: str, config: Config, text: Text, folder: Path, progress: Progress) -> tuple[GPT, list[float]]:
    """Trains one variant, or goes on where its checkpoint in `folder` ends; returns the model and each step's loss.

    KeyboardInterrupt (Ctrl-C) comes between two steps, after the checkpoint was written.
    """
    path = folder / f"{name}.pt"
    identity = {"config": asdict(config), "text": sha256(text.train.numpy()).hexdigest()}
    model = GPT(VARIANTS[name], config)
    optimizer = make_optimizer(model, config)
    batches = torch.Generator().manual_seed(config.seed)
    losses = []

    state = matching_checkpoint(path, identity, progress)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.set_state(state["batches"])
        losses = state["losses"]
    progress.begin(name, len(losses))

    def save() -> None:
        checkpoint.save(
            path,
            {
                "identity": identity,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "batches": batches.get_state(),
                "losses": losses,  # as many as steps were made
            },
        )

    saved_at = time.monotonic()
    with checkpoint.StopBetweenSteps() as stop:
        for step in range(len(losses), config.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            inputs, targets = random_batch(text.train, config.batch, config.context, batches)
            losses.append(train_step(model, optimizer, inputs, targets))
            progress.step(name, step + 1, losses[-1])

            finished = step + 1 == config.steps
            if finished or stop.requested or time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                save()
                saved_at = time.monotonic()
            if stop.requested:
                raise KeyboardInterrupt
    return model, losses


def matching_checkpoint(path: Path, identity: dict, progress: Progress) -> dict | None:
    """The state to go on from; None where there is none or it belongs to other sizes or another text."""
    try:
        state = checkpoint.load(path)
    except checkpoint.DamagedCheckpoint:
        progress.note(f"{path} is damaged: this variant starts over")
        return None
    if state is not None and state["identity"] != identity:
        progress.note(f"{path} is from other settings or another text: this variant starts over")
        return None
    return state
