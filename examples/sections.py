"""The content of the report: what is shown, in which order, and the words around it."""

import platform
from pathlib import Path

import torch

from examples import context, figures
from examples.data import printable
from examples.generate import attention_weights, generate
from examples.model import OURS, VARIANTS
from examples.report import Section, escape, paragraph, picture, table
from examples.results import Results

SAMPLES = 3  # texts per variant
TEMPERATURE = 0.8


def all_sections(results: Results, out: Path) -> list[Section]:
    sections = [summary(results), losses(results, out), numbers(results, out)]
    if results.beyond is not None:
        sections.append(beyond(results, out))
    return [*sections, samples(results), attention(results, out)]


def lead(results: Results) -> str:
    config, text = results.config, results.text
    return (
        f"Six byte-level GPTs of {config.layers} layers, {config.embed} wide, {config.heads} heads, trained for "
        f"{config.steps} steps of {config.batch} × {config.context} bytes on {len(text.train):,} bytes of real text "
        f"({text.source}; the last {len(text.held_out):,} bytes held out). {machine()}"
    )


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"CPU: {name}, threads: {torch.get_num_threads()}, fp32, PyTorch {torch.__version__}."


def summary(results: Results) -> Section:
    header, rows = results.table()
    calls = [[variant.label, variant.call] for variant in VARIANTS.values()]
    return Section(
        "Results",
        table(header, rows)
        + paragraph(
            "Speed is that of whole training steps (forward, backward, optimiser): the median of steps taken in turns "
            "by all six models. A torch variant has the weights and sees the batches of the variant above it."
        )
        + table(["variant", "attention in training"], calls, kind="words"),
    )


def losses(results: Results, out: Path) -> Section:
    path = figures.losses(out / "losses.png", results.losses, results.bigram)
    return Section(
        "Training losses",
        picture(
            path,
            "MHA, GPT and the two torch variants begin with the same weights: their curves lie on each other. GQA and "
            "MLA have weights of their own, and rotary positions where the other four learn theirs.",
        ),
    )


def numbers(results: Results, out: Path) -> Section:
    bits = figures.bars(
        out / "bits_per_byte.png", results.bits, "Held-out text: shorter is better", "bits per byte", "{:.3f}",
        line=(results.bigram, "bigram model"),
    )  # fmt: skip
    speed = figures.bars(
        out / "speed.png", results.speed, "Training speed: longer is better", "bytes (tokens) per second", "{:,.0f}"
    )
    sizes = {name: size for name, (size, _) in results.cache.items()}
    cache = figures.bars(
        out / "cache.png", sizes, "Cache of one token, all layers: shorter is better", "bytes per token (fp32)", "{:,}"
    )
    formulas = [[VARIANTS[name].label, f"{text} = {size:,}"] for name, (size, text) in results.cache.items()]
    return Section(
        "Bits per byte, speed, cache",
        picture(
            bits,
            "Mean of -log2 p(next byte) on text that was never trained on. The bigram model counts pairs of bytes in "
            "the same training text, one added to each count.",
        )
        + picture(speed, "Median of whole training steps, the six models in turns: forward, backward, optimiser.")
        + picture(cache, "What generation keeps of each token.")
        + table(["variant", "cache bytes per token"], formulas, kind="words"),
    )


def beyond(results: Results, out: Path) -> Section:
    """Loss by position, in a context longer than the trained one."""
    found, trained = results.beyond, results.config.context
    path = figures.beyond(out / "beyond.png", found.bits, context.LABELS, trained)
    label = VARIANTS[context.VARIANT].label
    rows = [[context.LABELS[name], f"{within:.3f}", f"{after:.3f}"] for name, (within, after) in found.means().items()]
    header = [
        "rotary positions",
        f"bits per byte, bytes 1 to {trained}",
        f"bytes {trained + 1} to {len(found.bits['default'])}",
    ]
    return Section(
        "Beyond the trained length",
        paragraph(
            f"{label} was trained on {trained} bytes at a time and reads {found.factor} times as many here, without "
            "further training: only the frequencies of its rotary positions change. Every method stretches for that "
            "length; dynamic NTK by the ratio of the two lengths; LongRoPE, whose factors the paper searches for, has "
            "those of YaRN here, with its own attention factor."
        )
        + picture(path, "Dashed: the frequencies of training, at positions that were never trained.")
        + table(header, rows),
    )


def samples(results: Results) -> Section:
    """The prompt in bold, then what each model makes of it."""
    config, prompt = results.config, results.prompt
    parts = [paragraph(
        f"From a line of the held-out text (bold), at temperature {TEMPERATURE}, each byte computed from the cache of "
        "those before it: keys and values for MHA, GPT and GQA, the latent for MLA."
    )]  # fmt: skip
    for name in OURS:
        parts.append(f"<h3>{escape(VARIANTS[name].label)}</h3>")
        for seed in range(SAMPLES):
            count = config.context - len(prompt)
            text, _ = generate(results.models[name], config, prompt, count, TEMPERATURE, seed)
            parts.append(f"<pre><b>{escape(printable(prompt))}</b>{escape(printable(text))}</pre>")
    return Section("Text generated with a cache", "".join(parts))


def attention(results: Results, out: Path) -> Section:
    parts = [paragraph(
        f"Where each byte of the line “{printable(results.prompt)}” looks, in each layer and head. A row is a query "
        "and sums to 1; dark is a large weight; white is the future, which no query sees."
    )]  # fmt: skip
    for name in OURS:
        weights = attention_weights(results.models[name], results.prompt)  # (layers, heads, T, T)
        label = VARIANTS[name].label
        path = figures.attention(out / f"attention_{name}.png", weights, results.prompt, f"{label}: attention weights")
        parts.append(picture(path, f"{label}, all layers and heads."))
    return Section("Attention maps of one line", "".join(parts))
