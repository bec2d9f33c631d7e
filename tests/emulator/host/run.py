"""Runs the programs that build.py makes, on torch tensors."""

import math
import subprocess
from contextlib import contextmanager

import torch

from attnjourney import BlockMask

ORDERS = {"forward": 0, "reverse": 1, "random": 2, "starve": 3}
ORDER_NAMES = (*ORDERS, "starve1", "eager")  # starve1: another warpgroup starves; eager: copies land when issued


class EmulatorError(Exception):
    """What the emulator or a sanitizer reported, with the line of the kernel."""


@contextmanager
def named(case: str):
    """What fails inside says of which case it is."""
    try:
        yield
    except (AssertionError, EmulatorError) as error:
        raise AssertionError(f"{case}: {error}") from None


def order_arguments(name: str) -> dict[str, int]:
    if name.startswith("starve"):
        return {"order": ORDERS["starve"], "shuffle": int(name[len("starve") :] or 2), "eager": 0}
    return {"order": ORDERS.get(name, 0), "shuffle": 3, "eager": int(name == "eager")}


def _stored(x: torch.Tensor, rows_first: bool) -> bytes:
    x = x.transpose(1, 2).contiguous() if rows_first else x.contiguous()
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.uint8).numpy().tobytes()


_sound_without_faults: set[str] = set()  # programs with faults to choose from, each run once with none


def run(program, tensors, outputs, arguments, rows_first=False, timeout=120):
    """Results of `outputs`, (shape, dtype) each, of a build.program, and the program's counts such as {"mma": 12}.

    Four-dimensional tensors are (batch, heads, length, dim) here; rows_first stores them (batch, length, heads, dim).
    """
    if len(program) > 1 and program[0] not in _sound_without_faults:
        _sound_without_faults.add(program[0])
        try:
            run(program[:1], tensors, outputs, arguments, rows_first, timeout)
        except EmulatorError as error:
            raise RuntimeError(f"{program[0]} fails without a fault too: {error}") from None
    command = [*program, *(f"{k}={int(v)}" for k, v in arguments.items()), f"rows_first={int(rows_first)}"]
    data = b"".join(_stored(t, rows_first and t.dim() == 4) for t in tensors)
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise EmulatorError(f"no end after {timeout} s") from None
    if done.returncode:
        raise EmulatorError(done.stderr.decode()[:600].strip() or f"status {done.returncode}")
    results, offset = [], 0
    for shape, dtype in outputs:
        stored = [shape[0], shape[2], shape[1], shape[3]] if rows_first and len(shape) == 4 else shape
        count = torch.Size(stored).numel()
        x = torch.frombuffer(bytearray(done.stdout), dtype=dtype, count=count, offset=offset) if count else None
        x = torch.empty(stored, dtype=dtype) if x is None else x.reshape(stored)
        results.append(x.transpose(1, 2) if stored is not shape else x)
        offset += count * dtype.itemsize
    counts = dict(pair.split("=") for pair in done.stderr.decode().split())
    return results, {name: int(value) for name, value in counts.items()}


def _arguments(query, key, value, ranges, order):
    """ranges: left, right (-1: unbounded), prefix, offset, bottom_right, lengths (of queries, of keys), and `ranged`,
    which is whether the kernel looks at them (default: if there are any)."""
    batch, q_heads, q_len, head_dim = query.shape
    arguments = {"batch": batch, "q_heads": q_heads, "kv_heads": key.shape[1], "q_len": q_len, "kv_len": key.shape[2]}
    arguments |= {"head_dim": head_dim, "v_head_dim": value.shape[3], "ranged": bool(ranges)}
    arguments |= {"left": -1, "right": -1, "prefix": 0, "offset": 0, "bottom_right": 0, **ranges}
    lengths = arguments.pop("lengths", ())
    packed = arguments.pop("packed", ())
    arguments |= {"lengths": bool(lengths), "packed": bool(packed)}
    if packed:
        arguments["batch"], lengths = len(packed[0]) - 1, packed
    return arguments | order_arguments(order), [torch.tensor(x, dtype=torch.int32) for x in lengths]


