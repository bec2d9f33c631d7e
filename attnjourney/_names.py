"""The operators that are registered with torch."""

import torch

NAMESPACE = "attnjourney::"


def operator_names() -> list[str]:
    """Of all that are there, C++'s and Python's, without the namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(NAMESPACE) for name in names if name.startswith(NAMESPACE))
