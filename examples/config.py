"""Sizes of the models and of the training run."""

from dataclasses import dataclass

FULL_STEPS = 500


@dataclass(frozen=True)
class Config:
    """The same for all variants. Everything here decides the result, so a checkpoint keeps a copy of it."""

    steps: int = 200  # FULL_STEPS with --full
    batch: int = 8
    context: int = 128  # bytes a model sees at once
    layers: int = 4
    embed: int = 128
    heads: int = 4
    learning_rate: float = 3e-3
    seed: int = 1

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def kv_heads(self) -> int:  # GQA: two query heads read one key/value head
        return max(1, self.heads // 2)

    @property
    def kv_lora_rank(self) -> int:  # MLA: size of the latent that stands for all keys and values of a token
        return self.embed // 4

    @property
    def rope_head_dim(self) -> int:  # MLA: the part of a head that carries the position
        return self.head_dim // 2

    def problem(self) -> str | None:
        """What is wrong with the sizes, in words; None if nothing is."""
        if self.embed % self.heads:
            return f"--embed {self.embed} is not a multiple of --heads {self.heads}"
        if self.head_dim % 4:
            return f"--embed {self.embed} / --heads {self.heads} = {self.head_dim} is not a multiple of 4"
        if self.heads > 1 and self.heads % 2:
            return f"--heads {self.heads} is odd: GQA pairs the heads"
        return None
