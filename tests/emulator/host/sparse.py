"""Token-sparse attention in the emulator: all kernels of a call, forward and backward, on torch tensors."""

import torch

from . import run

SIZES = {  # of the kernels, by name: forward, gradient of query, of keys
    "64": ("SparseSizes<{},64>::FewForward", "SparseSizes<{},64>::FewQueryGradient", "SparseSizes<{},64>::KeyGradient"),
    "64-many": (
        "SparseSizes<{},64>::ManyForward", "SparseSizes<{},64>::ManyQueryGradient", "SparseSizes<{},64>::KeyGradient"
    ),
    "128": (
        "SparseSizes<{},128>::FewForward", "SparseSizes<{},128>::FewQueryGradient", "SparseSizes<{},128>::KeyGradient"
    ),
    "128-many": (
        "SparseSizes<{},128>::ManyForward", "SparseSizes<{},128>::ManyQueryGradient",
        "SparseSizes<{},128>::KeyGradient",
    ),
    "256": (
        "SparseSizes<{},256>::FewForward", "SparseSizes<{},256>::FewQueryGradient", "SparseSizes<{},256>::KeyGradient"
    ),
    "256-many": (
        "SparseSizes<{},256>::ManyForward", "SparseSizes<{},256>::ManyQueryGradient",
        "SparseSizes<{},256>::KeyGradient",
    ),
    **{
        name: tuple(f"{sizes}::{kernel}" for kernel in ("Forward", "QueryGradient", "KeyGradient"))
        for name, sizes in (
            ("latent", "SparseLatentSizes<{},false>"), ("latent-small", "SparseLatentSizes<{},true>"),
            ("fma", "SparseFmaSizes<{},false>"), ("fma-latent", "SparseFmaSizes<{},true>"),
        )
    },
}  # fmt: skip
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}


def request(dtype, size, fault=None):
    """What build.program takes."""
    kernels = (kernel.format(ELEMENTS[dtype]) for kernel in SIZES[size])
    return "sparse", tuple(f"{name}={x}" for name, x in zip(("FORWARD", "QUERY", "KEYS"), kernels)), fault


def call(program, case, latent=False, order="forward"):
    """Results of a Case of tests/support/sparse_cases.py by name, and the counts. latent: the kernels for it."""
    query, key, value, grad_out, indices = case.query, case.key, case.value, case.grad_out, case.indices
    how = dict(workspace=1 << 28, want_key=True) | case.how
    rows_first = how.pop("rows_first", False)
    (batch, q_heads, q_len, dim), (_, kv_heads, kv_len, v_dim) = query.shape, value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    names = indices if indices.dim() == 4 else indices[:, None]
    arguments = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=dim)
    arguments |= dict(v_head_dim=v_dim, latent=latent, backward=True, grad_lse=case.grad_lse is not None, **how)
    arguments |= {name: round(1000 * case.scores[name]) for name in ("scale", "softcap")}
    arguments |= dict(index_heads=names.shape[1], blocks=names.shape[2], index_count=names.shape[3])
    arguments |= dict(wide=indices.dtype == torch.int64, rows=case.rows["query_block_size"])
    arguments |= dict(causal=case.rows["is_causal"], bottom_right=case.rows["causal_alignment"] == "bottom_right")
    lengths, sinks = case.rows["key_lengths"], case.sinks
    arguments |= dict(lengths=lengths is not None, sinks=sinks is not None)
    arguments |= dict(shared_sinks=sinks is not None and sinks.dim() == 1)
    tensors = [query, key, *[value] * (not latent), names.flatten()]
    tensors += [] if lengths is None else [lengths.int()]
    tensors += [] if sinks is None else [sinks.to(wide).expand(batch, q_heads)]
    tensors += [grad_out, *([] if case.grad_lse is None else [case.grad_lse])]
    rows = (batch, q_heads, q_len)
    shapes = {"out": (*rows, v_dim), "lse": rows, "grad_query": query.shape, "grad_key": key.shape}
    shapes |= {"grad_value": (batch, kv_heads, kv_len, v_dim)}
    if not how["want_key"]:
        del shapes["grad_key"]
    if sinks is not None:
        shapes["grad_sinks"] = sinks.shape
    outputs = [
        ((torch.Size(shape).numel(),), wide if name in ("lse", "grad_sinks") else query.dtype)
        for name, shape in shapes.items()
    ]
    results, counts = run.run(program, tensors, outputs, arguments | run.order_arguments(order), rows_first)
    return {name: x.reshape(shape) for (name, shape), x in zip(shapes.items(), results, strict=True)}, counts
