"""attnjourney.torch_ops, the typed name of torch.ops.attnjourney, and what type checkers know of the package."""

import ast
import subprocess
import sys
from pathlib import Path

import torch

import attnjourney
from attnjourney import torch_ops

ROOT = Path(__file__).parents[2]


def test_torch_ops_is_the_namespace_of_the_operators():
    assert torch_ops is torch.ops.attnjourney is attnjourney.torch_ops


def test_the_stub_says_what_the_schemas_say():
    command = [
        sys.executable,
        "-m",
        "tools.torch_ops_stub",
        "--check",
    ]  # a process of its own: tests register operators
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_the_stub_tells_arguments_defaults_and_results():
    tree = ast.parse((ROOT / "attnjourney/torch_ops.pyi").read_text())
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    attention = functions["attention"]
    assert [a.arg for a in attention.args.args][:4] == ["query", "key", "value", "attn_mask"]
    assert "softcap: float=0.0" in ast.unparse(attention.args)
    assert ast.unparse(attention.returns) == "Tensor"
    assert ast.unparse(functions["decode"].returns) == "tuple[Tensor, Tensor]"
    assert {"attention_forward", "attention_backward_jvp", "_explain"} <= functions.keys()


def test_the_package_is_marked_as_typed():
    assert (ROOT / "attnjourney/py.typed").exists()
