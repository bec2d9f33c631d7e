"""The whole job: train six models, measure them, check what must hold, write the report."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples import context, evaluate, report
from examples.checks import all_checks
from examples.config import Config
from examples.data import Text, held_out_windows, sentence
from examples.model import VARIANTS
from examples.progress import Progress
from examples.results import Results
from examples.sections import all_sections, lead
from examples.train import train

SPEED_ROUNDS = 10


def run(config: Config, text: Text, out: Path, console: Console) -> Results:
    """From the text to the report in the folder `out`, which has a folder `checkpoints`."""
    started = time.monotonic()
    say(console, f"text: {text.source}, {len(text.train):,} bytes to train on, {len(text.held_out):,} held out")
    say(
        console,
        f"six models: {config.layers} layers, {config.embed} wide, {config.heads} heads, context {config.context}; "
        f"{config.steps} steps of {config.batch * config.context:,} bytes each",
    )
    models, losses = {}, {}
    with Progress(console, config) as progress:
        for name in VARIANTS:
            models[name], losses[name] = train(name, config, text, out / "checkpoints", progress)

    say(console, "measuring, generating text and writing the report")
    inputs, targets = held_out_windows(text.held_out, config.context)  # both (windows, T)
    results = Results(
        config=config,
        text=text,
        prompt=sentence(text.held_out, longest=min(40, config.context // 2)),
        models=models,
        losses=losses,
        bits={name: evaluate.bits_per_byte(model, inputs, targets) for name, model in models.items()},
        bigram=evaluate.bigram_bits_per_byte(text.train, inputs, targets),
        speed=evaluate.tokens_per_second(config, text, rounds=min(SPEED_ROUNDS, config.steps)),
        cache=evaluate.cache_bytes_per_token(config),
        beyond=context.measure(models[context.VARIANT], config, text.held_out),
    )
    results.checks = all_checks(results)
    results.write_json(out / "results.json")
    report.write(out / "report.html", lead(results), results.checks, all_sections(results, out))

    print_table(console, results)
    for check in results.checks:
        console.print(
            f"{'ok:' if check.passed else 'FAILED:':<8}{check.text}",
            style="green" if check.passed else "bold red",
            highlight=False,
            soft_wrap=not console.is_terminal,
        )
    say(console, f"report: {out / 'report.html'}   ({time.monotonic() - started:.0f} s)")
    say(console, f"to see where the heads look: python -m attnjourney.show --checkpoint {out} --variant mla")
    return results


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(console: Console, results: Results) -> None:
    header, rows = results.table()
    table = Table()
    for index, column in enumerate(header):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
