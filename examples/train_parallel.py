"""Byte-level GPTs trained on a mesh of ranks, data x context x tensor; any number of ranks takes up a checkpoint.

    torchrun --nproc-per-node 4 -m examples.train_parallel --model gqa --mesh 1x2x2 --checkpoint /tmp/gqa

data: each rank has its part of the batch. context: its part of every sequence, in the zigzag order, and attention over
the whole by a ring (`context_parallel`; of MLA the latents go round). tensor: its heads and its part of the MLP. The
losses are those of one rank.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attnjourney.demo.byte_gpt import ByteGPT
from attnjourney.distributed import context_parallel, shard, tensor_parallel_plan
from attnjourney.nn import CausalSelfAttention, GroupedQueryAttention, MultiheadLatentAttention
from examples.data import load_text
from examples.report_parallel import Progress
from examples.report_parallel import write as write_report

LAYERS, HEADS, EMBED, CONTEXT, BATCH = 2, 4, 64, 128, 8
LEARNING_RATE = 3e-3
COMPARED = 5  # steps of one rank in the report
ORDER = "zigzag"
AXES = ("data", "context", "tensor")
ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: CausalSelfAttention(EMBED, HEADS),
    "gqa": lambda: GroupedQueryAttention(EMBED, HEADS, HEADS // 2, rope=1e4),
    "mla": lambda: MultiheadLatentAttention(
        EMBED, HEADS, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rope=1e4
    ),
}


class Model(ByteGPT):
    """ByteGPT over tokens at any positions."""

    def __init__(self, name: str):
        layers = [ATTENTION[name]() for _ in range(LAYERS)]
        super().__init__(layers, EMBED, CONTEXT if name == "gpt" else None)
        self.initialise(1)
        self.places = torch.arange(CONTEXT)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.embedding(tokens)
        return x if self.positions is None else x + self.positions(self.places)


class Training:
    """One rank's part of it; mesh None: all of it."""

    def __init__(self, name: str, mesh: DeviceMesh | None, text: Tensor, dtype: torch.dtype = torch.float32):
        self.mesh, self.text, self.done = mesh, text, 0
        self.losses: list[float] = []  # of this run, in nats per byte
        self.model = Model(name).to(dtype)
        self.groups = [] if mesh is None else [mesh[axis].get_group() for axis in AXES[:2]]
        if mesh is not None:
            self._share_out(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.99), foreach=False)

    def _share_out(self, mesh: DeviceMesh) -> None:
        tensor = mesh["tensor"]
        if tensor.size() > 1:
            for block in self.model.blocks:
                parallelize_module(block.attention, tensor, tensor_parallel_plan(block.attention, tensor.size()))
                parallelize_module(block.mlp, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        context_parallel(self.model, self.groups[1], order=ORDER)
        self.model.places = shard(self.model.places, self.groups[1], ORDER, 0)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """This rank's (tokens, targets) of the step, which follows from its number alone."""
        generator = torch.Generator().manual_seed(self.done)
        start = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=generator)
        piece = self.text[start + torch.arange(CONTEXT + 1)].long()
        tokens, targets = piece[:, :-1], piece[:, 1:]
        if self.mesh is None:
            return tokens, targets
        rows = self.mesh["data"].size()
        own = [x.chunk(rows)[self.mesh["data"].get_local_rank()] for x in (tokens, targets)]
        tokens, targets = (shard(x, self.groups[1], ORDER, 1) for x in own)
        return tokens, targets

    def step(self) -> float:
        """The loss of one step over the whole batch, in nats per byte."""
        tokens, targets = self._batch()
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * CONTEXT)
        self.optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        self._sum_gradients()
        self.optimizer.step()
        self.done += 1
        return total.item()

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Over the ranks with other tokens, in one message."""
        local = []
        for p in self.model.parameters():
            assert p.grad is not None
            if isinstance(p, DTensor):
                p.grad = p.grad.redistribute(placements=p.placements)
                local.append(p.grad.to_local())
            else:
                local.append(p.grad)
        flat = torch.cat([g.flatten() for g in local])
        for group in self.groups:
            dist.all_reduce(flat, group=group)
        for g, total in zip(local, flat.split([g.numel() for g in local])):
            g.copy_(total.view_as(g))

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": torch.tensor(self.done)}

    def save(self, folder: Path) -> None:
        dcp.save(in_one_piece(self._state()), checkpoint_id=folder, no_dist=self.mesh is None)

    def load(self, folder: Path) -> None:
        """What any number of ranks has saved."""
        like = self._state()
        state = in_one_piece(like)
        dcp.load(state, checkpoint_id=folder, no_dist=self.mesh is None)
        state = in_pieces(state, like)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.done = int(state["done"])


def is_packed(x: object) -> bool:
    """Whether each rank has rows from three places of x: queries, keys and values in one matrix."""
    return isinstance(x, DTensor) and not all(isinstance(p, (Shard, Replicate)) for p in x.placements)


def in_one_piece(state: dict) -> dict:
    """What is packed as whole tensors, as torch's checkpoints know no other pieces than connected ones."""

    def one(x):
        if isinstance(x, dict):
            return in_one_piece(x)
        return x.full_tensor() if is_packed(x) else x

    return {name: one(x) for name, x in state.items()}


def in_pieces(state: dict, like: dict) -> dict:
    """The way back."""

    def one(x, as_this):
        if isinstance(x, dict):
            return in_pieces(x, as_this)
        if not is_packed(as_this):
            return x
        parts = x.unflatten(0, (3, -1))
        return distribute_tensor(parts, as_this.device_mesh, [Shard(1)], src_data_rank=None).flatten(0, 1)

    return {name: one(x, like[name]) for name, x in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(ATTENTION), default="gqa")
    parser.add_argument("--mesh", default="", help="data x context x tensor, as 1x2x2; all ranks to context by default")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, help="a file or a folder; Python's own sources by default")
    parser.add_argument("--checkpoint", type=Path, help="a folder: taken up if it is there, written at the end")
    parser.add_argument("--report", type=Path, help="an HTML file to write, with the first losses of one rank beside")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = tuple(int(n) for n in (options.mesh or f"1x{ranks}x1").split("x"))
    if len(sizes) != 3 or sizes[0] * sizes[1] * sizes[2] != ranks or BATCH % sizes[0]:
        parser.error(f"--mesh: expected three numbers whose product is the {ranks} ranks, got {options.mesh}")
    dist.init_process_group("gloo", **({} if ranks > 1 else dict(store=dist.HashStore(), rank=0, world_size=1)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    text = load_text(options.text, CONTEXT).train
    training = Training(options.model, mesh, text)
    console = Console(quiet=dist.get_rank() != 0)
    if options.checkpoint is not None and (options.checkpoint / ".metadata").exists():
        training.load(options.checkpoint)
    label = f"{options.model} {'x'.join(map(str, sizes))}"
    with Progress(console, label, options.steps, training.done, BATCH * CONTEXT) as progress:
        while training.done < options.steps:
            training.losses.append(training.step())
            progress.step(training.done, training.losses[-1])
        rate = progress.rate(training.done)
    if options.checkpoint is not None:
        training.save(options.checkpoint)
    if options.report is not None and training.losses and not console.quiet:
        alone = Training(options.model, None, text) if training.done == len(training.losses) else None
        beside = [alone.step() for _ in range(min(COMPARED, options.steps))] if alone else []
        write_report(options.report, options.model, sizes, training.losses, beside, rate)
        console.print(f"report: {options.report}", highlight=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
