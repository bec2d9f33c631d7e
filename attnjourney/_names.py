"""The operators that are registered with torch."""

import torch

NAMESPACE = "attnjourney::"


def operator_names() -> list[str]:
    """Of all that are there, C++'s and Python's, without the namespace. Not of implementations alone: the CUDA
    library's `_cuda_*`, of which tests make operators."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE))
    return sorted(name.removeprefix(NAMESPACE) for name in names if "::_cuda_" not in name)
