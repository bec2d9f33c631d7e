"""python -m benchmarks.readme [--check]: the tables of the documents from the files in benchmarks/results/.

README.md has some rows, of all machines side by side, docs/performance.md all rows of each machine. Tables stand
between <!-- benchmark:start --> and <!-- benchmark:end -->.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import markdown
from .cases import CASES, PASSES
from .machine import ROOT

START, END = "<!-- benchmark:start -->", "<!-- benchmark:end -->"
README, PAGE = ROOT / "README.md", ROOT / "docs/performance.md"
RESULTS = Path(__file__).with_name("results")

CALLS = {  # row of the table -> case
    "fp32, D 64, N 512": "fp32-d64-n512-full",
    "fp32, D 64, N 512, causal": "fp32-d64-n512-causal",
    "fp32, D 64, N 4096, causal": "fp32-d64-n4096-causal",
    "fp32, D 128, N 1024": "fp32-d128-n1024-full",
    "bf16, D 64, N 512, causal": "bf16-d64-n512-causal",
    "bf16, D 128, N 1024": "bf16-d128-n1024-full",
    "fp16, D 128, N 1024": "fp16-d128-n1024-full",
    "fp32, D 80, N 1024": "fp32-d80-n1024-full",
    "fp32, D 192, Dv 128, N 1024, causal (MLA)": "fp32-d192-dv128-n1024-causal",
    "fp32, views of packed qkv, N 1024, causal": "fp32-d64-n1024-causal-packed",
    "fp32, GQA 8:1, N 512, causal": "fp32-gqa8-d64-n512-causal",
    "fp32, (4, 12, 197, 64)": "fp32-b4-h12-n197-d64",
    "fp32, (64, 8, 32, 64)": "fp32-b64-h8-n32-d64",
    "fp32, (1, 8, 16, 64)": "fp32-b1-h8-n16-d64",
    "fp32, one head, N 2048, causal": "threads-h1-n2048-causal",
    "fp32, dropout 0.1, N 1024": "fp32-d64-n1024-dropout",
    "fp32, float mask with gradient, N 1024": "fp32-d64-n1024-mask-float-grad",
    "fp32, bool padding mask, N 1024": "fp32-d64-n1024-mask-padding",
}
LAYERS = {"MHA": "layer-mha", "GPT": "layer-gpt", "GQA 8:2": "layer-gqa", "MLA": "layer-mla"}


SHORT = (  # the rows of CALLS that the README has
    "fp32, D 64, N 512",
    "fp32, D 64, N 4096, causal",
    "bf16, D 64, N 512, causal",
    "bf16, D 128, N 1024",
    "fp16, D 128, N 1024",
    "fp32, D 192, Dv 128, N 1024, causal (MLA)",
    "fp32, dropout 0.1, N 1024",
    "fp32, float mask with gradient, N 1024",
)


def machines(folder: Path = RESULTS) -> list[dict]:
    """All results, newest first; FileNotFoundError if there are none."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not documents:
        raise FileNotFoundError(
            f"no results in {folder}: run `python -m benchmarks.run --json {folder / 'NAME.json'}` first"
        )
    return sorted(documents, key=lambda document: document["date"], reverse=True)


def _ratio(record: dict | None, peer: str) -> str:
    return markdown.times(record["results"].get(peer, {}).get("ratio")) if record else ""


OF_PEAK = (
    "Of peak: useful FLOP over the multiply-add peak of the best instruction set for the dtype, measured beside it "
    "in the same process. SDPA: F.scaled_dot_product_attention's time over ours."
)


def _records(document: dict) -> dict[tuple[str, str], dict]:
    return {(record["name"], record["pass"]): record for record in document["cases"]}


def _ours(record: dict | None) -> dict:
    return record["results"].get("ours", {}) if record else {}


def _cell(record: dict | None) -> list[str]:
    mine = _ours(record)
    if "seconds" not in mine:
        return ["", "", ""]
    return [markdown.duration(mine["seconds"]), f"{mine['fraction']:.0%}", _ratio(record, "sdpa")]


