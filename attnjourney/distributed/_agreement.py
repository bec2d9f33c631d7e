"""Before anything is sent: do all ranks make the same call?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..block_mask import BlockMask
from ._transfer import all_gather

REFUSALS = (ValueError, RuntimeError, NotImplementedError, TypeError)  # what a check of arguments raises


def described(arguments: dict[str, Any], free: Sequence[str] = ()) -> dict[str, str]:
    """Each as text; tensors by what their calls and transfers depend on. free: those whose length, the last dimension
    but one, may be each rank's own."""
    grads = torch.is_grad_enabled()

    def text(name: str, x: Any) -> str:
        if isinstance(x, Tensor):
            trained = ", requires grad" if grads and x.requires_grad else ""
            sizes = [str(n) for n in x.shape]
            if name in free and x.dim() > 1:
                sizes[-2] = "any"
            return f"shape ({', '.join(sizes)}) {str(x.dtype).removeprefix('torch.')}{trained}"
        if isinstance(x, BlockMask):
            return f"BlockMask of shape {tuple(x.shape)}, {len(x.index)} blocks of {x.block_size}"
        return str(tuple(x)) if isinstance(x, (list, tuple)) else repr(x)

    return {name: text(name, x) for name, x in arguments.items()}


def agree(
    what: str, call: dict[str, str], error: Exception | None, group: dist.ProcessGroup | None, device: torch.device,
    lengths: Sequence[int] = (),
) -> list[list[int]]:  # fmt: skip
    """Raises `error`, this rank's own; RuntimeError if another rank has one; ValueError naming what differs and the two
    ranks. One number of 8 bytes is all-gathered; descriptions only where these differ.

    lengths: numbers in which the ranks may differ, 8 bytes more for each. Returns each one's, by rank."""
    described = {**call, "error": f"{type(error).__name__}: {error}"} if error else call
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()
    own = [int.from_bytes(digest[:8], "big", signed=True), *lengths]
    gathered = all_gather(torch.tensor(own, device=device), group)
    numbers = gathered[:, 0].tolist()
    if len(set(numbers)) > 1:
        everyone: list = [None] * len(numbers)
        dist.all_gather_object(everyone, described, group=group)
        if error is None:
            _explain(what, everyone)
    if error is not None:
        raise error
    return gathered[:, 1:].T.tolist()


def _explain(what: str, everyone: list[dict[str, str]]) -> None:
    for rank, call in enumerate(everyone):
        if "error" in call:
            raise RuntimeError(f"{what}: rank {rank} of the group refused its arguments: {call['error']}")
    for rank, call in enumerate(everyone):
        for name in everyone[0]:
            if call[name] != everyone[0][name]:
                raise ValueError(
                    f"{name}: expected the same on every rank, got {everyone[0][name]} on rank 0 and {call[name]} on "
                    f"rank {rank} of the group"
                )
