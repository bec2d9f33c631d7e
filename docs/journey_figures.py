"""python -m docs.journey_figures: draws the figures of docs/journey.md into docs/figures, in half a minute."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window

import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import attnjourney  # noqa: E402
from attnjourney import nn  # noqa: E402

FOLDER = Path(__file__).parent / "figures"
BLUE, ORANGE, GREEN, PURPLE, GREY, RED = "#1f6fb4", "#e0702b", "#2a9763", "#8e4bb0", "#6b7480", "#b3261e"
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9})

SCORES = torch.tensor(  # one head, four tokens
    [
        [-0.012167113, -0.55046248, -0.37711906, 0.39070404],
        [0.3097055, -0.17063819, -0.31822443, -0.48890033],
        [-0.088825345, 0.17663771, 0.49089196, -0.4052847],
        [-0.2706871, 0.59133291, 0.0097594587, 0.29229057],
    ]
)


def heat(axes, x: Tensor, title: str, *, lowest=0.0, highest=1.0, color="Blues", numbers=False, labels=None) -> None:
    """x (rows, keys) as squares; -inf and NaN stay white."""
    axes.imshow(x.masked_fill(~x.isfinite(), math.nan).numpy(), cmap=color, vmin=lowest, vmax=highest)
    axes.set(title=title, xticks=[], yticks=[])
    if numbers:
        for i, row in enumerate(x.tolist()):
            for j, n in enumerate(row):
                text = f"{n:.2f}" if math.isfinite(n) else "−∞" if n < 0 else "NaN"
                middle = lowest + (highest - lowest) / 2 if lowest < 0 else lowest
                dark = math.isfinite(n) and abs(n - middle) > 0.6 * (highest - middle)
                axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    if labels is not None:
        axes.set_xticks(range(x.shape[1]), labels[: x.shape[1]], fontsize=6)
        axes.set_yticks(range(x.shape[0]), labels[: x.shape[0]], fontsize=6)
    for side in axes.spines.values():
        side.set_visible(True)


def one_head() -> plt.Figure:
    eye = torch.eye(4)
    seen = attnjourney.trace(2 * SCORES, eye, eye, is_causal=True)
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.8))
    for a, name, low, color in zip(
        axes, ("scores", "masked_scores", "weights"), (-1, -1, 0), ("RdBu", "RdBu", "Blues")
    ):
        heat(a, seen[name], name, lowest=low, color=color, numbers=True)
        a.set_xlabel("key")
    axes[0].set_ylabel("query row")
    return figure


class Block(torch.nn.Module):
    def __init__(self, embed: int, heads: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(embed)
        self.attention = nn.GroupedQueryAttention(embed, heads, heads, rope=1000.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def repeats(batch: int, generator: torch.Generator, period: int = 12, symbols: int = 16) -> Tensor:
    """(batch, 2 * period): a random string, twice. Only its second half can be foretold."""
    half = torch.randint(symbols, (batch, period), generator=generator)
    return torch.cat([half, half], 1)


def trained_on_repeats(steps: int = 300) -> torch.nn.Module:
    """Two layers of attention and nothing else, that learn to go on with a string they have seen once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(16, 64), Block(64, 4), Block(64, 4), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16)
    )
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        tokens = repeats(64, generator)
        period = tokens.shape[1] // 2
        logits = model(tokens[:, :-1])[:, period - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, period:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def heads() -> plt.Figure:
    model, tokens = trained_on_repeats(), repeats(1, torch.Generator().manual_seed(7))
    with torch.no_grad(), attnjourney.capture(model) as seen:
        model(tokens)
    text = [chr(ord("a") + t) for t in tokens[0].tolist()]
    figure, axes = plt.subplots(2, 4, figsize=(9, 4.9))
    for row, record in zip(axes, seen):
        for head, a in enumerate(row):
            heat(a, record.weights[0, head], f"{record.name}, head {head}", labels=text)
    return figure


def cache_numbers() -> plt.Figure:
    """What a token leaves in the cache of one layer, at the sizes of DeepSeek-V3: 128 heads of 128."""
    kinds = {
        "MHA, 128 heads": attnjourney.KVCache(1, 128, 1, 128),
        "GQA, 8 key/value heads": attnjourney.KVCache(1, 8, 1, 128),
        "MQA, 1 key/value head": attnjourney.KVCache(1, 1, 1, 128),
        "MLA, latent 512 + rotary key 64": attnjourney.LatentCache(1, 1, 512, 64),
        "MLA, were its keys and values kept": attnjourney.KVCache(1, 128, 1, 192, 128),
    }
    numbers = [cache.nbytes // 4 for cache in kinds.values()]
    figure, axes = plt.subplots(figsize=(7.5, 2.2))
    bars = axes.barh(list(kinds), numbers, color=[BLUE, ORANGE, ORANGE, PURPLE, GREY])
    axes.bar_label(bars, [f" {n:,}" for n in numbers])
    axes.set(xscale="log", xlim=(100, 2e5), xlabel="numbers per token and layer")
    axes.invert_yaxis()
    return figure


def long_context() -> plt.Figure:
    q = torch.zeros(1, 1, 24, 8)  # equal scores: what remains is who sees whom, and how far
    panels = {
        "causal": dict(),
        "window (5, -1)": dict(window_size=(5, -1)),
        "window and prefix 2": dict(window_size=(5, -1), prefix_length=2),
        "ALiBi, slope 1/4": dict(alibi_slopes=torch.tensor([0.25])),
        "a sink with logit 2": dict(sinks=torch.tensor([2.0])),
    }
    figure, axes = plt.subplots(1, 5, figsize=(10, 2.4))
    for a, (title, options) in zip(axes, panels.items()):
        heat(a, attnjourney.attention_weights(q, q, None, True, **options)[0, 0], title, highest=0.4)
    return figure


def rope_methods() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 3))
    common = dict(factor=8.0, original_max_position_embeddings=4096)
    methods = {
        "default": ({}, GREY),
        "linear": (dict(factor=8.0), ORANGE),
        "ntk": (dict(factor=8.0), GREEN),
        "yarn": (common, PURPLE),
    }
    for method, (parameters, color) in methods.items():
        inverse, _ = attnjourney.rope_frequencies(method, 128, 10000.0, **parameters)
        axes.plot((2 * math.pi / inverse).tolist(), label=method, color=color)
    axes.axhline(4096, color=RED, linestyle=":", linewidth=1)
    axes.text(0, 4600, "trained length, 4,096", color=RED)
    axes.set(yscale="log", xlabel="pair of numbers of a head", ylabel="tokens for one turn")
    axes.legend(frameon=False)
    return figure