def render(document: dict) -> str:
    """Markdown: machine and command, the table of calls, the table of layers, the memory line."""
    records = _records(document)

    def passes(name: str) -> list[dict | None]:
        return [records.get((name, which)) for which in PASSES]

    calls, layers = [], []
    for label, name in CALLS.items():
        forward, backward, _ = passes(name)
        if any("seconds" in _ours(record) for record in (forward, backward)):
            scaling = _ours(forward).get("scaling")
            label += f" ({scaling:.2f}x one thread)" if scaling else ""
            calls.append([label, *_cell(forward), *_cell(backward)])
    for label, name in LAYERS.items():
        forward, _, both = passes(name)
        if any("seconds" in _ours(record) for record in (forward, both)):
            row = [(_cell(record)[0], _ratio(record, "sdpa"), _ratio(record, "mha")) for record in (forward, both)]
            layers.append([label, *row[0], *row[1]])

    lines = [markdown.machine(document), OF_PEAK, ""]
    if calls:
        lines += markdown.rows(["", "forward", "of peak", "SDPA", "backward", "of peak", "SDPA"], calls) + [""]
    if layers:
        times = ["SDPA composed", "nn.MultiheadAttention"]
        lines += markdown.rows(["layer", "forward", *times, "forward + backward", *times], layers) + [""]
    memory = []
    for case in CASES:
        parts = []
        for which, label in (("forward", "forward"), ("both", "forward and backward")):
            found = (records.get((case.name, which)) or {"results": {}})["results"] if case.only_memory else {}
            sizes = {
                name: result["memory"] / 2**20 for name, result in found.items() if result.get("memory") is not None
            }
            if "ours" in sizes:
                beside = ", ".join(f"{name} {size:.0f}" for name, size in sizes.items() if name != "ours")
                parts.append(f"{label} {sizes['ours']:.0f}" + (f" ({beside})" if beside else ""))
        if parts:
            heads = f"the {case.layer} layer" if case.layer else f"{case.dtype}, one head"
            what = f"{heads}, N {case.q_len}" + (", causal" if case.causal else "")
            memory.append(f"- {what}: {'; '.join(parts)}")
    if memory:
        lines += ["Peak memory beyond inputs and outputs, in MiB:", "", *memory]
    return "\n".join(lines).rstrip() + "\n"


def together(documents: list[dict]) -> str:
    """Markdown: some calls, of each machine time, share of the peak and how many times SDPA takes."""
    letters = [chr(ord("A") + i) for i in range(len(documents))]
    found = [_records(document) for document in documents]
    rows = []
    for label in SHORT:
        records = [of_machine.get((CALLS[label], which)) for of_machine in found for which in PASSES[:2]]
        if any("seconds" in _ours(record) for record in records):
            rows.append([label, *(", ".join(part for part in _cell(record) if part) for record in records)])
    machines = [f"- {letter}: {markdown.machine(document)}" for letter, document in zip(letters, documents)]
    header = ["", *(f"{letter}: {which}" for letter in letters for which in PASSES[:2])]
    lines = [
        f"In a cell: time, of peak, SDPA. {OF_PEAK}",
        "",
        *(markdown.rows(header, rows) + [""] if rows else []),
        *machines,
    ]
    return "\n".join(lines) + "\n"


def every(documents: list[dict]) -> str:
    """Markdown: each machine under a heading of its own."""
    return "\n".join(f"### {document['gpu'] or document['cpu']}\n\n{render(document)}" for document in documents)


def replace(page: str, table: str) -> str:
    """The page's text with the table between the markers; ValueError without exactly one pair of them."""
    if page.count(START) != 1 or page.count(END) != 1 or page.index(START) > page.index(END):
        raise ValueError(f"expected the page to contain {START} and after it {END}, once each")
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{table}{END}{rest.partition(END)[2]}"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    p.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table is not up to date")
    p.add_argument("--readme", type=Path, default=README)
    p.add_argument("--page", type=Path, default=PAGE)
    p.add_argument("--results", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    try:
        documents = machines(args.results)
        tables = {args.readme: together(documents), args.page: every(documents)}
        old = {page: page.read_text() for page in tables}
        new = {page: replace(old[page], table) for page, table in tables.items()}
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    stale = [page for page in tables if old[page] != new[page]]
    for page in stale:
        if args.check:
            message = f"{page}: the benchmark table is not up to date: run `python -m benchmarks.readme`"
            print(message, file=sys.stderr)
        else:
            page.write_text(new[page])
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
