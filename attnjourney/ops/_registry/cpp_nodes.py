"""An operator as its node in C++ is told of it (csrc/node/node.cpp): what `Operator` has read from the schemas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _node
from .nodes import through_composite
from .operator import Operator

_AGAIN = torch.library.Library("attnjourney_node", "DEF")  # apart: these operators are for nodes in C++ alone


def add(op: Operator, also: Sequence[str]) -> bool:
    """Gives the operator, its op_forward, and those named in `also` kernels in C++ for the keys of autograd, all but
    op_forward for the devices, too; False where C++ has no nodes (attnjourney/_node.py)."""
    if _node.why_not() is not None:
        return False
    name = op.name.partition("::")[2]
    pool = [f"grad_{o}" for o in op.differentiable] + op.tensors + op.others + ["need"]
    everything = op.forward.names + op.forward.outputs
    names = op.forward.names
    numbers: dict[str, Sequence[int]] = {
        "saved": [everything.index(x) for x in op.tensors],
        "others": [names.index(x) for x in op.others],
        "gradients": op.gradients,
        "differentiable": [op.forward.outputs.index(o) for o in op.differentiable],
        "backward": [pool.index(x) for x in op.backward.names],
        "required": [n for i, at in op.required for n in (i, -1 if at is None else at)],
        "constants": op.constants,
        "repeats": [n for pair in op.repeats for n in pair],
        "dropout": [names.index("dropout_p"), names.index("dropout_seed")] if op.dropout else [],
    }
    lines = [f"name {name}", f"operators {' '.join([name, name + '_forward', *also])}"]
    if op.composite is not None:
        _define_again(op, f"{name}_again")
        lines.append(f"again_name attnjourney_node::{name}_again")
        numbers["again"] = [pool.index(x) for x in ["need", *(f"grad_{o}" for o in op.differentiable), *names]]
    lines += [f"{key} {' '.join(map(str, found))}" for key, found in numbers.items()]
    return _node.add(name, "\n".join(lines))


def add_inference(name: str, written: Sequence[int]) -> None:
    """The same for an operator without a backward, which writes into those of its arguments."""
    _node.add(name, f"name {name}\nwritten {' '.join(map(str, written))}")


def _define_again(op: Operator, name: str) -> None:
    """The backward in differentiable functions, which a node in C++ calls when it will be differentiated again."""
    arguments = str(op.forward.operator._schema).partition("(")[2].rpartition(") -> ")[0]
    grads = "".join(f"Tensor? grad_{output}, " for output in op.differentiable)
    count = len(op.differentiable)
    _AGAIN.define(f"{name}(int need, {grads}{arguments}) -> Tensor?[]")

    def backward(need, *args, **kwargs):
        wanted = [index for bit, index in enumerate(op.gradients) if need >> bit & 1]
        found = through_composite(op, op.forward.named(args[count:], kwargs), args[:count], wanted)
        return [found[index] for index in op.gradients]

    _AGAIN.impl(name, backward, "CompositeImplicitAutograd")
