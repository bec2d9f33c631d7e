"""A small GPT over bytes: the model of the demo (examples/) and of `python -m attnjourney.show`."""

from .checkpoint import CheckpointError as CheckpointError
from .checkpoint import load as load
from .checkpoint import save as save
from .model import VOCABULARY as VOCABULARY
from .model import Block as Block
from .model import ByteGPT as ByteGPT
from .training import python_sources as python_sources
from .training import small as small
from .training import train as train
