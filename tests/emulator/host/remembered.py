"""What a reference says of a case is computed once, however many orders and faults the case is run with."""

import functools

import torch


def _key(x):
    """Equal for arguments of equal values."""
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous()
        return x.dtype, tuple(x.shape), x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    if isinstance(x, dict):
        return tuple((name, _key(value)) for name, value in sorted(x.items()))
    if isinstance(x, (tuple, list)):
        return tuple(map(_key, x))
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype)):
        return type(x), x
    raise TypeError(f"no key for {type(x).__name__}")


def remembered(function):
    """`function`, whose results for arguments of the same values are the same objects: not to be written to."""
    results = {}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        key = hash(_key((args, kwargs)))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return wrapper
