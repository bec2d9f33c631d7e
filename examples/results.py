"""What the demo found out, in one place for the checks, the terminal's table and the report."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.config import Config
from examples.context import Beyond
from examples.data import Text
from examples.model import GPT, VARIANTS


@dataclass(frozen=True)
class Check:
    passed: bool
    text: str


@dataclass
class Results:
    """The dictionaries have one entry per variant; `cache` only for those that generate with a cache."""

    config: Config
    text: Text
    prompt: bytes  # a line of the held-out text
    models: dict[str, GPT]
    losses: dict[str, list[float]]  # of each step, nats per byte
    bits: dict[str, float]  # held-out, per byte
    bigram: float  # the same for the bigram model
    speed: dict[str, float]  # training, bytes per second
    cache: dict[str, tuple[int, str]]  # bytes per token, formula
    beyond: Beyond | None = None  # the trained length, of GQA; None: the text is too short
    checks: list[Check] = field(default_factory=list)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the summary."""
        rows = []
        for name, variant in VARIANTS.items():
            parameters = sum(weight.numel() for weight in self.models[name].parameters())
            beside = f"{self.speed[name] / self.speed[variant.twin]:.2f}x" if variant.twin else ""
            cache = f"{self.cache[name][0]:,}" if name in self.cache else ""
            rows.append([
                variant.label, f"{parameters:,}", f"{self.bits[name]:.3f}", f"{self.speed[name]:,.0f}", beside, cache
            ])  # fmt: skip
        rows.append(["bigram", "", f"{self.bigram:.3f}", "", "", ""])
        return [
            "variant", "parameters", "held-out\nbits/byte", "training\nbytes/s", "beside\ntorch", "cache\nbytes/token"
        ], rows  # fmt: skip

    def write_json(self, path: Path) -> None:
        content = {
            "config": asdict(self.config),
            "text": self.text.source,
            "bits_per_byte": self.bits | {"bigram": self.bigram},
            "bytes_per_second": self.speed,
            "cache_bytes_per_token": {name: size for name, (size, _) in self.cache.items()},
            "bits_within_and_beyond_the_trained_length": self.beyond and self.beyond.means(),
            "losses": self.losses,
            "checks": [asdict(check) for check in self.checks],
        }
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