def longformer() -> plt.Figure:
    torch.manual_seed(0)
    layer = nn.LongformerSelfAttention(32, 2, window=3, dilation=[1, 2]).eval()
    global_mask = torch.zeros(1, 32, dtype=torch.bool)
    global_mask[0, [0, 13]] = True
    seen = attnjourney.trace_module(layer, torch.randn(1, 32, 32), global_mask=global_mask)
    figure, axes = plt.subplots(1, 2, figsize=(6, 3))
    for head, a in enumerate(axes):
        heat(a, seen.weights[0, head], f"head {head}: dilation {head + 1}", highest=0.25)
    return figure


def linear_flops() -> plt.Figure:
    lengths = [2**n for n in range(8, 17)]
    counts = {"softmax attention, causal": [], "linear attention": []}
    for n in lengths:
        q = torch.empty(1, 1, n, 64, device="meta")
        for name, call in zip(counts, (attnjourney.attention, attnjourney.linear_attention)):
            with FlopCounterMode(display=False) as counter:
                call(q, q, q, is_causal=True)
            # the counter takes every pair of a causal call, half of which are never computed
            counts[name].append(counter.get_total_flops() / (2 if call is attnjourney.attention else 1))
    figure, axes = plt.subplots(figsize=(6, 2.8))
    for (name, values), color in zip(counts.items(), (BLUE, GREEN)):
        axes.plot(lengths, values, marker="o", markersize=3, label=name, color=color)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="FLOPs, one head of 64")
    axes.legend(frameon=False)
    return figure


def gated() -> plt.Figure:
    """What states say about a key that is written with 1 in row 0 and with -1 in row 40; other keys in between."""
    torch.manual_seed(0)
    rows, dim = 80, 32
    key = F.normalize(torch.randn(1, 1, rows, dim), dim=-1)
    key[:, :, 40] = key[:, :, 0]
    value = torch.zeros(1, 1, rows, 1)
    value[0, 0, 0], value[0, 0, 40] = 1.0, -1.0
    query, gate, beta = key[:, :, :1].expand(1, 1, rows, dim), torch.full((1, 1, rows), -0.03), torch.ones(1, 1, rows)
    figure, axes = plt.subplots(figsize=(6.5, 2.6))
    for (update, g, b), color in zip(
        (("linear", None, None), ("gated", gate, None), ("delta", None, beta), ("gated_delta", gate, beta)),
        (GREY, GREEN, BLUE, ORANGE),
    ):
        read = attnjourney.gated_linear_attention(query, key, value, g, b, update=update, scale=1.0)
        axes.plot(read.flatten().tolist(), label=update, color=color)
    axes.set(xlabel="row", ylabel="what is read", ylim=(-1.1, 1.4))
    axes.legend(frameon=False, ncols=4, loc="upper right", fontsize=8)
    return figure


def sparse() -> plt.Figure:
    """The keys that rows read: all, a window, and those that an indexer names because they matter to the row."""
    torch.manual_seed(1)
    rows, dim = 48, 16
    theme = torch.randint(4, (rows,))  # tokens of four themes; each row asks for its own
    key = F.one_hot(theme, dim).float()[None] + 0.1 * torch.randn(1, rows, dim)
    query = key[:, None] * 4
    indices = attnjourney.lightning_indexer(query, key, torch.ones(1, 1, rows), 8)[0].long()
    named = torch.zeros(rows, rows + 1).scatter_(1, indices.masked_fill(indices < 0, rows), 1.0)[:, :rows]
    causal = torch.ones(rows, rows).tril()
    panels = {"all: 1176 pairs": causal, "a window of 8": causal - causal.tril(-8), "8 that an indexer names": named}
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.9))
    for a, (title, seen) in zip(axes, panels.items()):
        heat(a, seen, title, highest=1.3)
    return figure


def kept_weights() -> plt.Figure:
    """Six keys in turn, each row asking for the next one: the weights of all values before it, by update rule."""
    torch.manual_seed(0)
    rows, dim = 24, 32
    key = F.normalize(torch.randn(6, dim), dim=-1).repeat(rows // 6 + 1, 1)[None, None]
    query, key = key[:, :, 1 : rows + 1], key[:, :, :rows]
    gate, beta = torch.full((1, 1, rows), -0.1), torch.ones(1, 1, rows)
    with attnjourney.capture(None, state_weights=True) as seen:
        for update, g, b in (
            ("linear", None, None), ("gated", gate, None), ("delta", None, beta), ("gated_delta", gate, beta)
        ):  # fmt: skip
            attnjourney.gated_linear_attention(query, key, key, g, b, update=update, scale=1.0)
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
    for a, record in zip(axes, seen.states):
        heat(a, record.weights[0, 0], record.settings["update"], lowest=-1.0, color="RdBu")
    axes[0].set(xlabel="value written", ylabel="row that reads")
    return figure


def infini() -> plt.Figure:
    torch.manual_seed(0)
    layer = nn.InfiniAttention(32, 2, segment_length=8)
    seen = attnjourney.trace_module(layer, torch.randn(1, 32, 32))
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3), width_ratios=(1, 1.4))
    heat(axes[0], seen.weights[0, 0], "local weights, segments of 8", highest=0.5)
    size = {name: seen[name][0, 0].norm(dim=-1) for name in ("local_output", "memory_output")}
    for (name, values), color in zip(size.items(), (BLUE, PURPLE)):
        axes[1].plot(values.tolist(), label=name, color=color)
    axes[1].set(xlabel="row", title="length of what each part reads", ylim=(0, 4))
    axes[1].legend(frameon=False, ncols=2)
    return figure


# ---- the mistakes


