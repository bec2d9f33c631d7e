"""Runs the programs that build.py makes, on torch tensors."""

import subprocess

import torch

ORDERS = {"forward": 0, "reverse": 1, "random": 2, "starve": 3}
ORDER_NAMES = (*ORDERS, "starve1", "eager")  # starve1: another warpgroup starves; eager: copies land when issued


class EmulatorError(Exception):
    """What the emulator or a sanitizer reported, with the line of the kernel."""


def order_arguments(name: str) -> dict[str, int]:
    if name.startswith("starve"):
        return {"order": ORDERS["starve"], "seed": int(name[len("starve") :] or 2), "eager": 0}
    return {"order": ORDERS.get(name, 0), "seed": 3, "eager": int(name == "eager")}


def _stored(x: torch.Tensor, rows_first: bool) -> bytes:
    x = x.transpose(1, 2).contiguous() if rows_first else x.contiguous()
    return x.view(torch.uint8 if x.dtype == torch.float32 else torch.int16).numpy().tobytes()


def run(program, tensors, outputs, arguments, rows_first=False, timeout=120):
    """Results of `outputs`, (shape, dtype) each, and the program's counts such as {"mma": 12}.

    Four-dimensional tensors are (batch, heads, length, dim) here; rows_first stores them (batch, length, heads, dim).
    """
    command = [str(program), *(f"{k}={int(v)}" for k, v in arguments.items()), f"rows_first={int(rows_first)}"]
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
    arguments["lengths"] = bool(lengths)
    return arguments | order_arguments(order), [torch.tensor(x, dtype=torch.int32) for x in lengths]


def forward(program, query, key, value, ranges, order="forward", rows_first=False, **extra):
    """(out, lse) and counts."""
    arguments, lengths = _arguments(query, key, value, ranges, order)
    arguments |= {"counter": 0, "grid": 3, "section": 0, **extra}
    outputs = [((*query.shape[:3], value.shape[3]), query.dtype), (tuple(query.shape[:3]), torch.float32)]
    return run(program, [query, key, value, *lengths], outputs, arguments, rows_first)


def backward(program, inputs, out, lse, grad_out, grad_lse, ranges, order="forward", rows_first=False, **extra):
    """Gradients of the three inputs."""
    arguments, lengths = _arguments(*inputs, ranges, order)
    arguments |= {"span": 0, "deterministic": 0, **extra}
    outputs = [(tuple(t.shape), t.dtype) for t in inputs]
    return run(program, [*inputs, out, grad_out, lse, grad_lse, *lengths], outputs, arguments, rows_first)[0]
