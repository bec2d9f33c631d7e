"""tree_mask: decoding a tree of drafted tokens equals decoding each of its paths alone, token after token."""

import pytest
import torch

import attnjourney
from attnjourney import KVCache, PagedKVCache, WindowCache, tree_depths, tree_mask

TREES = {
    "a path": [-1, 0, 1, 2],
    "two roots": [-1, -1, 0, 1, 0, 2],
    "a fan": [-1, 0, 0, 0, 2, 4, 4, 1],
    "one token": [-1],
}


def path_to(parents, i):
    path = []
    while i >= 0:
        path.append(i)
        i = parents[i]
    return path[::-1]


def noise(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


CACHES = {
    "dense": lambda: KVCache(2, 2, 40, 8, dtype=torch.float64),
    "paged": lambda: PagedKVCache(2, 2, 40, 8, block_size=4, dtype=torch.float64),
    "ring": lambda: WindowCache(2, 2, 64, 8, max_append=32, dtype=torch.float64),
}


@pytest.mark.parametrize("kind, tree", list(zip((*CACHES, "dense"), TREES)))
def test_each_token_equals_decoding_its_path_alone(kind, tree):
    trees, texts = [TREES[tree], TREES[tree][::]], (21, 5)
    if tree == "two roots":  # a tree for each sequence
        trees[1] = [-1, 0, 1, 0, -1, 4]
    tokens = len(trees[0])
    text, drafted, query = noise(1, 2, 2, 2, 21, 8), noise(2, 2, 2, 2, tokens, 8), noise(3, 2, 4, tokens, 8)
    parents = torch.tensor(trees if trees[0] != trees[1] else trees[0])
    cache = CACHES[kind]()
    cache.append(*text, torch.tensor(texts))
    cache.append(*drafted)
    out, lse = cache.attend(
        query, is_causal=False, attn_mask=tree_mask(parents, cache.lengths), return_lse=True, softcap=3.0
    )
    for b, tree_of_row in enumerate(trees):
        for i in range(tokens):
            alone = KVCache(1, 2, 40, 8, dtype=torch.float64)
            alone.append(*text[:, b : b + 1, :, 21 - texts[b] :])
            for t in path_to(tree_of_row, i):  # in sequence; the last step's output counts
                expected = alone.step(
                    query[b : b + 1, :, t : t + 1], *drafted[:, b : b + 1, :, t : t + 1], return_lse=True, softcap=3.0
                )
            torch.testing.assert_close(out[b : b + 1, :, i : i + 1], expected[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse[b : b + 1, :, i : i + 1], expected[1], rtol=1e-12, atol=1e-12)
    depths = tree_depths(parents).expand(2, -1).tolist()
    assert depths == [[len(path_to(t, i)) - 1 for i in range(tokens)] for t in trees]


def test_latents_and_the_capacity_as_columns():
    parents, lengths = torch.tensor([-1, 0, 0, 1], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
    query, latent, weight = noise(1, 2, 3, 4, 6), noise(2, 2, 15, 10), noise(3, 3 * 9, 8)
    mask = tree_mask(parents, lengths, keys=15)
    assert mask.shape == (2, 1, 4, 15)
    out = attnjourney.mla_decode(query, latent, lengths, weight, is_causal=False, attn_mask=mask)
    for b, n in enumerate(lengths.tolist()):
        for i in range(4):
            path = path_to(parents.tolist(), i)
            rows = torch.cat([latent[b, : n - 4], latent[b, n - 4 :][path]]).unsqueeze(0)
            alone = attnjourney.mla_decode(query[b : b + 1, :, i : i + 1], rows, torch.tensor([rows.shape[1]]), weight)
            torch.testing.assert_close(out[b : b + 1, :, i : i + 1], alone, rtol=1e-12, atol=1e-12)


def test_no_tokens():
    assert tree_mask(torch.empty(0, dtype=torch.int64), torch.tensor([3, 2])).shape == (2, 1, 0, 3)


@pytest.mark.parametrize(
    "parents, lengths, error, message",
    [
        ([-1, 1], [5], ValueError, "parents: expected -1 or the number of a token before its child, got 1 at"),
        ([-2, 0], [5], ValueError, "parents: expected -1 or the number of a token before its child, got -2 at"),
        ([[[-1]]], [5], ValueError, r"parents: expected shape \(tokens,\) or \(batch, tokens\), got \(1, 1, 1\)"),
        ([-1.0], [5], RuntimeError, "parents: expected dtype torch.int64 or torch.int32, got torch.float32"),
        ([-1], [5.0], RuntimeError, "lengths: expected dtype torch.int64 or torch.int32, got torch.float32"),
        ([[-1], [-1]], [5], ValueError, r"lengths: expected shape \(batch,\), got \(1,\) beside \(2, 1\)"),
        ([-1, 0], [1], ValueError, "lengths: expected at least the 2 tokens of the tree, got 1"),
    ],
)
def test_bad_input(parents, lengths, error, message):
    with pytest.raises(error, match=message):
        tree_mask(torch.tensor(parents), torch.tensor(lengths))
