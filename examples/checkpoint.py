"""A checkpoint that survives Ctrl-C, a crash and a full disk: written beside the old one, then renamed over it."""

import os
import signal
import types
from pathlib import Path

import torch


def save(path: Path, state: dict) -> None:
    """Replaces the checkpoint in one step: at any moment the file is either the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def load(path: Path) -> dict | None:
    """The state that was saved, None if there is none; DamagedCheckpoint if the file cannot be read."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises whatever its parsers raise
        raise DamagedCheckpoint(path) from error


class DamagedCheckpoint(Exception):
    """Not a checkpoint, or not all of one."""


class StopBetweenSteps:
    """Ctrl-C only sets `requested`, which the loop reads between two steps, so no checkpoint holds half a step.

    A second Ctrl-C interrupts at once; the last checkpoint is then up to CHECKPOINT_SECONDS old.
    """

    requested = False

    def __enter__(self) -> "StopBetweenSteps":
        self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *exception) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def handle(self, number: int, frame: types.FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
