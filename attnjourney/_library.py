"""Finds and loads the compiled libraries; importing this module loads nothing."""

import functools
import os
import re
from pathlib import Path

import torch

MINIMUM_TORCH = (2, 11)


def directory() -> Path:
    """Where the libraries lie: beside this file, or in ATTNJOURNEY_LIBRARY_DIR (another build, such as `make asan`)."""
    return Path(os.environ.get("ATTNJOURNEY_LIBRARY_DIR") or Path(__file__).parent).absolute()


@functools.cache
def load() -> None:
    """Registers the operators with torch; later calls do nothing."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < MINIMUM_TORCH:
        minimum = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(f"attnjourney needs torch >= {minimum}, and torch {torch.__version__} is installed")

    cpu, cuda = directory() / "_C_cpu.so", directory() / "_C_cuda.so"
    if not cpu.exists():
        raise ImportError(f"attnjourney's C++ library is not built: run `make build` or `pip install .` (no {cpu})")
    _load(cpu)
    if torch.version.cuda is not None and cuda.exists():
        _load(cuda)


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"torch {torch.__version__} cannot load {path}: {error}") from error
