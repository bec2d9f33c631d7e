"""What torch.compile keeps on disk calls our operators by the schemas of its day: others are not to find it."""

import hashlib

import torch

from ._names import NAMESPACE


def schemas_digest(names: list[str]) -> str:
    """Of the schemas of these operators."""
    schemas_of = torch._C._jit_get_schemas_for_operator
    texts = (str(schema) for name in names for schema in schemas_of(NAMESPACE + name))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def tag_keys(names: list[str]) -> None:
    """Programs compiled by this process are kept, and found, under keys that hold these schemas."""
    torch.compiler.config.cache_key_tag += f"attnjourney-{schemas_digest(names)}"