def _statistics(query):
    """The dtype of lse and of what there is one of for each head."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _options(query, options, batch, statistics=None):
    """Arguments and tensors for what attention's options do to scores: softcap, scale, dropout_p, seed, origin, sinks,
    alibi_slopes (heads,) or (batch, heads), both as `statistics`, attn_mask of four dimensions, read through its
    strides, or a BlockMask."""
    heads = query.shape[1]
    arguments = {name: round(1000 * options.get(name, 0)) for name in ("softcap", "scale")}
    arguments |= {"dropout": round(1000 * options.get("dropout_p", 0)), "per_item": 0, "mask": 0, "mask_count": 0}
    arguments |= {"seed": options.get("seed", 3)}
    names = ("first_row", "first_key", "first_head", "heads_of_whole")
    arguments |= dict(zip(names, options.get("origin", (0, 0, 0, 0))))
    tensors = []
    for name, argument in (("sinks", "sinks"), ("alibi_slopes", "slopes")):
        given = options.get(name)
        arguments[argument] = given is not None
        if given is not None:
            arguments["per_item"] = given.dim() == 2
            tensors.append(given.to(statistics or _statistics(query)).expand(batch, heads))
    mask = options.get("attn_mask")
    strides = (0,) * 4
    if isinstance(mask, BlockMask):
        arguments |= {"mask": -1, "mask_count": mask.offsets.numel(), "block_size": mask.block_size}
        arguments |= {"block_count": mask.index.numel(), "block_partials": len(mask.elements)}
        sizes = zip(mask.offsets.shape, mask.offsets.stride())
        strides = [0 if size == 1 else stride for size, stride in sizes][:2] + [0, 0]
        tensors += [x.flatten() for x in mask.tensors]
    elif mask is not None:
        arguments["mask"] = {torch.bool: 1, torch.float32: 2}.get(mask.dtype, 3)
        arguments["mask_count"] = mask.numel()
        strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.contiguous().stride())]
        tensors.append(mask.flatten())
    return arguments | dict(zip(("mask_batch", "mask_head", "mask_row", "mask_col"), strides)), tensors


def stats_of(lse, options=None):
    """The forward's stats as a flat tensor: any number near a row's scores is a reference of its weights."""
    mask = (options or {}).get("attn_mask")
    natural = isinstance(mask, torch.Tensor) and mask.is_floating_point()
    wide = lse.double() * (1 if natural else math.log2(math.e))
    reference = wide.to(lse.dtype)
    difference = reference.double() - wide
    stats = torch.stack([reference, torch.exp(difference) if natural else torch.exp2(difference)], -1)
    return stats.masked_fill((lse == -math.inf)[..., None], 0).to(lse.dtype).flatten()


def forward(
    program, query, key, value, ranges, order="forward", rows_first=False, options=None, *, stats=False, **extra
):
    """(out, lse), with `stats` those too, as stats_of says, and counts."""
    arguments, lengths = _arguments(query, key, value, ranges, order)
    more, given = _options(query, options or {}, arguments["batch"])
    arguments |= {"counter": 0, "grid": 3, "section": 0, **more, **extra}
    outputs = [((*query.shape[:3], value.shape[3]), query.dtype), (tuple(query.shape[:3]), _statistics(query))]
    outputs.append(((2 * query.shape[:3].numel(),), _statistics(query)))
    results, counts = run(program, [query, key, value, *lengths, *given], outputs, arguments, rows_first)
    return results if stats else results[:2], counts


def backward(
    program, inputs, out, lse, grad_out, grad_lse, ranges, order="forward", rows_first=False, options=None, **extra
):
    """Gradients of the three inputs, then as lse of sinks, slopes and floating mask where there are such. lse: or the
    forward's stats."""
    arguments, lengths = _arguments(*inputs, ranges, order)
    options = options or {}
    more, given = _options(inputs[0], options, arguments["batch"])
    arguments |= {"span": 0, "deterministic": 0, "finish": 0, **more, **extra}
    outputs = [(tuple(t.shape), t.dtype) for t in inputs]
    trained = [options.get(name) for name in ("sinks", "alibi_slopes", "attn_mask")]
    trained = [t for t in trained if isinstance(t, torch.Tensor) and t.is_floating_point()]
    outputs += [((t.numel(),), _statistics(inputs[0])) for t in trained]
    stats = lse if lse.dim() == 1 else stats_of(lse, options)
    tensors = [*inputs, out, grad_out, stats, grad_lse, *lengths, *given]
    grads = run(program, tensors, outputs, arguments, rows_first)[0]
    return [*grads[:3], *(grad.view(t.shape) for grad, t in zip(grads[3:], trained))]


