"""DTensor: how every operator runs on tensors that are shared out over a mesh. Importing this registers it.

Each dimension of the mesh shares out the batch, the heads or the query rows of a call, or nothing: what the first
tensor says that is sharded in such a dimension (in a backward: what its forward has saved). All tensors are brought to
that, the operator runs on the shards, and the results say where they lie: sums over shares are Partial. Nothing is
cached, so that no call runs by the rule of another one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._dimensions import NARROWED, ONCE, SUMMED, Described, base_name, described

WHOLE = "."


@dataclass(frozen=True)
class Shares:
    """What each dimension of the mesh shares out: a letter of _dimensions, or WHOLE."""

    mesh: DeviceMesh
    rules: tuple[str, ...]

    def ranks(self, letter: str) -> int:
        return math.prod(self.mesh.size(i) for i, rule in enumerate(self.rules) if rule == letter)

    def place(self, letter: str) -> int:
        """The index of this rank's share."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        place = 0
        for i, rule in enumerate(self.rules):
            if rule == letter:
                place = place * self.mesh.size(i) + coordinate[i]
        return place

    def placements(self, letters: str, summed: str = "") -> list[Placement]:
        """Of a tensor with these dimensions; `summed`: the letters over whose shares it is a sum, where it has no
        dimension that is shared out."""

        def one(rule: str) -> Placement:
            if rule != WHOLE and rule in letters:
                return Shard(letters.index(rule))
            return Partial() if rule in summed else Replicate()

        return [one(rule) for rule in self.rules]


