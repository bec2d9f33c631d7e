"""Whether what this package needs is there: imported before anything else of it, and torch's first importer."""

import os
import re

MINIMUM_TORCH = (2, 11)
_minimum = ".".join(map(str, MINIMUM_TORCH))

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = f"attnjourney needs torch >= {_minimum}, and none is installed: pip install 'torch>={_minimum}'"
    raise ModuleNotFoundError(message, name="torch") from None


def check_torch() -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(f"attnjourney needs torch >= {_minimum}, and torch {torch.__version__} is installed")


def on_musl() -> bool:
    try:
        return not os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return True


check_torch()