def weights(program, query, key, lse, rows, heads, ranges, order="forward", rows_first=False, options=None, stats=None):
    """(batch, heads, rows, S) in query's dtype."""
    arguments, lengths = _arguments(query, key, key, ranges, order)
    more, given = _options(query, options or {}, arguments["batch"], torch.float32)
    arguments |= {"n_rows": len(rows), "n_heads": len(heads), "stats": stats is not None, **more}
    outputs = [((query.shape[0] * len(heads), len(rows), key.shape[2]), query.dtype)]
    chosen = [torch.tensor(x, dtype=torch.int64) for x in (rows, heads)]
    out = run(
        program,
        [query, key, lse, *([] if stats is None else [stats]), *chosen, *lengths, *given],
        outputs,
        arguments,
        rows_first,
    )[0][0]
    return out.unflatten(0, (query.shape[0], len(heads)))


def _turned(x, rows_first):
    """Four dimensions, flat, in the other layout."""
    return (x if rows_first else x.transpose(1, 2)).contiguous().flatten()


def _directions(inputs, tangents, batch, rows_first):
    """Those of query, key, value, attn_mask, sinks and alibi_slopes that move, by name; stored in another layout than
    what they belong to. (bits of `moving`, tensors)"""
    moving, bits = [], 0
    for i, name in enumerate(("query", "key", "value", "attn_mask", "sinks", "alibi_slopes")):
        x = tangents.get(name)
        if x is None:
            continue
        bits |= 1 << i
        if name in ("sinks", "alibi_slopes"):
            moving.append(x.to(_statistics(inputs[0])).expand(batch, inputs[0].shape[1]).contiguous().flatten())
        else:
            moving.append(x.transpose(2, 3).flatten() if name == "attn_mask" else _turned(x, rows_first))
    return bits, moving


def jvp(program, inputs, out, stats, tangents, ranges, order="forward", rows_first=False, options=None):
    """Changes of out and lse in the direction `tangents`, by name."""
    arguments, lengths = _arguments(*inputs, ranges, order)
    more, given = _options(inputs[0], options or {}, arguments["batch"])
    bits, moving = _directions(inputs, tangents, arguments["batch"], rows_first)
    arguments |= {"moving": bits, **more}
    shape = (*inputs[0].shape[:3], inputs[2].shape[3])
    written = shape if rows_first else (shape[0], shape[2], shape[1], shape[3])
    outputs = [((math.prod(shape),), inputs[0].dtype), (shape[:3], _statistics(inputs[0]))]
    tensors = [*inputs, out, stats, *lengths, *given, *moving]
    changes = run(program, tensors, outputs, arguments, rows_first)[0]
    of_out = changes[0].view(written)
    return (of_out if rows_first else of_out.transpose(1, 2)), changes[1]


def backward_jvp(program, inputs, saved, tangents, changes, ranges, order="forward", rows_first=False, options=None):
    """Changes of the gradients that backward() gives, by name, in the direction `tangents`, which may have grad_out and
    grad_lse too. saved: out, stats, grad_out, grad_lse; changes: of out and lse."""
    arguments, lengths = _arguments(*inputs, ranges, order)
    options = options or {}
    more, given = _options(inputs[0], options, arguments["batch"])
    bits, moving = _directions(inputs, tangents, arguments["batch"], rows_first)
    if "grad_out" in tangents:
        bits, moving = bits | 64, [*moving, _turned(tangents["grad_out"], rows_first)]
    if "grad_lse" in tangents:
        bits, moving = bits | 128, [*moving, tangents["grad_lse"]]
    arguments |= {"moving": bits, **more}
    trained = {name: options.get(name) for name in ("sinks", "alibi_slopes", "attn_mask")}
    trained = {n: t for n, t in trained.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    outputs = [(tuple(t.shape), t.dtype) for t in inputs]
    outputs += [((t.numel(),), _statistics(inputs[0])) for t in trained.values()]
    out, stats, grad_out, grad_lse = saved
    tensors = [*inputs, out, grad_out, stats, grad_lse, *lengths, *given, *moving]
    tensors += [_turned(changes[0], rows_first), changes[1]]
    grads = run(program, tensors, outputs, arguments, rows_first)[0]
    named = dict(zip(("query", "key", "value"), grads))
    return named | {n: grad.view(t.shape) for (n, t), grad in zip(trained.items(), grads[3:], strict=True)}
