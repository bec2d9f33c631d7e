"""python -m benchmarks.run: measures cases and prints, saves, plots or compares them."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import ceilings, compare, crossover, inputs, machine, memory, peers, report
from .cases import CASES, DERIVATIVES, GPU_CASES, PASSES, Case, from_shape, select
from .measure import blank, measure
from .truth import Truth


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    p.add_argument("--case", metavar="PATTERN", help="cases by name, group or wildcard, comma-separated (see --list)")
    p.add_argument(
        "--shape", action="append", default=[], metavar='"B,H,Hkv,L,S,D,Dv[,causal][,dtype]"', help="a case of your own"
    )
    p.add_argument("--quick", action="store_true", help="a small subset, in under two minutes")
    p.add_argument(
        "--passes", default=",".join(PASSES + DERIVATIVES),
        help="forward, backward (alone), both (forward and backward), jvp (with the forward), double_backward (alone)",
    )  # fmt: skip
    p.add_argument(
        "--peers", help="comma-separated (see --list), or none; default: all there are, with --quick sdpa,mha"
    )
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all of them")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument(
        "--seconds", type=float, help="time for each contestant in each pass (default 0.5, with --quick 0.1)"
    )
    p.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory too")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    p.add_argument("--plot", type=Path, metavar="DIR", help="write PNG plots")
    p.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="exit with 1 if something is more than 5 %% slower than there"
    )
    p.add_argument("--list", action="store_true", help="list cases and peers")
    args = p.parse_args(argv)
    known = PASSES + DERIVATIVES
    unknown = [name for name in args.passes.split(",") if name not in known]
    if unknown:
        p.error(f"--passes: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    if args.threads < 1:
        p.error(f"--threads: expected at least 1, got {args.threads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: torch sees no GPU")
    try:
        args.cases = [from_shape(text) for text in args.shape]
        if args.peers == "none":
            args.peers = ""
        default = peers.QUICK if args.quick else peers.DEFAULT[args.device]
        args.chosen = peers.find(",".join(default) if args.peers is None else args.peers)
    except ValueError as error:
        p.error(str(error))
    cases = GPU_CASES if args.device == "cuda" else CASES
    if args.case or not args.shape:
        args.cases += [case for case in select(args.case, cases) if case.quick or not args.quick]
    if not args.cases:
        p.error(f"--case: nothing fits {args.case!r}; --list shows what there is")
    return args


def run(args: argparse.Namespace, console: Console) -> dict:
    """All cases asked for; returns what --json writes."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    memory.keep_freed_pages()
    budget = args.seconds or (0.1 if args.quick else 0.5)
    peers.OURS.missing(args.device)
    missing = {peer.name: reason for peer in args.chosen if (reason := peer.missing(args.device))}
    taking_part = [peers.OURS] + [peer for peer in args.chosen if peer.name not in missing]
    document = machine.describe(args.device, args.threads) | {"budget": budget, "missing": missing}
    report.head(document, console)
    document["ceilings"] = ceilings.survey(args.device, args.threads)
    report.ceilings(document["ceilings"], console)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    records = document["cases"] = []
    # no refresh thread: its work would count as the process's time
    with memory.Server() as server, Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=sum(len(passes_of(case, args)) for case in args.cases))
        for case in args.cases:
            records += run_case(case, taking_part, args, budget, server, progress, task)
    return document


def passes_of(case: Case, args: argparse.Namespace) -> list[str]:
    return [which for which in args.passes.split(",") if which in case.passes]


def run_case(case: Case, taking_part, args, budget: float, server, progress, task) -> list[dict]:
    tensors = inputs.make(case, args.device)
    truth = functools.cache(lambda: Truth(case, tensors))
    records = []
    for which in passes_of(case, args):
        progress.update(task, description=f"{case.name} {which}", refresh=True)
        if case.only_memory:
            record = blank(case, which, args.threads)
        else:
            record = measure(
                case, which, taking_part, args.device, args.threads, budget, tensors, truth, progress.refresh
            )
        if args.memory and which != "backward":
            for peer in taking_part:
                if peer.name in record["results"] or case.only_memory:
                    extra = server.extra(case, which, peer, args.device, args.threads)
                    record["results"].setdefault(peer.name, {})["memory"] = extra
        records.append(record)
        progress.advance(task)
    return records


def confirm(document: dict, old: dict, args: argparse.Namespace, console: Console) -> None:
    """Measures once more what seems slower than in the old results and keeps the better figure: machines have moods."""
    again = {change.name for change in compare.compare(old, document).slower()}
    if not again:
        return
    console.print(f"measuring {len(again)} case(s) again")
    second = run(
        argparse.Namespace(**vars(args) | {"cases": [c for c in args.cases if c.name in again], "memory": False}),
        console,
    )
    better = {(record["name"], record["pass"]): record for record in second["cases"]}
    for record in document["cases"]:
        other = better.get((record["name"], record["pass"]), {"results": {}})["results"].get("ours", {})
        mine = record["results"].get("ours", {})
        if other.get("fraction", 0) > mine.get("fraction", 0):
            mine |= {key: other[key] for key in ("seconds", "median", "pieces", "gflops", "fraction")}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if args.list:
        report.listing(GPU_CASES if args.device == "cuda" else CASES, peers.PEERS.values(), args.device, console)
        return 0
    old = json.loads(args.compare.read_text()) if args.compare else None
    document = run(args, console)
    if old:
        confirm(document, old, args, console)
    report.table(document, console)
    document["crossover"] = crossover.find(document["cases"])
    crossover.report(document["crossover"], console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.plot:
        from . import plots

        for path in plots.write(document, args.plot):
            console.print(f"wrote {path}")
    failed = any("ours" in record["failed"] for record in document["cases"])
    return max(compare.report(old, document, console) if old else 0, int(failed))


if __name__ == "__main__":
    sys.exit(main())
