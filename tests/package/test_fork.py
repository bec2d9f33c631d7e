"""A child of a process that has used threads computes too, with the same bits and with threads of its own.

Operators of torch that are large enough for several threads hang there, so the program has none."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, os, sys, torch, attnjourney
ops = torch.ops.attnjourney
q, k, v = torch.randn(3, 4, 8, 256, 64, generator=torch.Generator().manual_seed(0))
lengths, cache, at = torch.full((4,), 256), torch.zeros(4, 8, 300, 64), torch.zeros(4, dtype=torch.int64)

def bits():
    out, lse, stats = ops.attention_forward(q, k, v)
    grads = ops.attention_backward(v, None, q, k, v, None, out, lse, stats)[:3]
    ops.kv_cache_append(cache, None, at.zero_(), k, None)
    decoded = attnjourney.decode(q[:, :, :1], k, v, lengths)
    digest = hashlib.sha256()
    for x in (out, lse, *grads, cache, decoded):
        digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

expected = bits()
read, write = os.pipe()
child = os.fork()
if child == 0:
    {set_threads}
    os.write(write, bits().encode())
    os._exit(0)
os.waitpid(child, 0)
assert os.read(read, 64).decode() == expected
print("equal")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("set_threads", ["pass", "torch.set_num_threads(2)"])
def test_a_forked_child_computes_the_same_bits(set_threads):
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM.replace("{set_threads}", set_threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr
