"""`import attnjourney`: quick, without a warning, and with one sentence where it cannot be."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import attnjourney
from attnjourney import _library, _requirements

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parents[2]
# What an import brings: operators with all that must be registered, and what every program needs.
AT_ONCE = """
_compile_cache _dtypes _errors _library _names _node _requirements _version block_mask info integrations
integrations.flash_registry ops positions
""".split()


def last_line(program, *options):
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, cwd=ROOT)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_what_is_imported():
    """Half of the time goes by the number of modules. torch._dynamo takes longer to import than torch itself."""
    program = """
import sys, torch
before = set(sys.modules)
import attnjourney
print(*sorted(set(sys.modules) - before))
"""
    added = last_line(program, "-W", "error").split()
    ours = {name.partition(".")[2] for name in added if name.partition(".")[0] == "attnjourney"} - {""}
    assert {name for name in ours if not name.startswith("ops.")} == set(AT_ONCE)
    assert [name for name in added if name.partition(".")[0] != "attnjourney"] == []


@pytest.mark.parametrize("order", ["torch.utils.flop_counter, attnjourney", "attnjourney, torch.utils.flop_counter"])
def test_flop_formulas_are_there_with_torchs_counter(order):
    """Which imports triton where there is one: not before somebody counts. Imported again, it has them again."""
    program = f"""
import importlib, sys, torch
import {order}
counter, x = torch.utils.flop_counter, torch.randn(1, 2, 16, 8)

def flops():
    with counter.FlopCounterMode(display=False) as mode:
        torch.ops.attnjourney.attention(x, x, x)
        torch.ops.attnjourney.decode(x[:, :, :1], x, x, torch.tensor([16]))
    return mode.get_total_flops()

first = flops()
importlib.reload(counter)
print(first, flops(), torch.utils.flop_counter.__spec__.loader.get_source(counter.__name__)[:1] != "")
"""
    flops = 2 * 2 * 2 * (16 + 1) * 16 * 8  # 2 products of 2 heads, 16 rows and 1 row, 16 keys of 8
    assert last_line(program, "-W", "error") == f"{flops} {flops} True"


def test_every_operator_is_whole_after_the_import():
    """Called as torch.ops.attnjourney.<name>, without a module of ours: traced, differentiated, batched."""
    program = """
import torch, attnjourney
has, names = torch._C._dispatch_has_kernel_for_dispatch_key, attnjourney._names.operator_names()
names = [name for name in names if not name.startswith("_")]
keys = ("Meta", "CompositeImplicitAutograd")
print(len(names) > 20, [name for name in names if not any(has("attnjourney::" + name, key) for key in keys)])
"""
    assert last_line(program) == "True []"


def test_names_of_later_imports():
    """A type checker reads one list, an interpreter the other."""
    tree = ast.parse(Path(attnjourney.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    read = {alias.name: "." + (node.module or "") for node in block.body for alias in node.names}
    assert read == attnjourney._HOMES
    program = """
import attnjourney
from attnjourney import *
print(all(name in globals() for name in attnjourney._HOMES) and set(attnjourney.__all__) <= set(dir(attnjourney)))
"""
    assert last_line(program) == "True"
    assert set(attnjourney._HOMES) <= set(attnjourney.__all__)
    for name in attnjourney.__all__:
        assert getattr(attnjourney, name) is getattr(attnjourney, name)
    for name in ("account", "activate", "KVCache", "replace_attention", "trace"):
        assert pickle.loads(pickle.dumps(getattr(attnjourney, name))) is getattr(attnjourney, name)
    with pytest.raises(AttributeError, match="module 'attnjourney' has no attribute 'atention'"):
        attnjourney.atention  # noqa: B018
    with pytest.raises(AttributeError, match="module 'attnjourney.integrations' has no attribute 'flash'"):
        attnjourney.integrations.flash  # noqa: B018


def test_a_later_import_inside_of_a_compiled_function():
    program = """
import torch, attnjourney

def step(query, key, value):
    cache = attnjourney.KVCache(1, 2, 8, 4)
    cache.append(key, value)
    out = cache.attend(query) if not attnjourney.activated() else query
    return out + len(attnjourney.nn.__name__)

query, key, value = torch.randn(3, 1, 2, 3, 4)
compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
print(torch.equal(compiled(query, key, value), step(query, key, value)))
"""
    assert last_line(program) == "True"


def test_torchs_registry_knows_the_name():
    program = """
import torch, attnjourney
from torch.nn.attention import list_flash_attention_impls
print("attnjourney" in list_flash_attention_impls())
"""
    assert last_line(program) == "True"


def test_without_torch():
    program = "import sys; sys.modules['torch'] = None; import attnjourney"
    assert last_line(program) == (
        "ModuleNotFoundError: attnjourney needs torch >= 2.11, and none is installed: pip install 'torch>=2.11'"
    )


def test_with_an_older_torch(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.10.1+cpu'")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import attnjourney"
    assert last_line(program) == "ImportError: attnjourney needs torch >= 2.11, and torch 2.10.1+cpu is installed"


def test_on_musl(monkeypatch, tmp_path):
    (tmp_path / "_C_cpu.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match="cannot load .*_C_cpu.so") as raised:
        _library._load(tmp_path / "_C_cpu.so")
    assert _requirements.on_musl() == ("this system has musl" in str(raised.value))
    monkeypatch.setattr(_requirements, "on_musl", lambda: True)
    with pytest.raises(ImportError, match="it is for glibc, and this system has musl"):
        _library._load(tmp_path / "_C_cpu.so")
