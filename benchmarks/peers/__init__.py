"""Everyone who can take part, by name. A new peer: a file here with a Peer, and a line below."""

from __future__ import annotations

from . import deepseek, flash, flex, jax, module, onnx, ours, parts, plain, sdpa, zen
from .base import Peer, Skip

__all__ = ["DEFAULT", "OURS", "PEERS", "QUICK", "Peer", "Skip", "find"]

OURS = ours.Ours()
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        *sdpa.PEERS,
        module.Module(),
        *deepseek.PEERS,
        plain.Plain(),
        plain.Softmax(),
        parts.Parts(),
        flex.Flex(),
        *flash.PEERS,
        onnx.OnnxRuntime(),
        jax.Jax(),
        zen.ZenTorch(),
    )
}
# on CPU the flash backend is what sdpa chooses by itself
DEFAULT = {
    "cpu": [name for name in PEERS if name != "sdpa-flash"],
    "cuda": list(PEERS),
}
QUICK = ["sdpa", "mha"]


def find(names: str) -> list[Peer]:
    """Peers by comma-separated names; ValueError names the ones there are."""
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise ValueError(f"--peers: unknown {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in wanted]
