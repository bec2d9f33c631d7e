"""Attention over a sequence that lies on several ranks of torch.distributed. Imported on request alone."""

from . import _torch_sdpa as _torch_sdpa
from .context_parallel import context_parallel as context_parallel
from .cost import bytes_sent as bytes_sent
from .cost import choose_scheme as choose_scheme
from .estimate import AttentionConfig as AttentionConfig
from .estimate import Bandwidths as Bandwidths
from .estimate import Estimate as Estimate
from .estimate import estimate as estimate
from .ring_attention import ring_attention as ring_attention
from .ring_infini_attention import ring_infini_attention as ring_infini_attention
from .ring_linear_attention import ring_linear_attention as ring_linear_attention
from .ring_mla import ring_mla as ring_mla
from .sharded_cache import ShardedKVCache as ShardedKVCache
from .sharding import shard as shard
from .sharding import unshard as unshard
from .tensor_parallel import tensor_parallel_plan as tensor_parallel_plan
