"""torch.ops.attnjourney under a name that editors and type checkers know: torch_ops.pyi has the operators' signatures.

from attnjourney import torch_ops
torch_ops.attention(query, key, value, is_causal=True)  # torch.ops.attnjourney.attention
"""

import sys

import torch

sys.modules[__name__] = torch.ops.attnjourney  # itself a module, whose attributes are the operators
