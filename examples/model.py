"""A byte-level GPT around any of the attention layers, and the list of the six variants."""

from dataclasses import dataclass

from torch import nn

from attnjourney.demo.byte_gpt import VOCABULARY, ByteGPT
from examples.attention import GQA, MHA, MLA, GPT2Attention
from examples.config import Config
from examples.torch_attention import TorchMHA, TorchSDPA

__all__ = ["GPT", "OURS", "VARIANTS", "VOCABULARY", "Variant"]


@dataclass(frozen=True)
class Variant:
    label: str
    call: str  # what computes the attention in training
    attention: type[nn.Module]
    learned_positions: bool  # False: the attention layer rotates queries and keys
    twin: str | None = None  # the variant on PyTorch's own attention with the same weights


VARIANTS = {
    "mha": Variant("MHA", "torch.ops.attnjourney.mha", MHA, True, twin="torch-mha"),
    "torch-mha": Variant("torch MHA", "nn.MultiheadAttention", TorchMHA, True),
    "gpt": Variant("GPT", "torch.ops.attnjourney.gpt_attention", GPT2Attention, True, twin="torch-sdpa"),
    "torch-sdpa": Variant("torch SDPA", "F.scaled_dot_product_attention", TorchSDPA, True),
    "gqa": Variant("GQA", "torch.ops.attnjourney.gqa", GQA, False),
    "mla": Variant("MLA", "torch.ops.attnjourney.mla", MLA, False),
}
OURS = ("mha", "gpt", "gqa", "mla")


class GPT(ByteGPT):
    """(B, T) int64 -> logits (B, T, 256): attnjourney/demo/byte_gpt/model.py around the attention of a variant."""

    def __init__(self, variant: Variant, config: Config):
        attention = [variant.attention(config) for _ in range(config.layers)]
        super().__init__(attention, config.embed, config.context if variant.learned_positions else None)
        self.initialise(config.seed)
