"""Patterns of blocks as functions of (b, h, i, j), and attention's check for one of them."""

import torch

import attnjourney
from attnjourney import reference
from tests.support.options_cases import check, make, plain_attention


def bigbird(block_size, q_len, kv_len, window=3, global_blocks=1, random_blocks=2):
    """Zaheer et al. 2020 (arXiv 2007.14062): a window, global tokens both ways, random blocks that differ by head."""
    rows, keys = -(-q_len // block_size), -(-kv_len // block_size)
    generator = torch.Generator().manual_seed(3)
    chance = torch.rand(4, rows, keys, generator=generator)
    taken = chance.argsort(-1).argsort(-1) < random_blocks

    def seen(b, h, i, j):
        row, key = i // block_size, j // block_size
        near = (row - key).abs() <= window // 2
        return near | (row < global_blocks) | (key < global_blocks) | taken[h, row, key]

    return seen


def document(block_size, q_len, kv_len):
    """Pairs of one document; documents begin anywhere, and are others in each batch item."""
    generator = torch.Generator().manual_seed(4)
    number = (torch.rand(2, max(q_len, kv_len), generator=generator) < 1.3 / block_size).cumsum(-1)
    return lambda b, h, i, j: number[b, i] == number[b, j]


def causal_blocks(block_size, q_len, kv_len):
    """Block-causal: every key of the row's own block and of those before it, but for every third block."""
    return lambda b, h, i, j: (j // block_size <= i // block_size) & (j // block_size % 3 != 1)


def ragged(block_size, q_len, kv_len):
    """Blocks of every kind: whole, hidden, a few pairs, and rows that see nothing."""
    generator = torch.Generator().manual_seed(5)
    kind = torch.randint(4, (-(-q_len // block_size), -(-kv_len // block_size)), generator=generator)
    pair = torch.rand(q_len, kv_len, generator=generator) < 0.3

    def seen(b, h, i, j):
        own = kind[i // block_size, j // block_size]
        return ((own == 1) | ((own == 2) & pair[i, j])) & (i % 37 != h)

    return seen


PATTERNS = {"bigbird": bigbird, "document": document, "causal_blocks": causal_blocks, "ragged": ragged}


def dense(seen, batch, heads, q_len, kv_len):
    """The mask of a function in one piece."""
    axes = (torch.arange(n) for n in (batch, heads, q_len, kv_len))
    b, h, i, j = torch.meshgrid(*axes, indexing="ij")
    return seen(b, h, i, j)


def case(pattern, block_size, names=(), dtype=torch.float64, batch=2, heads=4, q_len=70, kv_len=90, **sizes):
    """(tensors, arguments with a BlockMask, the same mask as a tensor); a mask of one batch item or head broadcasts."""
    *tensors, arguments = make(names, dtype, q_len=q_len, kv_len=kv_len, **sizes)
    seen = PATTERNS[pattern](block_size, q_len, kv_len)
    mask = attnjourney.BlockMask.from_function(seen, batch, heads, q_len, kv_len, block_size)
    return tensors, {**arguments, "attn_mask": mask}, dense(seen, batch, heads, q_len, kv_len)


def check_blocks(tensors, arguments, mask, label=""):
    """The rule of testing.py, with the mask as a tensor in every formula that ours is compared to."""
    __tracebackhide__ = True

    def theirs(*tensors, attn_mask, **options):
        return reference.attention(*tensors, attn_mask=mask, **options)

    def plain(tensors, arguments, gradients, ulps):
        return plain_attention(tensors, {**arguments, "attn_mask": mask}, gradients, ulps)

    return check(tensors, arguments, theirs=theirs, plain=plain, label=label)
