"""The operators in plain PyTorch, with the same signatures: slow, simple, differentiable to any order. In float64, the
oracle of the tests."""

from .attention import attention as attention
from .attention import attention_weights as attention_weights
from .attention import merge_states as merge_states
from .attention import varlen_attention as varlen_attention
from .attention_fp8 import attention_fp8 as attention_fp8
from .attention_fp8 import dequantize_fp8 as dequantize_fp8
from .decode import decode as decode
from .decode import mla_decode as mla_decode
from .dropout import dropout_keep_mask as dropout_keep_mask
from .gated_linear_attention import gated_linear_attention as gated_linear_attention
from .gpt_attention import gpt_attention as gpt_attention
from .gqa import gqa as gqa
from .infini_attention import infini_attention as infini_attention
from .linear_attention import linear_attention as linear_attention
from .longformer_attention import longformer_attention as longformer_attention
from .mha import mha as mha
from .mla import mla as mla
from .quantization import dequantize as dequantize
from .quantization import quantize as quantize
from .sparse_attention import lightning_indexer as lightning_indexer
from .sparse_attention import lightning_indexer_loss as lightning_indexer_loss
from .sparse_attention import sparse_attention as sparse_attention
