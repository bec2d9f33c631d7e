"""Public functions of the operators; importing this package registers them with PyTorch."""

from .attention import attention
from .decode import decode
from .gpt_attention import gpt_attention
from .gqa import gqa
from .mha import mha
from .mla import mla
from .mla_decode import mla_decode
from .rope import rope_with_tables

__all__ = ["attention", "decode", "gpt_attention", "gqa", "mha", "mla", "mla_decode", "rope_with_tables"]
