"""What a model costs: parameters, FLOPs of training and of decoding, bytes of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ._model_parts import Part, parts_of_config, parts_of_module


@dataclass(frozen=True)
class Row:
    """One kind of part, all `count` of them together."""

    name: str
    count: int
    parameters: int
    forward_flops: int
    backward_flops: int
    decode_flops_per_token: int
    cache_bytes_per_token: int


@dataclass(frozen=True)
class Account:
    """The result of `account`. `as_dict()` for programs; print it with rich, or `print(account)`, for a table."""

    seq_len: int
    batch: int
    dtype: str
    parts: tuple[Row, ...]
    parameters: int
    forward_flops: int
    backward_flops: int
    decode_flops_per_token: int
    cache_bytes_per_token: int

    def as_dict(self) -> dict:
        """All numbers; `parts` is a list of dicts."""
        return {**asdict(self), "parts": [asdict(row) for row in self.parts]}

    def __rich__(self):
        from rich.table import Table

        title = f"batch {self.batch} x {self.seq_len} tokens, {self.dtype}"
        table = Table(title=title, show_footer=True)
        total = [f"{getattr(self, name):,}" for name, _ in COLUMNS]
        table.add_column("part", "total")
        table.add_column("count", "", justify="right")
        for (_, header), number in zip(COLUMNS, total):
            table.add_column(header, number, justify="right")
        for row in self.parts:
            table.add_row(row.name, str(row.count), *(f"{getattr(row, name):,}" for name, _ in COLUMNS))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


COLUMNS = (
    ("parameters", "parameters"),
    ("forward_flops", "forward FLOPs"),
    ("backward_flops", "backward FLOPs"),
    ("decode_flops_per_token", "decode FLOPs / token"),
    ("cache_bytes_per_token", "cache bytes / token"),
)


def account(
    model: nn.Module | Mapping | object, seq_len: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Account:
    """Counts what a model costs at a sequence length.

    FLOPs are those of matrix products, 2 for a multiplication and an addition, as torch.utils.flop_counter counts them:
    a causal layer counts as a full one, and the backward of attention computes the scores once more. Decoding is one
    token of one sequence beside seq_len cached ones; latent attention decodes in its latent space. Beside the attention
    layers, a module's nn.Linear layers count with every position; other layers count as parameters alone.

    Args:
        model: a module (parameters shared by layers count once), or a configuration of transformers, or a dict with
            the same keys: model_type gpt2, llama, mistral, qwen2, qwen3 or deepseek_v3 (active experts in FLOPs).
        seq_len: tokens of a sequence.
        batch: sequences.
        dtype: of the cache.

    Returns:
        Account: `parts` and their sums, as attributes, as_dict(), or a table.

    Raises:
        ValueError: a model_type or a number that is not known. TypeError: neither module nor configuration.
    """
    for name, number in (("seq_len", seq_len), ("batch", batch)):
        if number < 1:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    if isinstance(model, nn.Module):
        parts = parts_of_module(model)
    elif isinstance(model, Mapping) or hasattr(model, "model_type"):
        parts = parts_of_config(model)
    else:
        raise TypeError(f"model: expected a torch.nn.Module, a configuration or a dict, got {type(model).__name__}")
    rows = tuple(_row(part, seq_len, batch, dtype) for part in parts)
    sums = {name: sum(getattr(row, name) for row in rows) for name, _ in COLUMNS}
    return Account(seq_len, batch, str(dtype).removeprefix("torch."), rows, **sums)


def _row(part: Part, seq_len: int, batch: int, dtype: torch.dtype) -> Row:
    tokens, a = batch * seq_len, part.attention
    forward, backward = 2 * part.multiplied * tokens, 4 * part.multiplied * tokens
    decode = 2 * part.multiplied
    cached = 0
    if a is not None:
        pairs = 2 * tokens * seq_len * a.heads
        forward += pairs * (a.qk_dim + a.v_dim)
        backward += pairs * (3 * a.qk_dim + 2 * a.v_dim)
        decode += 2 * seq_len * a.heads * a.decode_width
        cached = a.cached * dtype.itemsize
    numbers = (part.parameters, forward, backward, decode, cached)
    return Row(part.name, part.count, *(part.count * n for n in numbers))
