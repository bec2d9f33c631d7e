"""The types of exceptions out of C++, whatever torch makes of them; texts that name argument, expected and got."""

import re
import subprocess
import sys

import pytest
import torch

import attnjourney
from tests.support.direct_calls import arguments_of, call_of, covered

ops = torch.ops.attnjourney
pytestmark = pytest.mark.smoke
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def required(name):
    """Tensors that may not be None."""
    return [a.name for a in arguments_of(name) if str(a.type) == "Tensor"]


def raised(name, call):
    with pytest.raises(Exception) as info:
        getattr(ops, name)(**call)
    return info.value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", covered())
def test_a_wrong_rank_is_a_value_error(name, mode):
    call = call_of(name, 3, torch.float32)
    which = required(name)[0]
    with MODES[mode]():
        error = raised(name, {**call, which: call[which].reshape(-1)[:0].reshape(0, 0, 0, 0, 0, 0)})
    assert type(error) is ValueError and ": expected" in str(error)


@pytest.mark.parametrize("name", covered())
def test_a_wrong_dtype_is_a_runtime_error(name):
    call = call_of(name, 3, torch.float32)
    which = required(name)[0]
    error = raised(name, {**call, which: call[which].to(torch.float8_e5m2)})
    assert type(error) is RuntimeError and "torch.float8_e5m2" in str(error)
    assert "include/" not in str(error) and "API call" not in str(error)


@pytest.mark.parametrize("name", covered())
def test_none_for_a_tensor_is_a_type_error(name):
    call = call_of(name, 3, torch.float32)
    for which in required(name):
        error = raised(name, {**call, which: None})
        assert type(error) is TypeError and str(error) == f"{which}: must be Tensor, not NoneType"


def test_it_is_the_last_exception_of_this_call():
    """One that C++ has thrown before does not lend its type to another's."""
    query = torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError):
        ops.attention(query, query[..., :3], query)
    with pytest.raises(RuntimeError) as info:
        ops.attention(query, query.double(), query)
    assert type(info.value) is RuntimeError
    with pytest.raises(RuntimeError):
        ops.attention(query, "key", query)


@pytest.mark.parametrize("name", ["windows", "decode windows"])
def test_windows_are_arguments_of_a_compiled_function(name):
    query, lengths = torch.randn(1, 2, 12, 8), torch.tensor([12])
    if name == "windows":
        call = lambda x, w: attnjourney.attention(x, x, x, window_size=w)  # noqa: E731
    else:
        call = lambda x, w: attnjourney.decode(x, x, x, lengths, window_size=w)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for window in ((3, 0), (5, 0), (-1, -1)):
        torch.testing.assert_close(compiled(query, window), call(query, window), rtol=0, atol=0)


WITHOUT_MEMORY = """
import resource, torch, attnjourney
x, wide = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 8, 1 << 22)
attnjourney.attention(x, x, x).sum().item()
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20),) * 2)
huge = torch.zeros(1, 1, 1, 8).expand(1, 64, 1 << 16, 8)
for arguments in ((huge, x[..., :8], x[..., :8]), (wide, wide, wide[..., :8])):
    try:
        attnjourney.attention(*arguments)
    except Exception as error:
        print(type(error).__name__, error)
print(attnjourney.attention(x, x, x).shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_out_of_memory_says_how_many_bytes():
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    result, scratch, after = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True
    ).stdout.splitlines()
    assert result.startswith("RuntimeError out of memory: cannot allocate a tensor of shape (1, 64, 65536, ")
    assert re.search(r"torch.float32, (134217728|33554432|16777216) bytes", result)  # out, stats or lse: the first
    assert scratch.startswith("MemoryError cannot allocate") and scratch.endswith("bytes of scratch memory")
    assert "include/" not in result + scratch
    assert after == "torch.Size([1, 1, 64, 64])"  # the process can be used afterwards
