"""Checkpoints of the demo (examples/train.py) and of `save`, read as models of attnjourney.nn layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import CausalSelfAttention, GroupedQueryAttention, MultiheadLatentAttention
from .model import ByteGPT

# the demo's attention layers are plain parameters; what they are called in attnjourney.nn
NAMES = {
    "in_proj_weight": "qkv_proj.weight",
    "in_proj_bias": "qkv_proj.bias",
    "out_proj_weight": "out_proj.weight",
    "out_proj_bias": "out_proj.bias",
    "attention.in_proj_weight": "qkv_proj.weight",  # torch.nn.MultiheadAttention
    "attention.in_proj_bias": "qkv_proj.bias",
    "attention.out_proj.weight": "out_proj.weight",
    "attention.out_proj.bias": "out_proj.bias",
    "q_weight": "q_proj.weight",
    "k_weight": "k_proj.weight",
    "v_weight": "v_proj.weight",
    "o_weight": "o_proj.weight",
    "kv_a_weight": "kv_a_proj_with_mqa.weight",
    "kv_a_norm": "kv_a_layernorm.weight",
    "kv_b_weight": "kv_b_proj.weight",
}


class CheckpointError(ValueError):
    """Not a checkpoint of a byte-level GPT, or not all of one."""


def save(path: str | os.PathLike, model: ByteGPT, losses: list[float]) -> None:
    """Writes what `load` reads: the weights, the number of heads, and each training step's loss in nats per byte."""
    attention: Any = model.blocks[0].attention
    identity = {"config": {"heads": attention.num_heads}}
    torch.save({"identity": identity, "model": model.state_dict(), "losses": losses}, path)


def load(path: str | os.PathLike) -> tuple[ByteGPT, list[float]]:
    """The model of a checkpoint and each training step's loss in nats per byte. Nothing in the file is executed.

    Raises OSError where the file cannot be read, CheckpointError where it holds something else.
    """
    with Path(path).open("rb") as stream:
        try:
            saved = torch.load(stream, weights_only=True, map_location="cpu")
        except Exception as error:  # torch.load raises whatever its parsers raise
            raise CheckpointError(f"{path}: not a checkpoint, or damaged ({type(error).__name__})") from error
    try:
        weights = {_name(name): weight for name, weight in saved["model"].items()}
        config, losses = saved["identity"]["config"], [float(loss) for loss in saved["losses"]]
        _check_weights(weights)
        with torch.device("meta"):  # without memory: names and shapes first
            _model(int(config["heads"]), weights).load_state_dict(weights, assign=True)
        model = _model(int(config["heads"]), weights)
        model.load_state_dict(weights)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: not a checkpoint of a byte-level GPT ({what})") from error
    return model.eval(), losses


def _name(name: str) -> str:
    """blocks.0.attention.q_weight -> blocks.0.attention.q_proj.weight"""
    block, attention, own = name.partition(".attention.")
    return block + attention + NAMES.get(own, own) if name.startswith("blocks.") else name


def _check_weights(weights: dict[str, Tensor]) -> None:
    """Dense real numbers that are all in the file: a stride of 0, or one storage under many names, claims any size."""
    claimed, stored = 0, {}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.layout != torch.strided or not weight.is_floating_point():
            got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise TypeError(f"{name}: expected a dense tensor of real numbers, got {got}")
        claimed += weight.numel() * weight.element_size()
        storage = weight.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
    if claimed > sum(stored.values()):
        raise ValueError(f"its weights claim {claimed} bytes, the file has {sum(stored.values())}")


def _model(heads: int, weights: dict[str, Tensor]) -> ByteGPT:
    """A model of the kind and the sizes that the weights tell."""
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    first = "blocks.0.attention."
    own = {name.removeprefix(first): weight for name, weight in weights.items() if name.startswith(first)}
    make: Callable[[], nn.Module]
    embed = weights["embedding.weight"].shape[1]
    if "qkv_proj.weight" in own:

        def make():
            return CausalSelfAttention(embed, heads, bias="qkv_proj.bias" in own)

    elif "kv_a_proj_with_mqa.weight" in own:
        rank = own["kv_a_layernorm.weight"].shape[0]
        rope = own["kv_a_proj_with_mqa.weight"].shape[0] - rank

        def make():
            return MultiheadLatentAttention(
                embed,
                heads,
                q_lora_rank=None,
                kv_lora_rank=rank,
                qk_nope_head_dim=own["q_proj.weight"].shape[0] // heads - rope,
                qk_rope_head_dim=rope,
                v_head_dim=own["o_proj.weight"].shape[1] // heads,
                rope=10000.0,
            )

    else:
        head_dim = own["q_proj.weight"].shape[0] // heads

        def make():
            return GroupedQueryAttention(
                embed, heads, own["k_proj.weight"].shape[0] // head_dim, head_dim=head_dim, rope=10000.0
            )

    positions = weights.get("positions.weight")
    return ByteGPT([make() for _ in range(layers)], embed, None if positions is None else positions.shape[0])
