"""Autograd nodes in C++ and in Python give the same bits, gradients and errors (tests/support/node_cases.py), and those
in C++ run where they are meant to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnjourney import _library, _node
from tests.support.node_cases import CASES, FAMILIES, INFERENCE

ROOT = Path(__file__).parents[2]
LIBRARY = _library.directory() / "_C_node.so"
FOR_ANOTHER = LIBRARY.exists() and _node.built_for() != _node.this_torch()
without = pytest.mark.skipif(FOR_ANOTHER, reason="attnjourney/_C_node.so is for another torch")


def run(*command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of all cases by nodes in C++ and by Python's."""
    folder = tmp_path_factory.mktemp("nodes")
    found = []
    for wanted in ("1", "0"):
        path = folder / f"{wanted}.pt"
        printed = run("-W", "ignore", "-m", "tests.support.node_cases", str(path), ATTNJOURNEY_NODE=wanted)
        assert path.exists(), printed
        found.append(torch.load(path, weights_only=False))
    return found


def assert_same(x, y):
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    elif isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        assert len(x) == len(y)
        for a, b in zip(x, y):
            assert_same(a, b)
    else:
        assert type(x) is type(y) and x == y


@without
@pytest.mark.parametrize("name", CASES)
def test_same_bits(results, name):
    (ours, recorded), (pythons, none) = results[0][name], results[1][name]
    assert not isinstance(pythons, str), pythons  # a case that fails as a whole says nothing
    assert_same(ours, pythons)
    assert none == 0
    assert recorded > 0 or not CASES[name][1], "no node in C++ took part"


@without
def test_whose_nodes_there_are(results):
    assert results[0]["node"] == "C++"
    assert results[1]["node"] == "Python: ATTNJOURNEY_NODE=0"


SAY = "import attnjourney, torch; x = torch.ones(2, 3, 4, requires_grad=True); "
SAY += "attnjourney.attention(x, x, x).sum().backward(); "
SAY += "print(attnjourney.cpu_info()['node'], *x.grad.shape)"


@without
def test_the_library_is_built_and_used():
    """Fails where nodes in C++ are lost without a word."""
    assert LIBRARY.exists(), "build it: make build"
    assert run("-c", SAY, ATTNJOURNEY_NODE="") == "C++ 2 3 4"


@without
@pytest.mark.skipif(_node.why_not() is not None, reason="nodes are Python's")
@pytest.mark.parametrize("name", [*FAMILIES, "attention_with_lse", *INFERENCE])
def test_both_devices_have_them(name):
    """CUDA's are the same functions, registered for its key."""
    dump = torch._C._dispatch_dump(f"attnjourney::{name}")
    for key in ("AutogradCPU", "AutogradCUDA"):
        assert [line for line in dump.splitlines() if line.startswith(f"{key}: ") and "node.cpp" in line], dump


def test_switches():
    assert run("-c", SAY, ATTNJOURNEY_NODE="0") == "Python: ATTNJOURNEY_NODE=0 2 3 4"
    assert run("-c", SAY, ATTNJOURNEY_NODE="yes") == "ValueError: ATTNJOURNEY_NODE: expected 0 or 1, got 'yes'"


@without
@pytest.mark.parametrize("what", ["version", "source", "abi", "nothing", "rubbish"])
def test_another_torchs_library_is_not_loaded(tmp_path, what):
    for library in _library.directory().glob("_C_*.so"):
        (tmp_path / library.name).symlink_to(library)
    mark, content = _node.this_torch(), LIBRARY.read_bytes()
    version, source, _, abi = mark.split()
    other = {
        "version": mark.replace(version, "9" + version[1:]),
        "source": mark.replace(source, source[::-1]),
        "abi": mark[: -len(abi)] + "0",
    }
    assert content.count(mark.encode()) == 1
    (tmp_path / LIBRARY.name).unlink()
    if what in other:
        (tmp_path / LIBRARY.name).write_bytes(content.replace(mark.encode(), other[what].encode()))
    elif what == "rubbish":
        (tmp_path / LIBRARY.name).write_bytes(b"not a library")
    why = {
        "version": f"its library is for torch 9{version[1:]}, and this is {version}",
        "nothing": "its library is not built",
        "rubbish": f"its library is for an unknown torch, and this is {version}",
    }.get(what, f"its library is for another build of torch {version}")
    assert run("-c", SAY, ATTNJOURNEY_LIBRARY_DIR=str(tmp_path), ATTNJOURNEY_NODE="") == f"Python: {why} 2 3 4"
