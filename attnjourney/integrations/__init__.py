"""Where other software lets an attention library in: a file for each client, imported when it is asked for."""

from importlib import import_module as _import_module
from typing import Any

_CLIENTS = "activity flash_attn flash_operators hub native_mha onnx sdpa transformers varlen_attn".split()


def __getattr__(name: str) -> Any:
    if name in _CLIENTS:
        return _import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
