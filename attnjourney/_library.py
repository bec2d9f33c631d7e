"""Finds and loads the compiled libraries; importing this module loads nothing."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import _compile_cache, _errors, _requirements
from ._names import NAMESPACE, operator_names

_FRAGMENT = torch.library.Library("attnjourney", "FRAGMENT")
_CUDA = torch.library.Library("attnjourney", "IMPL", "CUDA")


def directory() -> Path:
    """Where the libraries are: next to this file, or in ATTNJOURNEY_LIBRARY_DIR (another build: `make asan`)."""
    return Path(os.environ.get("ATTNJOURNEY_LIBRARY_DIR") or Path(__file__).parent).absolute()


@functools.cache
def load() -> None:
    """Registers the operators with torch; later calls do nothing."""
    _requirements.check_torch()
    cpu, cuda = directory() / "_C_cpu.so", directory() / "_C_cuda.so"
    if not cpu.exists():
        raise ImportError(f"attnjourney's C++ library is not built: run `make build` or `pip install .` (no {cpu})")
    _load(cpu)
    if torch.version.cuda is not None and cuda.exists():
        _load(cuda)
    _FRAGMENT.define("_deterministic_algorithms() -> bool", tags=(torch.Tag.pt2_compliant_tag,))
    _FRAGMENT.impl("_deterministic_algorithms", torch.are_deterministic_algorithms_enabled, "CompositeExplicitAutograd")
    names = operator_names()
    _refuse_cuda(cuda, names)
    _errors.keep_types(names)
    _tag(names)
    _compile_cache.tag_keys(names)


def _tag(names: list[str]) -> None:
    """torch 2.11 has no tags for operators of the stable interface; they are asked for by Python alone."""
    for name in names:
        operator = getattr(torch.ops.attnjourney, name).default
        if torch.Tag.pt2_compliant_tag not in operator.tags:
            operator._tags = [*operator.tags, torch.Tag.pt2_compliant_tag]


def _refuse_cuda(library: Path, names: list[str]) -> None:
    """Operators without a CUDA kernel say so, instead of the dispatcher's list of all its keys."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    served = has(NAMESPACE + "attention_forward", "CUDA")
    for name in names:
        if has(NAMESPACE + name, "CPU") and not has(NAMESPACE + name, "CUDA"):
            why = "it has no CUDA kernel yet" if served else f"attnjourney's CUDA library is not there (no {library})"
            _CUDA.impl(name, _refusal(f"{name}: expected tensors on the CPU, got CUDA tensors: {why}"))


def _refusal(message: str) -> Callable[..., Any]:
    def refuse(*args, **kwargs):
        raise NotImplementedError(message)

    return refuse


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(path)
        _errors.watch(path)
    except OSError as error:
        musl = ": it is for glibc, and this system has musl" if _requirements.on_musl() else ""
        raise ImportError(f"torch {torch.__version__} cannot load {path}: {error}{musl}") from error
