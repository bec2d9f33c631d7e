"""The lightning indexer in the emulator: its choice of keys, its loss and the gradients, on torch tensors."""

import torch

from . import run

ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}


def topk_request(dtype, size, fault=None):
    """What build.program takes. size: columns, 0 for ordinary arithmetic; -64, -128: of one row a block."""
    element = ELEMENTS[dtype]
    sizes = f"IndexerSizes<{element},{abs(size)}>" if size else f"IndexerFmaSizes<{element}>"
    return "topk", (f"TOPK={sizes}::{'TopkOne' if size < 0 else 'Topk'}",), fault


def topk(program, query, key, weights, topk, *, scale=1.0, is_causal=False, bottom_right=False, key_lengths=None,
         order="forward", rows_first=False, blocks=1, workspace=1 << 28):  # fmt: skip
    """indices, scores; the counts."""
    (batch, heads, q_len, dim), kv_len = query.shape, key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    arguments = dict(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, head_dim=dim, topk=topk)
    arguments |= dict(scale=round(1000 * scale), causal=is_causal, bottom_right=bottom_right, blocks=blocks)
    arguments |= dict(workspace=workspace, lengths=key_lengths is not None, **run.order_arguments(order))
    tensors = [query, key[:, None], weights.to(wide)] + ([] if key_lengths is None else [key_lengths.int()])
    shape = (batch, q_len, topk)
    return run.run(program, tensors, [(shape, torch.int32), (shape, wide)], arguments, rows_first)


def loss_request(dtype, size, target, fault=None):
    """What build.program takes. size, target: columns of the indexer and of the attention, 0: ordinary arithmetic."""
    element = ELEMENTS[dtype]
    indexer = f"IndexerSizes<{element},{size}>" if size else f"IndexerFmaSizes<{element}>"
    targets = f"IndexerTargets<{element},{target}>" if target else f"IndexerFmaTargets<{element}>"
    return "indexer", (f"INDEXER={indexer}", f"TARGETS={targets}"), fault


def loss(program, index_query, index_key, weights, query, key, indices, grad_loss, *, index_scale, scale,
         order="forward", rows_first=False, workspace=1 << 28):  # fmt: skip
    """[loss, grad_scores, gradients of index_query, index_key, weights]; the counts."""
    (batch, heads, q_len, dim), kv_len = index_query.shape, index_key.shape[1]
    wide = grad_loss.dtype
    arguments = dict(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, head_dim=dim, q_heads=query.shape[1])
    arguments |= dict(kv_heads=key.shape[1], target_dim=query.shape[3], index_count=indices.shape[2])
    arguments |= dict(index_scale=round(1000 * index_scale), scale=round(1000 * scale), workspace=workspace)
    tensors = [index_query, index_key[:, None], weights.to(wide), query, key, indices.int(), grad_loss]
    outputs = [((batch, q_len), wide), (tuple(indices.shape), wide)]
    outputs += [((index_query.numel(),), query.dtype), ((index_key.numel(),), query.dtype)]
    outputs += [(tuple(weights.shape), wide)]
    results, counts = run.run(program, tensors, outputs, arguments | run.order_arguments(order), rows_first)
    results[2], results[3] = results[2].view(index_query.shape), results[3].view(index_key.shape)
    return results, counts
