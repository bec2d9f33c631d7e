"""python -m benchmarks.run: measures cases and prints, saves, plots or compares them."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import ceilings, compare, crossover, files, inputs, machine, markdown, memory, peers, report
from .cases import CASES, DERIVATIVES, GPU_CASES, PASSES, Case, from_shape, select
from .measure import blank, measure
from .readme import CALLS, LAYERS
from .truth import Truth


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    p.add_argument(
        "--case",
        metavar="PATTERN",
        help="cases by name, group or wildcard, comma-separated (see --list); tables: the rows of the documents",
    )
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
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results, anew after each row")
    p.add_argument("--markdown", type=Path, metavar="FILE", help="write them as a table, anew after each row")
    p.add_argument(
        "--append", action="store_true", help="keep what is in the file of --json, but for what is measured again"
    )
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
    if args.append and not args.json:
        p.error("--append: expected --json FILE beside it")
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
    if args.case:
        args.case = re.sub(r"\btables\b", ",".join((*CALLS.values(), *LAYERS.values())), args.case)
    if args.case or not args.shape:
        args.cases += [case for case in select(args.case, cases) if case.quick or not args.quick]
    if not args.cases:
        p.error(f"--case: nothing fits {args.case!r}; --list shows what there is")
    return args


def save(document: dict, args: argparse.Namespace) -> None:
    if args.json:
        files.write_json(args.json, document)
    if args.markdown:
        files.write(args.markdown, markdown.table(document))


def begin(args: argparse.Namespace, missing: dict[str, str], budget: float) -> tuple[dict, bool]:
    """What --json writes, with the rows that stay, and whether all runs that it is of have finished before this one."""
    document = machine.describe(args.device, args.threads) | {"budget": budget, "missing": missing}
    document |= {"finished": False, "ceilings": {}, "cases": []}
    if not (args.append and args.json.exists()):
        return document, True
    try:
        old = files.read_to_append(args.json, document)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    again = {(case.name, which) for case in args.cases for which in passes_of(case, args)}
    document["cases"] = [record for record in old["cases"] if (record["name"], record["pass"]) not in again]
    document["missing"] = old["missing"] | missing
    document["command"] = f"{old['command']}; {document['command']}"
    return document, old.get("finished", True)


def run(args: argparse.Namespace, console: Console) -> dict:
    """All cases asked for; returns what --json writes, which is unfinished until here."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    memory.keep_freed_pages()
    budget = args.seconds or (0.1 if args.quick else 0.5)
    peers.OURS.missing(args.device)
    missing = {peer.name: reason for peer in args.chosen if (reason := peer.missing(args.device))}
    taking_part = [peers.OURS] + [peer for peer in args.chosen if peer.name not in missing]
    document, finished = begin(args, missing, budget)
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
    # no refresh thread: its work would count as the process's time
    with memory.Server() as server, Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=sum(len(passes_of(case, args)) for case in args.cases))
        for case in args.cases:
            for record in run_case(case, taking_part, args, budget, server, progress, task):
                document["cases"].append(record)
                save(document, args)
    document["finished"] = finished
    return document


def passes_of(case: Case, args: argparse.Namespace) -> list[str]:
    return [which for which in args.passes.split(",") if which in case.passes]


def run_case(case: Case, taking_part, args, budget: float, server, progress, task) -> Iterator[dict]:
    """A record for each pass."""
    tensors = inputs.make(case, args.device)
    truth = functools.cache(lambda: Truth(case, tensors))
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
        progress.advance(task)
        yield record


def confirm(document: dict, old: dict, args: argparse.Namespace, console: Console) -> None:
    """Measures once more what seems slower than in the old results and keeps the better figure: machines have moods."""
    again = {change.name for change in compare.compare(old, document).slower()}
    if not again:
        return
    console.print(f"measuring {len(again)} case(s) again")
    alone = {"memory": False, "json": None, "markdown": None, "append": False}
    cases = [case for case in args.cases if case.name in again]
    second = run(argparse.Namespace(**vars(args) | alone | {"cases": cases}), console)
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
    save(document, args)
    if args.plot:
        from . import plots

        for path in plots.write(document, args.plot):
            console.print(f"wrote {path}")
    own = {case.name for case in args.cases}
    failed = any("ours" in record["failed"] and record["name"] in own for record in document["cases"])
    return max(compare.report(old, document, console) if old else 0, int(failed))


if __name__ == "__main__":
    sys.exit(main())
