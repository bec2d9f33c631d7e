"""What a contestant is: something that turns a case and its tensors into a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .. import layers
from ..inputs import Inputs


class Skip(Exception):
    """This contestant cannot do this case; the text says why."""


def refused(error: Exception) -> Skip:
    return Skip(f"refused: {str(error).splitlines()[0]}")


class Peer:
    """name: as in --peers; about: one line for --list."""

    name = ""
    about = ""
    same_function = True  # computes what ours does: its error is one
    options = False  # knows the options of options.py

    def missing(self, device: str) -> str | None:
        """Why this peer cannot take part at all (not installed, other device), or None."""
        return None

    def context(self) -> contextlib.AbstractContextManager:
        """What must be in force while the call runs; entered once around a batch of calls."""
        return contextlib.nullcontext()

    def build(self, case, inputs: Inputs, which: str) -> Callable:
        """A call without arguments for a pass (cases.PASSES, cases.DERIVATIVES).

        Forward returns the output, jvp output and tangent, backward and both the gradients of the leaves that require
        them, double_backward those of a sum of these. Raises Skip.
        The first call may be slow (compilation); it is not timed.
        """
        raise NotImplementedError

    def convert(self, result):
        """A call's result as tensors in the layout of our own: one tensor, or a tuple of gradients."""
        return result


class TorchPeer(Peer):
    """A peer that is one differentiable PyTorch function."""

    backward = True

    def function(self, case, inputs: Inputs) -> Callable:
        """f(*inputs.tensors) -> output. Raises Skip."""
        if case.function:
            raise Skip("softmax attention")
        attend = self.attend(case, inputs)
        if case.layer:
            compose = layers.LAYERS[case.layer].compose
            return lambda *tensors: compose(case, attend, *tensors)
        causal = case.causal
        if case.mask == "float-grad":
            return lambda q, k, v, mask: attend(q, k, v, causal, mask)
        if inputs.mask is not None:
            return lambda q, k, v: attend(q, k, v, causal, inputs.mask)
        return lambda q, k, v: attend(q, k, v, causal)

    def attend(self, case, inputs: Inputs) -> Callable:
        """f(q, k, v, causal, mask=None) -> output, (batch, heads, length, dim). Raises Skip."""
        raise NotImplementedError

    def build(self, case, inputs, which):
        function = self.function(case, inputs)
        if which == "forward":
            tensors = inputs.tensors
            return lambda: function(*tensors)
        if which == "jvp":
            tensors, tangents = inputs.tensors, inputs.tangents()
            return lambda: torch.func.jvp(function, tensors, tangents)
        if not self.backward:
            raise Skip("forward only")
        leaves, grad = inputs.leaves(), inputs.grad
        differentiate, wanted = torch.autograd.grad, [x for x in leaves if x.requires_grad]
        if which == "both":
            return lambda: differentiate(function(*leaves), wanted, grad)
        out = function(*leaves)
        if which == "backward":
            return lambda: differentiate(out, wanted, grad, retain_graph=True)
        first, tangents = differentiate(out, wanted, grad, create_graph=True), inputs.tangents()[: len(wanted)]
        return lambda: differentiate(first, wanted, tangents, retain_graph=True)
