"""Public functions of the operators; importing this package registers them with PyTorch."""

from . import kv_cache as _kv_cache  # noqa: F401  for its operators
from ._tree_mask import tree_depths as tree_depths
from ._tree_mask import tree_mask as tree_mask
from .attention import attention as attention
from .attention_fp8 import attention_fp8 as attention_fp8
from .attention_fp8 import hadamard_signs as hadamard_signs
from .attention_fp8 import quantize_fp8 as quantize_fp8
from .attention_weights import attention_weights as attention_weights
from .decode import decode as decode
from .gated_linear_attention import gated_linear_attention as gated_linear_attention
from .gpt_attention import gpt_attention as gpt_attention
from .gqa import gqa as gqa
from .infini_attention import infini_attention as infini_attention
from .lightning_indexer import lightning_indexer as lightning_indexer
from .lightning_indexer import lightning_indexer_loss as lightning_indexer_loss
from .linear_attention import linear_attention as linear_attention
from .longformer_attention import longformer_attention as longformer_attention
from .merge_states import merge_states as merge_states
from .mha import mha as mha
from .mla import mla as mla
from .mla_decode import mla_decode as mla_decode
from .rope import rope_with_tables as rope_with_tables
from .sparse_attention import sparse_attention as sparse_attention
from .varlen_attention import varlen_attention as varlen_attention
