"""A small GPT over bytes: the model of the demo (examples/) and of `python -m attnjourney.show`."""

from .checkpoint import CheckpointError, load, save
from .model import VOCABULARY, Block, ByteGPT
from .training import python_sources, small, train

__all__ = [
    "VOCABULARY",
    "Block",
    "ByteGPT",
    "CheckpointError",
    "load",
    "python_sources",
    "save",
    "small",
    "train",
]