class Call:
    """One call of an operator with DTensors among its arguments."""

    def __init__(self, op: Described, named: dict[str, Any]):
        self.op, self.named = op, named
        sharded = {name: x for name in op.tensors if isinstance(x := named[name], DTensor)}
        first, like = next(iter(sharded.items()))
        for name, x in sharded.items():
            if x.device_mesh != like.device_mesh:
                raise ValueError(
                    f"{name}: expected the device mesh of {first}, {like.device_mesh}, got {x.device_mesh}"
                )
        self.mesh = like.device_mesh
        self.tensors = {name: x for name in op.tensors if (x := named[name]) is not None}
        self.raw = {name: op.dimensions(name, x.dim(), named) for name, x in self.tensors.items()}
        self.counts = self._counts()
        self.letters = {name: self.resolved(raw, self.tensors[name].shape) for name, raw in self.raw.items()}
        self.shares = self._shares(sharded)

    def _counts(self) -> dict[str, int]:
        """How many there are of each letter."""
        counts = dict.fromkeys("BHKL", 1)
        for name, raw in self.raw.items():
            for letter, size in zip(raw, self.tensors[name].shape):
                if letter in counts:
                    counts[letter] = max(counts[letter], size) if size else 0
        counts["H"] = self.named.get("num_heads", counts["H"])
        counts["K"] = self.named.get("num_kv_heads", counts["K"])
        has_query_heads = "num_heads" in self.named or any("H" in raw for raw in self.raw.values())
        if not has_query_heads or not self.named.get("enable_gqa", True):
            counts["H"] = max(counts["H"], counts["K"])
        return counts

    def resolved(self, raw: str, shape: torch.Size) -> str:
        """The letters along which the tensor can be shared out, capitals all: broadcast dimensions stay whole, and key
        heads are query heads where there are as many."""
        found = ""
        for letter, size in zip(raw, shape):
            upper = letter.upper()
            count = self.counts.get(upper, 1)
            alone = count == 1 if letter.islower() else size == 1
            if upper == WHOLE or (alone and not (count == 1 and upper in "BL")):
                found += WHOLE
            else:
                found += "H" if upper == "K" and count == self.counts["H"] else upper
        return found

    def _shares(self, sharded: dict[str, DTensor]) -> Shares:
        rules = [WHOLE] * self.mesh.ndim
        for i in range(self.mesh.ndim):
            for name, x in sharded.items():
                p = x.placements[i]
                if isinstance(p, Shard):
                    letter = self.letters[name][p.dim].replace("K", "H")
                    rules[i] = letter
                    if letter != WHOLE and self._allowed(Shares(self.mesh, tuple(rules)), letter):
                        break
                rules[i] = WHOLE
        shares = Shares(self.mesh, tuple(rules))
        if self.named.get("dropout_p") and any(rule != WHOLE for rule in rules) and not self._counts_from_origin():
            raise NotImplementedError(
                f"dropout_p: expected 0 where {self.op.name} is shared out over ranks, got {self.named['dropout_p']}"
            )
        return shares

    def _allowed(self, shares: Shares, letter: str) -> bool:
        ranks, count = shares.ranks(letter), self.counts[letter]
        if letter == "L":
            return self._rows_alone()
        if letter == "B":
            return count % ranks == 0 or not self._fused("B")
        grouped = any("K" in letters for letters in self.letters.values())
        if not grouped and not self._fused("H"):
            return True
        return count % ranks == 0 and (not grouped or self.counts["K"] % ranks == 0 or self._narrows(shares))

    def _fused(self, letter: str) -> bool:
        """Whether a dimension holds several numbers of each."""
        return any(
            x.upper() == letter and x.islower() and size != self.counts[letter]
            for name, raw in self.raw.items()
            for x, size in zip(raw, self.tensors[name].shape)
        )

    def _rows_alone(self) -> bool:
        """Whether no option counts rows from another one than the first."""
        return not self.named.get("causal_alignment") and self.named.get("query_lengths") is None

    def _counts_from_origin(self) -> bool:
        return "origin" in self.named

    def _narrows(self, shares: Shares) -> bool:
        """Whether ranks share key heads, of which each has all and takes the one that its query heads read."""
        keys, ranks = self.counts["K"], shares.ranks("H")
        return ranks % keys == 0 and keys < ranks and self.op.family in NARROWED

    @property
    def narrowed(self) -> bool:
        ranks = self.shares.ranks("H")
        return ranks > 1 and self.counts["K"] % ranks != 0

    # ---- arguments ----

    def local(self, name: str) -> Any:
        x = self.named[name]
        if name not in self.tensors:
            return self._number(name, x)
        if base_name(name) in ONCE and name == base_name(name) and self.shares.place("H") != 0:
            return None
        letters = self.letters[name]
        if not self.narrowed:
            letters = letters.replace("K", "H")
        placements = self.shares.placements(letters)
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if name in self.op.written and list(x.placements) != placements:
            raise ValueError(
                f"{name}: expected placements {tuple(placements)} beside the other arguments of {self.op.name}, "
                f"which writes it, got {x.placements}"
            )
        local = x.redistribute(placements=placements).to_local()
        return self._narrow(local, letters) if self.narrowed else local

    def _number(self, name: str, x: Any) -> Any:
        if name in ("num_heads", "num_kv_heads"):
            return x // self.shares.ranks("H")
        return self._origin(x) if name == "origin" else x

    def _origin(self, whole: Sequence[int]) -> list[int]:
        """Where this rank's rows and heads stand in the whole, which may be a part of something itself."""
        row, key, head, heads = whole

        def first(letter: str) -> int:
            return self.shares.place(letter) * -(-self.counts[letter] // self.shares.ranks(letter))

        if all(rule == WHOLE for rule in self.shares.rules):
            return list(whole)
        heads = heads or self.counts["H"]
        item = first("B") * self._items() if "B" in self.shares.rules else 0
        return [row + first("L"), key, head + first("H") + item * heads, heads]

    def _items(self) -> int:
        """Batch items behind one of the first batch dimension."""
        shapes = [self.tensors[name].shape[1:-3] for name in ("query", "key", "value") if name in self.tensors]
        return math.prod(max(sizes) for sizes in zip(*shapes))

    def _key_head(self) -> int:
        return self.shares.place("H") * self.counts["K"] // self.shares.ranks("H")

    def _narrow(self, x: Tensor, letters: str) -> Tensor:
        return x.narrow(letters.index("K"), self._key_head(), 1) if "K" in letters else x

    # ---- results ----

    def shared(self, index: int, x: Tensor) -> Tensor:
        """A result of this rank as a DTensor, or as what its input was."""
        name = self.op.outputs[index]
        base = base_name(name)
        if name.startswith("grad_"):
            if not self.named.get("need", -1) >> index & 1:
                return self._wrapped(x, WHOLE * x.dim(), x.shape)
            return self._gradient(base, x)
        raw = self.op.dimensions(name, x.dim(), self.named)
        letters = "".join(self._whole_or(letter) for letter in raw)
        shape = [self._global(letter, upper, n) for letter, upper, n in zip(raw, letters, x.shape)]
        return self._wrapped(x, letters, shape, SUMMED.get(self.op.family, "") if name == "out" else "")

    def _whole_or(self, letter: str) -> str:
        upper = letter.upper()
        if upper == "K":
            return "H" if self.shares.ranks("H") > 1 else WHOLE
        return upper

    def _global(self, letter: str, upper: str, n: int) -> int:
        ranks = self.shares.ranks(upper) if upper != WHOLE else 1
        if ranks == 1:
            return n
        fused = letter.islower() or letter == "K"
        return n * ranks if fused else self.counts[upper]

    def _gradient(self, base: str, x: Tensor) -> Tensor:
        if base in self.tensors:
            like, letters, shape = self.tensors[base], self.letters[base], self.tensors[base].shape
        else:  # a bias, which backward does not take: it is as the weight beside it
            like = self.tensors[base.replace("_bias", "_weight")]
            shape = like.shape[:1]
            letters = self.resolved(self.op.dimensions(base, 1, self.named), shape)
        if self.narrowed and "K" in letters:
            whole = x.new_zeros([n if s == "K" else k for s, n, k in zip(letters, shape, x.shape)])
            self._narrow(whole, letters).copy_(x)
            x = whole
        elif not self.narrowed:
            letters = letters.replace("K", "H")
        result = self._wrapped(x, letters, shape, "BL" if base in ONCE else "BHL")
        return result if isinstance(like, DTensor) else result.full_tensor()

    def _wrapped(self, x: Tensor, letters: str, shape: Sequence[int], summed: str = "") -> DTensor:
        shape = torch.Size(shape)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        placements = self.shares.placements(letters, summed)
        return DTensor.from_local(x, self.mesh, placements, run_check=False, shape=shape, stride=stride)


def _handle(op: Described, operator: Any, args: tuple, kwargs: dict) -> Any:
    with torch.no_grad():
        call = Call(op, op.signature.named(args, kwargs))
        flat = tuple(call.local(name) for name in op.signature.names)
        results = op.signature.call(flat)
        if results is None:
            return None
        if isinstance(results, Tensor):
            return call.shared(0, results)
        return tuple(call.shared(i, x) for i, x in enumerate(results))


def _register() -> None:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for op in described():
        handlers[op.signature.operator] = functools.partial(_handle, op)


_register()
