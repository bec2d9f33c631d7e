"""Programs that torch.compile keeps on disk are found again only where our operators have the same schemas."""

import re

import torch
from torch._inductor.codecache import compiled_fx_graph_hash

import attnjourney
from attnjourney import _compile_cache, _names


def _key():
    graph = torch.fx.symbolic_trace(lambda x: attnjourney.attention(x, x, x))
    return compiled_fx_graph_hash(graph, [torch.zeros(2, 3, 4)], {}, [])[0]


def digest():
    return _compile_cache.schemas_digest(_names.operator_names())


def test_keys_hold_the_schemas():
    assert re.search("attnjourney-[0-9a-f]{16}", torch.compiler.config.cache_key_tag)
    key = _key()
    assert _key() == key
    with torch.compiler.config.patch(cache_key_tag="attnjourney-other"):
        assert _key() != key
    assert _key() == key


def test_another_operator_is_another_digest():
    before = digest()
    library = torch.library.Library("attnjourney", "FRAGMENT")
    library.define("_of_another_version(Tensor x) -> Tensor")
    assert digest() != before
    library._destroy()
    assert digest() == before
