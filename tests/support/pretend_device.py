"""Tensors that say they are on another device and hold their numbers on the CPU: a program run on them shows, without a
GPU, where it brings tensors of two devices together and where it would wait for the device.

    with PretendDevice() as device:
        out = f(device.put(x))     # raises where f makes a tensor on the CPU and uses it with x
    device.waits                   # the operations that a GPU's program waits for

The device is called "meta", for which every build of torch has what autograd and indexing ask of a device.
"""

from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attnjourney.nn import _parts

DEVICE = torch.device("meta")
WAITS = {"_local_scalar_dense", "nonzero", "equal", "unique_dim", "_unique2", "masked_select", "is_nonzero"}
BETWEEN = {"copy_", "_to_copy"}  # from device to device
TAKE_CPU_INDICES = {"_attention_weights", "_block_attention_weights"}


class Pretender(torch.Tensor):
    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        self.inner = inner
        return self

    def __repr__(self):
        return f"Pretender({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with PretendDevice.current or nullcontext():
            return func(*args, **(kwargs or {}))


_parts._PLAIN = (*_parts._PLAIN, Pretender)  # a layer operator may read weights on this device


class PretendDevice(TorchDispatchMode):
    current = None

    def __init__(self):
        super().__init__()
        self.waits = []

    def put(self, x):
        return Pretender(x.detach().clone(), x.requires_grad) if isinstance(x, torch.Tensor) else x

    def __enter__(self):
        PretendDevice.current = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        pretend = any(isinstance(x, Pretender) for x in tensors)
        if name not in BETWEEN and name not in TAKE_CPU_INDICES and pretend:
            for x in tensors:
                if not isinstance(x, Pretender) and x.dim():
                    raise RuntimeError(f"{name}: tensors on two devices, one on {x.device}, {tuple(x.shape)}")
        given = kwargs.get("device")
        target = torch.device(given).type if given is not None else None
        if given is not None:
            kwargs["device"] = torch.device("cpu")
        if pretend and (name in WAITS or (name == "_to_copy" and target == "cpu")):
            self.waits.append(name)
        if pretend and name == "copy_" and not isinstance(args[0], Pretender):
            self.waits.append(name)
        result = func(*tree_map(lambda x: x.inner if isinstance(x, Pretender) else x, args),
                      **tree_map(lambda x: x.inner if isinstance(x, Pretender) else x, kwargs))  # fmt: skip
        there = target == DEVICE.type if target is not None else pretend
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and name.endswith("_"):
            return args[0]
        return tree_map(lambda x: Pretender(x) if isinstance(x, torch.Tensor) and there else x, result)
