"""transformers over this package: the attention of every model that goes through its AttentionInterface, and caches.

    from attnjourney.integrations import transformers as ours  # registers "attnjourney" with transformers
    ours.use(model)                                            # or attn_implementation="attnjourney" at construction
    model.generate(..., past_key_values=ours.cache(model))

See docs/integrations/transformers.md.
"""

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        f"attnjourney.integrations.transformers needs transformers 5 (pip install 'transformers>=5,<6'): {error}"
    ) from error

from .attention import NAME, calls, forward
from .caches import cache as cache
from .layers import KVLayer as KVLayer
from .layers import LatentLayer as LatentLayer
from .layers import WindowLayer as WindowLayer
from .masks import MaskDescription as MaskDescription
from .masks import mask
from .models import use as use
from .packed import PackedCache as PackedCache
from .packed import packed_cache as packed_cache
from .pages import PagedLayer as PagedLayer

__all__ = [
    "NAME", "KVLayer", "LatentLayer", "MaskDescription", "PackedCache", "PagedLayer", "WindowLayer", "cache", "calls",
    "packed_cache", "use",
]  # fmt: skip

# both, always: without a mask function of its own a name gets no mask at all, and padding would be seen
AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, mask)
