"""What must hold at the end of the demo."""

import math

from examples.config import Config
from examples.generate import generate, generate_without_cache
from examples.model import GPT, OURS, VARIANTS
from examples.results import Check, Results

# Rounding errors grow through training, as much as the number of steps and the text let them.
ROUNDING_FACTOR = 10
ROUNDING_FLOOR = 2e-3  # bits per byte; PyTorch's two may happen to round alike


def all_checks(results: Results) -> list[Check]:
    return [
        learnt(results.bits, results.bigram),
        *(same_curve(name, results.losses) for name in VARIANTS if VARIANTS[name].twin),
        *(same_with_cache(n, results.models[n], results.config, results.prompt, results.cache[n][0]) for n in OURS),
    ]


def learnt(bits: dict[str, float], bigram: float) -> Check:
    """Better than a bigram model: more than the byte before was used."""
    worst = max(bits, key=bits.get)
    passed = all(value < bigram for value in bits.values())  # False for NaN too
    return Check(
        passed,
        f"held-out text: {bits[worst]:.3f} bits per byte or less for all six "
        f"(largest: {VARIANTS[worst].label}), {'below' if passed else 'not below'} the bigram model's {bigram:.3f}",
    )


def same_curve(name: str, losses: dict[str, list[float]]) -> Check:
    """Same weights, same batches: PyTorch's own two show what rounding alone does, and ours is held to that."""
    twin = VARIANTS[name].twin
    rounding = largest_distance(losses["torch-mha"], losses["torch-sdpa"])
    distance = largest_distance(losses[name], losses[twin])
    passed = distance < max(ROUNDING_FACTOR * rounding, ROUNDING_FLOOR)
    return Check(
        passed,
        f"{VARIANTS[name].label} loss curve {'equals' if passed else 'differs from'} that on {VARIANTS[twin].call}"
        f"{' within rounding' if passed else ''}: at most {distance:.1e} bits per byte apart "
        f"(PyTorch's own two: {rounding:.1e})",
    )


def largest_distance(a: list[float], b: list[float]) -> float:
    """Of two loss curves in nats per byte; the result is in bits per byte."""
    return max(abs(x - y) for x, y in zip(a, b)) / math.log(2)


def same_with_cache(name: str, model: GPT, config: Config, prompt: bytes, bytes_per_token: int) -> Check:
    """Greedy text with a cache, and each byte again from the whole sequence: the same text, and no larger a cache."""
    count = config.context - len(prompt)
    cached, cache = generate(model, config, prompt, count)
    recomputed = generate_without_cache(model, prompt, count)
    same = cached == recomputed and cache.bytes_per_token() == bytes_per_token
    return Check(
        same,
        f"{VARIANTS[name].label} with a cache of {cache.bytes_per_token():,} bytes per token: {count} greedy bytes "
        f"{'are the same as' if same else 'are not those'} recomputed from the whole sequence",
    )
