"""Public functions of the operators; importing this package registers them with PyTorch."""

from .attention import attention
from .gpt_attention import gpt_attention
from .gqa import gqa
from .mha import mha
from .mla import mla
from .rope import rope_with_tables

__all__ = ["attention", "gpt_attention", "gqa", "mha", "mla", "rope_with_tables"]
