"""This package in the layout of the kernels hub: python -m attnjourney.integrations.hub OUT

OUT/build/torch-stable-abi211-cpu-x86_64-linux/ holds the package with its C++ library, which every torch >= 2.11 loads;
where the CUDA library is built, its variant is written beside it. `kernels` loads the folder offline:

    LOCAL_KERNELS="attnjourney/flash-attention=OUT" python -c "import kernels; kernels.get_kernel(...)"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
from pathlib import Path

import torch

from .._library import directory
from .._requirements import MINIMUM_TORCH
from .._version import __version__

# what a kernel of the hub offers: the functions that transformers looks for, and the package itself
_INIT = '''"""attnjourney from the kernels hub: flash-attn's functions, and the package."""

import importlib.util
import sys
from pathlib import Path

if "attnjourney" not in sys.modules:  # its operators can be registered once in a process
    _file = Path(__file__).parent / "attnjourney" / "__init__.py"
    _spec = importlib.util.spec_from_file_location("attnjourney", _file)
    sys.modules["attnjourney"] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(sys.modules["attnjourney"])
    except BaseException:
        del sys.modules["attnjourney"]
        raise

from attnjourney import attention, decode, varlen_attention
from attnjourney.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "attention",
    "decode",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "varlen_attention",
]
'''


def variant(backend: str) -> str:
    """The name of a variant's folder."""
    major, minor = MINIMUM_TORCH
    return f"torch-stable-abi{major}{minor}-{backend}-{platform.machine()}-linux"


def write(out: Path) -> list[Path]:
    """Writes what is built; returns the folders of the variants."""
    package, libraries = Path(__file__).parents[1], directory()
    written = []
    for backend, names in (("cpu", ["_C_cpu.so"]), (_cuda(), ["_C_cpu.so", "_C_cuda.so"])):
        if backend is None or not all((libraries / name).exists() for name in names):
            continue
        folder = out / "build" / variant(backend)
        if folder.exists():
            raise ValueError(f"OUT: expected a folder without {folder.relative_to(out)}, got {out}")
        shutil.copytree(package, folder / "attnjourney", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in names:
            shutil.copy2(libraries / name, folder / "attnjourney" / name)
        (folder / "__init__.py").write_text(_INIT)
        (folder / "metadata.json").write_text(json.dumps(_metadata(folder, backend), indent=2) + "\n")
        written.append(folder)
    if not written:
        raise FileNotFoundError(f"attnjourney's C++ library is not built (no {libraries / '_C_cpu.so'})")
    return written


def _cuda() -> str | None:
    return None if torch.version.cuda is None else "cu" + "".join(torch.version.cuda.split(".")[:2])


def _metadata(folder: Path, backend: str) -> dict:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    kind = "cuda" if backend.startswith("cu") else backend
    return {
        "id": f"_attnjourney_{kind}_{digest.hexdigest()[:8]}",
        "name": "attnjourney",
        "version": int(__version__.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": kind},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes attnjourney in the layout of the kernels hub.")
    parser.add_argument("out", type=Path)
    for folder in write(parser.parse_args().out):
        print(folder)


if __name__ == "__main__":
    main()
