"""Spoilt calls of every operator: `make fuzz MINUTES=n` makes them under sanitizers; tests replay what once failed.

A call is the operator, the seed of its right call (direct_calls.py) and what is spoilt of it: [argument, how, number].
It must give results or one of the listed exceptions, with a text; the same holds for its fake kernel.

    python -m tests.support.fuzz --minutes 10 --seed 1      (make fuzz)
    python -m tests.support.fuzz --replay FILE              a line of JSON for each call
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.support.direct_calls import arguments_of, call_of, covered
from tests.support.testing import LAYOUTS

FAILED = Path(__file__).parents[1] / "package" / "spoilt_calls.jsonl"
JOURNAL = Path("build", "fuzz", "call.json")
RAISED = (ValueError, RuntimeError, TypeError, MemoryError)  # NotImplementedError is a RuntimeError
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.int32]
DTYPES += [torch.uint8, torch.int16, torch.complex64, torch.float8_e5m2, torch.uint32]
INTEGERS = [2**63 - 1, -(2**63), 2**62, 2**56, 2**40, 2**31, 2**31 - 1, -(2**31), -1, 0, 1, 2, 3, 7, 64]
NUMBERS = [math.nan, math.inf, -math.inf, 1e300, 1e38, -1.0, 0.0, 5e-324, 1.0, 0.5, 1 - 1e-17]
WINDOWS = [[], [0], [1, 2, 3], [-2, 0], [2**63 - 1, 2**63 - 1], [2**62, -1], [0, 2**40], [-(2**63), 0], [0, 0], [5, 5]]


def _sized(x, dim, size):
    """With another size in that dimension."""
    enough = x if size <= x.size(dim) else torch.cat([x] * -(-size // max(1, x.size(dim))), dim)
    return enough.narrow(dim, 0, size)


def _laid(x, layout):
    if x.dim() == 0:
        return x
    if not x.is_floating_point():
        layout = "columns"
    if x.dim() == 1:
        return LAYOUTS["stepped_last"](x) if x.is_floating_point() else torch.stack([x, x], 1)[:, 0]
    return LAYOUTS[layout](x)


def _overlapping(x, n):
    """Rows that overlap, as unfold gives them."""
    if x.numel() == 0 or x.dim() == 0:
        return x
    strides = [(n >> 2 * d) & 3 for d in range(x.dim())]
    need = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides))
    return x.reshape(-1)[:1].repeat(need).as_strided(x.shape, strides)


def _vast(x, n):
    """Without a number, and of sizes that no memory bounds."""
    return x.new_empty(0).as_strided((0, *(2 ** (n % 63),) * max(1, x.dim() - 1)), (1,) * max(2, x.dim()))


def _strides(x, n):
    """Strides that mean nothing: of dimensions of size 1."""
    return x.as_strided(x.shape, [2 ** (n % 62) if size == 1 else s for size, s in zip(x.shape, x.stride())])


def _values(x, n):
    if x.numel() == 0 or x.dtype == torch.bool:
        return x
    x = x.clone()
    flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
    where = n % len(flat)
    if x.is_floating_point() or x.is_complex():
        flat[where] = NUMBERS[n % len(NUMBERS)]
    else:
        info = torch.iinfo(x.dtype)
        flat[where] = max(info.min, min(info.max, INTEGERS[n % len(INTEGERS)]))
    return flat.view(x.shape)


def _negative(x, n):
    return torch.complex(torch.zeros_like(x), -x).conj().imag if x.dtype in (torch.float32, torch.float64) else x


TENSORS = {
    "none": lambda x, n: None,
    "meta": lambda x, n: x.to("meta"),
    "scalar": lambda x, n: x.reshape(-1)[0].clone() if x.numel() else x,
    "first": lambda x, n: x[0] if x.dim() and len(x) else x,
    "added": lambda x, n: x.unsqueeze(n % (x.dim() + 1)),
    "swapped": lambda x, n: x.transpose(n % x.dim(), (n // 8) % x.dim()) if x.dim() else x,
    "size": lambda x, n: _sized(x, n % x.dim(), (0, 1, 2, 3, 5, 9, 17)[n // 8 % 7]) if x.dim() and x.numel() else x,
    "dtype": lambda x, n: x.to(DTYPES[n % len(DTYPES)]) if not x.is_complex() else x,
    "expanded": lambda x, n: x.narrow(n % x.dim(), 0, 1).expand_as(x) if x.dim() and x.numel() else x,
    "laid": lambda x, n: _laid(x, list(LAYOUTS)[n % len(LAYOUTS)]),
    "overlapping": _overlapping,
    "values": _values,
    "negative": _negative,
    "vast": _vast,
    "strides": _strides,
    "trained": lambda x, n: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
}  # fmt: skip


def spoil(call, argument, how, n):
    x = call.get(argument.name)
    kind = str(argument.type)
    if how == "same" and "Tensor" in kind:  # the tensor of another argument
        others = [y for y in call.values() if isinstance(y, torch.Tensor)]
        call[argument.name] = others[n % len(others)]
    elif isinstance(x, torch.Tensor):
        call[argument.name] = TENSORS.get(how, TENSORS["values"])(x, n)
    elif "Tensor" in kind:
        call[argument.name] = torch.randn([1, 2, 3][: n % 4])
    elif kind.startswith("List"):
        call[argument.name] = WINDOWS[n % len(WINDOWS)]
    elif kind == "bool":
        call[argument.name] = bool(n % 2)
    elif kind == "int":
        call[argument.name] = INTEGERS[n % len(INTEGERS)]
    else:
        call[argument.name] = NUMBERS[n % len(NUMBERS)]


def line_of(seed):
    """The spoilt call of that seed: [operator, seed of the right call, [[argument, how, number], ...]]."""
    chance = random.Random(seed)
    name = chance.choice(covered())
    names = [a.name for a in arguments_of(name)]
    hows = [*TENSORS, "same", "laid", "laid", "laid"]
    count = chance.choice((0, 1, 1, 1, 2, 2, 3, 6))
    spoilt = [[chance.choice(names), chance.choice(hows), chance.randrange(1 << 20)] for _ in range(count)]
    return [name, chance.randrange(1 << 30), spoilt]


def _attempt(name, call, outcomes):
    try:
        getattr(torch.ops.attnjourney, name).default(**call)
        outcomes["results"] += 1
    except RAISED as error:
        assert str(error), f"{type(error).__name__} without a text"
        assert "include/" not in str(error) and "API call failed" not in str(error), str(error)
        outcomes[type(error).__name__] += 1


def attempt(line, outcomes):
    """Makes the call, and that of its fake kernel; raises what is none of the listed exceptions."""
    name, seed, spoilt = line
    call = call_of(name, seed)
    arguments = {a.name: a for a in arguments_of(name)}
    for which, how, n in spoilt:
        if which in arguments:
            try:
                spoil(call, arguments[which], how, n)
            except (RuntimeError, IndexError):
                pass  # torch has no such tensor
    if all(not isinstance(x, torch.Tensor) or x.device.type == "cpu" for x in call.values()):
        fake = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call.items()}
        _attempt(name, fake, Counter())
    _attempt(name, call, outcomes)


def _run(first, last, until):
    """Calls of the seeds first .. last - 1; the one under way is in the journal, for a sanitizer ends the process."""
    torch.set_num_threads(1)
    journal = os.open(JOURNAL, os.O_WRONLY | os.O_CREAT, 0o644)
    outcomes, done = Counter(), 0
    for seed in range(first, last):
        if time.time() > until:
            break
        line = line_of(seed)
        text = json.dumps([seed, line]).encode()
        os.pwrite(journal, text, 0)
        os.ftruncate(journal, len(text))
        attempt(line, outcomes)
        done += 1
    print(f"FUZZ {json.dumps([done, outcomes])}", flush=True)


def _fuzz(minutes, seed, piece=2000):
    JOURNAL.parent.mkdir(parents=True, exist_ok=True)
    until, total, outcomes, failures = time.time() + 60 * minutes, 0, Counter(), 0
    first = seed << 32
    while time.time() < until:
        command = [sys.executable, "-m", "tests.support.fuzz", "--pieces", str(first), str(first + piece), str(until)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        report = [line for line in result.stdout.splitlines() if line.startswith("FUZZ ")]
        if result.returncode == 0 and report:
            done, counts = json.loads(report[-1].removeprefix("FUZZ "))
            total, first = total + done, first + piece
            outcomes.update(counts)
        else:
            failures += 1
            at, line = json.loads(JOURNAL.read_text())
            total, first = total + at - first + 1, at + 1
            with FAILED.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{json.dumps(line)}: exit status {result.returncode}\n{result.stdout[-6000:]}", flush=True)
    print(f"{total} spoilt calls of {len(covered())} operators, {failures} failures; {dict(outcomes)}")
    return failures


def replay(file):
    """Makes the calls of a file of failed ones; an operator that is no longer there is passed over."""
    lines = [json.loads(text) for text in Path(file).read_text().splitlines() if text]
    for line in lines:
        if line[0] in covered():
            attempt(line, Counter())
    return len(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay")
    parser.add_argument("--pieces", nargs=3, type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        print(f"{replay(arguments.replay)} calls again")
    elif arguments.pieces:
        _run(int(arguments.pieces[0]), int(arguments.pieces[1]), arguments.pieces[2])
    else:
        sys.exit(_fuzz(arguments.minutes, arguments.seed) > 0)


if __name__ == "__main__":
    main()