def shared_blocks() -> plt.Figure:
    """The blocks of four sequences that begin alike, and how many keys a step reads."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), width_ratios=(1.5, 1))
    cache = attnjourney.PagedKVCache(4, 1, 12, 2, block_size=1, dtype=torch.float32)
    new = torch.zeros(4, 1, 8, 2)
    cache.append(new, new, torch.tensor([5, 0, 0, 0]))
    cache.fork(0, [1, 2, 3])
    cache.append(new, new, torch.tensor([3, 0, 1, 0]))
    cache.fork(0, 1, 7)
    cache.append(new, new, torch.tensor([1, 2, 1, 3]))
    table = cache.block_table[:, :10]
    holders = torch.where(table < 0, 0, cache.block_refs[table.clamp(min=0).long()])
    heat(axes[0], holders.float(), "block of each sequence; dark: held by many", highest=5)
    for i, row in enumerate(table.tolist()):
        for j, block in enumerate(row):
            if block >= 0:
                color = "white" if holders[i, j] > 3 else "black"
                axes[0].text(j, i, str(block), ha="center", va="center", fontsize=8, color=color)
    axes[0].set(xlabel="place", ylabel="sequence")
    sequences = torch.arange(1, 33)
    axes[1].plot(sequences, sequences * 4196, color=GREY, label="each by itself")
    axes[1].plot(sequences, 4096 + sequences * 100, color=BLUE, label="prefix once")
    axes[1].set(xlabel="sequences", title="keys a step reads, 4096 shared", ylim=(0, 140_000))
    axes[1].legend(frameon=False)
    return figure


def inverted_mask() -> plt.Figure:
    eye, hidden = torch.eye(4), torch.ones(4, 4, dtype=torch.bool).triu(1)
    right = attnjourney.trace(2 * SCORES, eye, eye, ~hidden).weights
    wrong = attnjourney.trace(2 * SCORES, eye, eye, hidden).weights
    naive = SCORES.masked_fill(~hidden, -1e9).softmax(-1)
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.8))
    for a, x, title in zip(axes, (right, wrong, naive), ("right", "inverted", "inverted, hidden by -1e9")):
        heat(a, x, title, numbers=True, color="Blues" if x is right else "Oranges")
    return figure


def mixed_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """The mistake: angles for the pairs (0, 1), (2, 3) .. in a rotation of the pairs (0, d / 2), (1, d / 2 + 1) .."""
    inverse, _ = attnjourney.rope_frequencies("default", x.shape[-1], 10000.0)
    angles = (positions[:, None] * inverse).repeat_interleave(2, -1)  # interleaved: each twice, side by side
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()  # half-split


def mixed_layouts() -> plt.Figure:
    torch.manual_seed(0)
    positions = torch.arange(64.0)
    x = torch.randn(16).expand(1, 1, 64, 16)
    right, wrong = attnjourney.rope(x), mixed_rotary(x, positions)
    figure, (left, middle) = plt.subplots(1, 2, figsize=(8, 2.6))
    for turned, name, color in ((right, "right", BLUE), (wrong, "mixed layouts", ORANGE)):
        left.plot(turned[0, 0].norm(dim=-1).tolist(), label=name, color=color)
        same_distance = (turned[0, 0, 8:] * turned[0, 0, :-8]).sum(-1)  # one vector with itself, 8 tokens apart
        middle.plot(same_distance.tolist(), color=color)
    left.set(title="length of one vector, turned", xlabel="position", ylim=(0, None))
    middle.set(title="its score with itself 8 tokens before", xlabel="position")
    left.legend(frameon=False)
    return figure


def alibi_from_one() -> plt.Figure:
    q = torch.zeros(1, 8, 65, 4)
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True)
    for a, slopes, title in (
        (axes[0], attnjourney.alibi_slopes(8), "right: 1/2 .. 1/256"),
        (axes[1], 2.0 ** -torch.arange(8.0), "from 1: 1 .. 1/128"),
    ):
        weights = attnjourney.attention_weights(q, q, None, True, alibi_slopes=slopes, rows=[64])[0, :, 0]
        a.plot(weights.flip(-1).T.numpy(), color=BLUE, alpha=0.7)
        a.plot(weights[0].flip(-1).numpy(), color=ORANGE, label="head 0")
        a.set(title=title, xlabel="distance", yscale="log", ylim=(1e-6, 1))
    axes[0].set_ylabel("weight, equal scores")
    axes[0].legend(frameon=False)
    return figure


def rotary_key_per_head() -> plt.Figure:
    heads_, rank, rope = 128, 512, 64
    kept = {"one for all heads": rank + rope, "one per head": rank + heads_ * rope}
    figure, axes = plt.subplots(figsize=(6.5, 1.4))
    bars = axes.barh(list(kept), list(kept.values()), color=[PURPLE, ORANGE])
    axes.bar_label(bars, [f" {n:,}" for n in kept.values()])
    axes.set(xlabel="numbers per token in the cache, DeepSeek-V3", xlim=(0, 10000))
    axes.invert_yaxis()
    return figure


def online_softmax(scores: Tensor, block: int, guarded: bool) -> tuple[Tensor, Tensor]:
    """The running maximum and sum of a row, a block of keys at a time."""
    top, total, history = torch.tensor(-math.inf), torch.zeros(()), []
    for piece in scores.split(block):
        new = torch.maximum(top, piece.max())
        base = torch.where(new == -math.inf, 0.0, new) if guarded else new
        total = total * (top - base).exp() + (piece - base).exp().sum()
        top = new
        history.append(total)
    return torch.stack(history), top


def first_block_hidden() -> plt.Figure:
    torch.manual_seed(0)
    scores = torch.randn(32)
    scores[:12] = -math.inf  # the first block of 8, and half of the second
    figure, axes = plt.subplots(figsize=(6.5, 2.2))
    names = [f"keys {8 * i} .. {8 * i + 7}" for i in range(4)]
    for guarded, color, offset in ((True, BLUE, -0.2), (False, ORANGE, 0.2)):
        totals, _ = online_softmax(scores, 8, guarded)
        at = [i + offset for i in range(4)]
        axes.bar(at, totals.nan_to_num(0.0).tolist(), 0.38, color=color, label="guarded" if guarded else "-inf - -inf")
        for x, t in zip(at, totals.tolist()):
            axes.text(x, (0 if math.isnan(t) else t) + 0.1, f"{t:.2f}", ha="center", color=color)
    axes.set_xticks(range(4), names)
    axes.set(ylabel="running sum")
    axes.legend(frameon=False)
    return figure


def cold_start() -> plt.Figure:
    q, calls = torch.randn(1, 8, 64, 64), []
    for _ in range(12):
        start = time.process_time()
        attnjourney.attention(q, q, q)
        calls.append(1e3 * (time.process_time() - start))
    figure, axes = plt.subplots(figsize=(6.5, 2))
    axes.bar(range(1, 13), calls, color=[ORANGE] + [BLUE] * 11)
    axes.set(xlabel="call", ylabel="ms of CPU time", xticks=range(1, 13))
    return figure


FIGURES = {
    "one-head": one_head,
    "heads": heads,
    "cache": cache_numbers,
    "long-context": long_context,
    "rope": rope_methods,
    "longformer": longformer,
    "linear": linear_flops,
    "gated": gated,
    "kept": kept_weights,
    "infini": infini,
    "shared-blocks": shared_blocks,
    "sparse": sparse,
    "mistake-mask": inverted_mask,
    "mistake-rotary": mixed_layouts,
    "mistake-alibi": alibi_from_one,
    "mistake-k_pe": rotary_key_per_head,
    "mistake-first-block": first_block_hidden,
    "mistake-warm-up": cold_start,
}


def draw(names: list[str], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(names, key=lambda name: name != "mistake-warm-up")  # cold means first
    paths = []
    for name in order:
        figure, path = FIGURES[name](), folder / f"{name}.png"
        figure.savefig(path, dpi=100, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.journey_figures", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], help="figures, all by default")
    parser.add_argument("-o", "--out", type=Path, default=FOLDER, help="folder (default: docs/figures)")
    arguments = parser.parse_args()
    for path in draw(arguments.names or list(FIGURES), arguments.out):
        print(path, f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
