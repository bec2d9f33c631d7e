"""jax.nn.dot_product_attention, compiled; inputs in its own (batch, length, heads, dim) layout."""

from __future__ import annotations

import importlib.util
import os

import torch

from .base import Peer, Skip


class Jax(Peer):
    name = "jax"
    about = "jit(jax.nn.dot_product_attention)"

    def missing(self, device):
        return None if importlib.util.find_spec("jax") else "not installed"

    def build(self, case, inputs, which):
        if case.layer or case.function or case.dropout:
            raise Skip("no dropout" if case.dropout else "attention alone")
        if case.dtype == "fp64":
            raise Skip("fp64 is off by default")
        if case.dtype == "fp16" and inputs.grad.device.type == "cpu":
            raise Skip("no fp16 on CPU")
        if case.v_head_dim != case.head_dim:
            raise Skip("head sizes must be equal")
        if torch.get_num_threads() == 1:  # read when jax starts
            os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
        import jax
        import jax.numpy as jnp

        def take(t):  # (batch, heads, length, dim) -> (batch, length, heads, dim); through fp32, which every dtype fits
            return jnp.asarray(t.detach().transpose(1, 2).float().cpu().numpy()).astype(kind)

        kind = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[case.dtype]
        q, k, v = (take(t) for t in inputs.tensors[:3])
        grad = take(inputs.grad)
        bias = mask = None
        if case.mask in ("padding", "bigbird"):
            mask = jnp.asarray(inputs.mask.cpu().numpy())
        elif case.mask:
            bias = jnp.asarray(inputs.mask.detach().float().cpu().numpy()).astype(kind)

        def attend(q, k, v, bias):
            return jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=case.causal)

        args = (q, k, v, bias)
        if which == "forward":
            run = jax.jit(attend)
            return lambda: run(*args).block_until_ready()
        wanted = range(len(inputs.tensors))

        def gradients(*args):
            return tuple(jax.vjp(attend, *args)[1](grad)[i] for i in wanted)

        if which == "both":
            run = jax.jit(gradients)
            return lambda: jax.block_until_ready(run(*args))
        _, pull = jax.jit(lambda *args: jax.vjp(attend, *args))(*args)
        run = jax.jit(lambda pull, grad: tuple(pull(grad)[i] for i in wanted))
        return lambda: jax.block_until_ready(run(pull, grad))

    def convert(self, result):
        import jax
        import jax.numpy as jnp

        if isinstance(result, tuple):  # gradients of query, key, value, mask; only the mask has our layout
            return tuple(self.convert(r) for r in result[:3]) + tuple(
                self.convert(r).transpose(1, 2) for r in result[3:]
            )
        return torch.from_numpy(jax.device_get(result.astype(jnp.float32)).copy()).transpose(1, 2)
