"""Speculative decoding (arXiv 2211.17192) with trees of drafts (SpecInfer, arXiv 2305.09781) over paged caches.

A cheap drafter guesses what comes next, as a tree: the last token is its root, a path from there a guess. One call of
the model reads all nodes, each with its ancestors alone (attnjourney.tree_mask), and says what it would have chosen
behind each: the longest path that agrees is kept, with one token more. The tokens are those of greedy decoding, in
fewer calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import attnjourney
from examples.attention import MLA
from examples.served_models import ServedGPT

Tree = tuple[list[int], list[int]]  # tokens and parents of the nodes; node 0 is the root, its parent -1
Drafter = Callable[[list[int]], Tree]


def repeats(tokens: list[int], width: int = 2, depth: int = 4) -> Tree:
    """What followed the last places where the last two tokens stood before (prompt lookup)."""
    nodes, parents = [tokens[-1]], [-1]
    places = [i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:]]
    for place in places[-width:]:
        at = 0
        for token in tokens[place : place + depth]:
            same = [n for n, p in enumerate(parents) if p == at and nodes[n] == token]
            if not same:
                nodes.append(token)
                parents.append(at)
            at = same[0] if same else len(nodes) - 1
    return nodes, parents


@torch.no_grad()
def speculate(served: ServedGPT, prompt: list[int], count: int, draft: Drafter = repeats) -> tuple[list[int], int]:
    """`count` greedy tokens after the prompt, and how many calls of the model they took. served: of one sequence."""
    tokens, calls = list(prompt), 1
    for cache in served.caches:
        cache.reset()
    begin = torch.tensor([0, len(prompt)])
    logits = served.logits(torch.tensor(prompt), torch.arange(len(prompt)), begin, torch.tensor([len(prompt) - 1]))
    tokens.append(int(logits.argmax()))
    while len(tokens) < len(prompt) + count:
        room = served.caches[0].capacity - len(tokens) + 1
        nodes, parents = _pruned(*draft(tokens), depth=len(prompt) + count - len(tokens), room=room)
        chosen, kept = _read_tree(served, nodes, parents, len(tokens) - 1)
        calls += 1
        path = [0]
        while (next_node := _child(nodes, parents, path[-1], chosen[path[-1]])) is not None:
            path.append(next_node)
        tokens += [chosen[node] for node in path]
        for cache, parts in zip(served.caches, kept):  # of the tree, the path stays
            cache.truncate(cache.lengths - len(nodes))
            cache.append(*(part[..., path, :] for part in parts))
    return tokens[len(prompt) : len(prompt) + count], calls


def _pruned(nodes: list[int], parents: list[int], depth: int, room: int) -> Tree:
    """Without what lies deeper than so many tokens are wanted, and at most `room` nodes."""
    deep = attnjourney.tree_depths(torch.tensor(parents)).tolist()
    kept = [n for n, d in enumerate(deep) if d < depth][:room]  # a parent comes before its children
    place = {n: i for i, n in enumerate(kept)} | {-1: -1}
    return [nodes[n] for n in kept], [place[parents[n]] for n in kept]


def _child(nodes: list[int], parents: list[int], of: int, token: int) -> int | None:
    return next((n for n, parent in enumerate(parents) if parent == of and nodes[n] == token), None)


def _read_tree(
    served: ServedGPT, nodes: list[int], parents: list[int], length: int
) -> tuple[list[int], list[tuple[Tensor, ...]]]:
    """What the model chooses behind each node, and what each cache was given for the nodes (1, ..., nodes, width).

    Behind `length` cached tokens: the root stands at position `length`, others as deep as they are below it.
    """
    model, tree = served.model, torch.tensor(parents)
    positions = length + attnjourney.tree_depths(tree)
    x = model.embedding(torch.tensor([nodes]))  # (1, nodes, E)
    if model.positions is not None:
        x = x + model.positions(positions)
    kept: list[tuple[Tensor, ...]] = []
    for block, cache in zip(model.blocks, served.caches):
        layer, normed = block.attention, block.attention_norm(x)
        if isinstance(layer, MLA):
            query, latents = layer.rotated(normed, positions)
            kept.append((latents[:, 0],))
        else:
            query, both = layer.project(normed, positions)
            kept.append(layer.keys_values(both))
        cache.append(*kept[-1])
        options = dict(is_causal=False, attn_mask=attnjourney.tree_mask(tree, cache.lengths))
        if isinstance(layer, MLA):
            out = cache.attend(query, layer.kv_b_weight, **options)
            x = x + out.transpose(1, 2).flatten(2) @ layer.o_weight.T
        else:
            x = x + layer.merge(cache.attend(query, scale=layer.scale, **options))
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))[0].argmax(-1).tolist(), kept
