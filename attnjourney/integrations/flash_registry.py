"""This package's name in torch's registry of flash attention; nothing is activated by the import."""

import warnings

import torch
from torch.nn.attention import register_flash_attention_impl


class _Handle:
    """What torch.nn.attention's registry keeps while this implementation is its active one: `activate`, and torch's
    five operators of flash attention on CUDA."""

    def __init__(self) -> None:
        from . import flash_operators, sdpa

        sdpa.activate()
        self.deactivate = sdpa.deactivate
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            flash_operators.register(self.library)

    def remove(self) -> None:
        self.library._destroy()
        self.deactivate()


# torch.nn.attention.activate_flash_attention_impl("attnjourney")
register_flash_attention_impl("attnjourney", register_fn=_Handle)
