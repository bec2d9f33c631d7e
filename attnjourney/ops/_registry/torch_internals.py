"""What the operators need of PyTorch that has no public name. What is called at every call is bound once."""

from __future__ import annotations

from collections.abc import Callable

import torch

any_requires_grad = torch._C._any_requires_grad
below_autograd = torch._C._AutoDispatchBelowAutograd
grad_enabled = torch.is_grad_enabled
transforms_active = torch._C._are_functorch_transforms_active


def constant_in_graphs(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result, which imports the compiler: a second and a half."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def autocast_on(device_type: str) -> bool:
    """torch.is_autocast_enabled raises for devices that know no autocast, "meta" among them."""
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)
