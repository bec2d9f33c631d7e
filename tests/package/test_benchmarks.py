"""The benchmark's own logic: counts, inputs, comparison, files. How fast anything is, is not tested here."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import attnjourney

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import (  # noqa: E402
    blocks,
    cases,
    compare,
    crossover,
    files,
    functions,
    inputs,
    layers,
    measure,
    memory,
    options,
    peers,
    plots,
    readme,
    run,
)
from benchmarks.cases import CASES, Case, from_shape, select  # noqa: E402
from benchmarks.truth import Truth, _plain  # noqa: E402

FULL = [case for case in CASES if not (case.causal or case.mask or case.layer or case.function or case.option)]


def test_names_are_unique_and_every_figure_of_the_readme_has_its_case():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {*readme.CALLS.values(), *readme.LAYERS.values()} <= set(names)


def test_flops_are_those_pytorch_counts_where_every_pair_is_visible():
    # GQA counts as PyTorch counts it with repeated keys; meta tensors: nothing is computed
    for case in {(c.batch, c.heads, c.q_len, c.head_dim, c.v_head_dim): c for c in FULL}.values():
        shape = case.batch, case.heads
        q = torch.empty(*shape, case.q_len, case.head_dim, device="meta")
        k = torch.empty(*shape, case.kv_len, case.head_dim, device="meta")
        v = torch.empty(*shape, case.kv_len, case.v_head_dim, device="meta")
        with FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(q, k, v)
        assert case.flops("forward") == counter.get_total_flops(), case.name


def test_backward_flops_are_those_pytorch_counts_for_the_products():
    case = Case("x", "x", heads=3, q_len=40, kv_len=56, head_dim=16, v_head_dim=24)
    leaves = inputs.make(case).leaves()
    with FlopCounterMode(display=False) as counter:
        out = _plain(*leaves, causal=False)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    recomputed = 2 * case.heads * case.pairs * case.head_dim  # Q K^T again: the fused backward does not keep the scores
    assert case.flops("forward") == forward
    assert case.flops("backward") == counter.get_total_flops() + recomputed
    assert case.flops("both") == case.flops("forward") + case.flops("backward")


@pytest.mark.parametrize("layer", layers.LAYERS)
def test_layer_flops_are_those_pytorch_counts_for_the_products(layer):
    causal = layer != "mha"
    case = next(case for case in CASES if case.layer == layer).tiny()
    tensors = inputs.make(case).tensors
    with FlopCounterMode(display=False) as counter:
        layers.LAYERS[layer].compose(case, _plain, *tensors)
    pair = 2 * (case.head_dim + case.v_head_dim)
    hidden = case.batch * case.heads * (case.q_len * case.kv_len - case.pairs) * pair
    assert causal == (hidden > 0)
    assert case.flops("forward") == counter.get_total_flops() - hidden


@pytest.mark.parametrize(
    "causal, kv_len, mask", [(True, 20, ""), (True, 30, ""), (True, 10, ""), (False, 21, "padding")]
)
def test_pairs_are_the_visible_ones(causal, kv_len, mask):
    case = Case("x", "x", q_len=20, kv_len=kv_len, causal=causal, mask=mask)
    visible = torch.ones(case.q_len, case.kv_len, dtype=torch.bool)
    if case.causal:
        visible = visible.tril()
    if case.mask:
        visible = visible & inputs.make(case).mask[0, 0]
    assert case.pairs == visible.sum()


def test_pairs_of_blocks_and_windows_are_the_visible_ones():
    case = Case("x", "x", q_len=100, kv_len=70, mask="bigbird", extent=16)
    assert case.pairs == blocks.dense(case).sum() == inputs.make(case).mask.sum()
    case = Case("x", "x", heads=1, q_len=40, head_dim=4, function="longformer", extent=5)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    seen = ((i - j).abs() <= 5) | (j < functions.GLOBAL_TOKENS) | (i < functions.GLOBAL_TOKENS)
    assert functions.longformer_pairs(case) == seen.sum()
    assert case.flops("forward") == 2 * seen.sum() * 8


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("option", options.OPTIONS)
def test_pairs_of_options_are_the_visible_ones(option, causal):
    causal = causal and option in ("alibi", "ragged")
    case = Case("x", "x", 4, heads=3, q_len=64, extent=9, causal=causal, option=option)
    make = options.OPTIONS[option].mask
    mask = torch.ones(1, 1) if make is None else make(case, inputs.make(case).tensors[0])
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    assert case.pairs == visible.expand(4, 3, 64, 64).double().sum() / 12


def test_linear_flops_are_those_of_the_products_of_whole_chunks():
    """All but the products with the denominator, of which the diagonal blocks are half."""
    case = Case("x", "x", heads=3, q_len=4 * functions.CHUNK, head_dim=16, v_head_dim=24, function="linear")
    with FlopCounterMode(display=False) as counter:
        functions.FUNCTIONS["linear"].plain(case, *inputs.make(case).tensors)
    chunk, rows = functions.CHUNK, case.heads * case.q_len
    hidden = rows * (chunk - 1) * (case.head_dim + case.v_head_dim)
    assert case.flops("forward") == counter.get_total_flops() - hidden - rows * 2 * case.head_dim
    assert case.flops("backward") > 2 * case.flops("forward")


def test_the_crossover_lies_where_the_two_are_equal():
    def record(length, ratio, which="forward"):
        shape = {"dtype": "fp32", "q_len": length}
        return {"pass": which, "shape": shape, "results": {"softmax": {"ratio": ratio}} if ratio else {}}

    found = crossover.find([record(400, 2.0), record(100, 0.5), record(1600, None), record(200, 8, "backward")])
    assert found == [{"dtype": "fp32", "pass": "forward", "length": 200, "ratios": {100: 0.5, 400: 2.0}}]
    assert crossover.find([record(1, 2.0), record(2, 3.0)])[0]["length"] is None
    assert crossover.find([]) == []


@pytest.mark.parametrize("which", cases.DERIVATIVES)
def test_derivative_passes_agree_with_the_math_backend(which):
    case = next(case for case in CASES if which in case.passes and not case.only_memory).tiny()
    tensors = inputs.make(case)
    results = []
    for peer in (peers.OURS, peers.PEERS["sdpa-math"]):
        call = peer.build(case, tensors, which)
        with peer.context():
            results.append(call())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)  # the wiring alone
    assert case.flops(which) > case.flops("forward")


SMALL = [case.tiny() for case in CASES if case.group != "dense" or case.q_len == 128]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_case_is_built_alike_for_ours_and_the_peers(case):
    tensors, forward_only = inputs.make(case), case.decode or case.function in ("fp8", "indexer")
    assert [t.stride(-1) for t in tensors.tensors] == [1] * len(tensors.tensors)
    if case.layout != "bhnd":
        assert not any(t.is_contiguous() for t in tensors.tensors[:3])
    for peer in (peers.OURS, *map(peers.PEERS.get, ("sdpa", "sdpa-math", "mha", "plain", "parts"))):
        try:
            calls = [
                peer.build(case, tensors, which) for which in cases.PASSES if which in case.passes or not forward_only
            ]
        except peers.Skip:
            assert peer.name in ("mha", "plain", "parts") or case.function or case.option
            continue
        with peer.context():
            with torch.no_grad():
                out = calls[0]()
            gradients = [call() for call in calls[1:]]
        for grads in gradients:
            wanted = tensors.tensors[: 1 if case.frozen else None]
            assert [g.shape for g in grads] == [t.shape for t in wanted]
        if case.dropout:
            continue  # everyone has random numbers of his own
        # only the wiring is tested here, how exact our operators are elsewhere
        truth = Truth(case, tensors)
        eps = torch.finfo(case.torch_dtype).eps
        assert truth.error(out) <= 16 * eps * truth.out.abs().max()
        for grads in gradients:
            assert truth.error(grads) <= 16 * eps * max(g.abs().max() for g in truth.grads)


def test_the_truth_is_that_of_autograd_in_fp64_with_a_mask_that_hides():
    case = Case("x", "x", heads=4, kv_heads=2, q_len=700, kv_len=520, head_dim=8, mask="float-grad", causal=True)
    tensors = inputs.make(case)  # more rows than Truth takes at a time
    leaves = [t.double().requires_grad_() for t in tensors.tensors]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hidden = torch.ones(700, 520, dtype=torch.bool).triu(1)
        mask = leaves[3].masked_fill(hidden, -torch.inf)
        out = F.scaled_dot_product_attention(*leaves[:3], mask, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, tensors.grad.double())
    truth = Truth(case, tensors)
    assert truth.error(out) < 1e-12 and truth.error(grads) < 1e-12
    assert truth.error(out + 1e-3) > 9e-4


def test_a_shape_of_the_command_line_becomes_a_case():
    case = from_shape("2,8,2,16,32,64,48,causal,bf16")
    assert (case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len) == (2, 8, 2, 16, 32)
    assert (case.head_dim, case.v_head_dim, case.causal, case.torch_dtype) == (64, 48, True, torch.bfloat16)
    for wrong in ("1,2,3", "1,8,3,16,16,64,64", "1,8,8,16,16,64,x", "1,8,8,16,16,64,64,int8", "1,8,8,0,16,64,64"):
        with pytest.raises(ValueError, match="--shape: expected"):
            from_shape(wrong)


def test_patterns_select_by_group_part_and_wildcard():
    assert {case.group for case in select("masks")} == {"masks"}
    assert [case.name for case in select("fp32-d64-n512-causal")] == ["fp32-d64-n512-causal"]
    assert {case.name for case in select("layer-gqa,bf16-d64-*-full")} == {
        "layer-gqa", "layer-gqa-b1-n16", *(f"bf16-d64-n{n}-full" for n in (128, 512, 1024, 4096)),
    }  # fmt: skip
    assert select(None) == CASES and select("nothing") == []


def test_list_names_every_case_and_peer(capsys):
    assert run.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(case.name in shown for case in CASES) and all(name in shown for name in peers.PEERS)
    assert cases.PASSES == ("forward", "backward", "both")


@pytest.mark.parametrize("wrong", ["--peers nobody", "--passes up", "--case nothing", "--shape 1", "--threads 0"])
def test_wrong_arguments_are_named(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(wrong.split())
    assert stop.value.code == 2 and wrong.split()[0] in capsys.readouterr().err


def test_a_failure_of_ours_is_shown_and_ends_with_1(monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(type(peers.OURS), "build", fail)
    arguments = "--shape 1,1,1,8,8,8,8 --passes forward --peers sdpa --threads 1 --seconds 0.001 --no-memory"
    assert run.main(arguments.split()) == 1
    assert "ours failed in fp32-b1-h1.1-l8-s8-d8.8 forward: RuntimeError: broken" in capsys.readouterr().out


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A results file: three small cases, ours beside SDPA, through the command line."""
    path = tmp_path_factory.mktemp("results") / "new.json"
    names = "fp32-d64-n128-full", "fp32-b1-h8-n16-d64", "memory-n16384"
    small = [case.tiny() if case.only_memory else case for case in CASES if case.name in names]
    small = [Case(**{**vars(case), "only_memory": case.name.startswith("memory")}) for case in small]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CASES", small)
        patch.setattr(run, "select", lambda pattern, cases: small)
        arguments = f"--case x --peers sdpa,mha,zentorch --threads 1 --seconds 0.002 --json {path}"
        assert run.main(arguments.split()) == 0
    return json.loads(path.read_text())


def test_results_say_what_was_measured_where(document):
    assert document["finished"] and document["cpu"] and document["date"]
    assert document["threads"] == 1 and document["torch"] == torch.__version__
    assert document["isa"] in attnjourney.cpu_info()["built"] and document["ceilings"]["dram"] > 0
    assert "zentorch" in document["missing"] or "zentorch" in sys.modules
    timed = [record for record in document["cases"] if record["group"] != "memory"]
    assert [(r["name"], r["pass"]) for r in timed] == [
        (name, which) for name in ("fp32-d64-n128-full", "fp32-b1-h8-n16-d64") for which in cases.PASSES
    ]
    for record in timed:
        assert record["clock"] == "cpu" and record["ceilings"][record["ceiling"]] > 0 and not record["failed"]
        assert record["skipped"]["mha"] == "a layer, not an attention function"
        for result in record["results"].values():
            assert 0 < result["seconds"] <= result["median"] and 0 < result["fraction"] and result["error"] < 1e-4
            assert result["gflops"] == pytest.approx(record["flops"] / result["seconds"] / 1e9)
        assert record["results"]["ours"]["ratio"] == 1
    extra = [
        r["results"][name]["memory"] for r in document["cases"] if r["pass"] != "backward" for name in ("ours", "sdpa")
    ]
    assert all(0 <= size < 64 << 20 for size in extra)


def test_a_run_that_is_cut_keeps_its_rows_and_is_finished_by_another(tmp_path, monkeypatch, capsys):
    path, table = tmp_path / "new" / "x.json", tmp_path / "new" / "x.md"
    arguments = "--shape 1,1,1,8,8,8,8 --peers sdpa-math --threads 1 --seconds 0.0001 --no-memory --markdown".split()
    arguments += [str(table), "--json", str(path)]
    monkeypatch.setattr(run.ceilings, "survey", lambda device, threads: {})
    monkeypatch.setattr(run.machine, "git", lambda *args: "")
    measured = run.measure

    def cut(case, which, *rest):
        if which == "backward":
            raise KeyboardInterrupt
        return measured(case, which, *rest)

    monkeypatch.setattr(run, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        run.main(arguments)
    document = json.loads(path.read_text())
    assert not document["finished"] and [record["pass"] for record in document["cases"]] == ["forward"]
    text = table.read_text()
    assert "The run did not finish." in text and text.count("| fp32-b1") == 1 and "| sdpa-math |" in text
    monkeypatch.setattr(run, "measure", measured)
    assert run.main(arguments[:2] + ["--passes", "backward", *arguments[2:], "--append"]) == 0
    document = json.loads(path.read_text())  # of two runs, of which one was cut
    assert not document["finished"] and [record["pass"] for record in document["cases"]] == ["forward", "backward"]
    assert document["command"].count("-m benchmarks.run") == 2

    monkeypatch.setattr(type(peers.PEERS["sdpa-math"]), "build", lambda *args: 1 / 0)
    assert run.main(arguments[:2] + ["--passes", "forward", *arguments[2:]]) == 0
    document = json.loads(path.read_text())
    assert document["finished"] and [record["pass"] for record in document["cases"]] == ["forward"]
    text = table.read_text()
    assert "did not finish" not in text and "- sdpa-math failed in fp32-b1-h1.1-l8-s8-d8.8 forward: ZeroDiv" in text
    assert run.main(arguments[:2] + ["--passes", "backward", *arguments[2:], "--append"]) == 0
    assert json.loads(path.read_text())["finished"] and table.read_text().count("| fp32-b1") == 2
    assert {file.name for file in path.parent.iterdir()} == {"x.json", "x.md"}  # and no half ones
    path.write_text(json.dumps(document | {"torch": "1.0"}))
    with pytest.raises(SystemExit, match="--append: .* has results of torch 1.0, this run is of"):
        run.main([*arguments, "--append"])
    with pytest.raises(TypeError):
        files.write(table, None)
    assert table.read_text().count("| fp32-b1") == 2


def test_a_deterministic_case_runs_in_that_mode_and_nothing_else_does(monkeypatch):
    seen, of_ceilings = [], []
    monkeypatch.setattr(
        measure.ceilings,
        "for_case",
        lambda *args: ("fma", {"fma": lambda: of_ceilings.append(torch.are_deterministic_algorithms_enabled()) or 1e9}),
    )

    class Watcher(peers.Peer):
        name = "watcher"

        def build(self, case, tensors, which):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return lambda: seen.append(torch.are_deterministic_algorithms_enabled())

    for deterministic in (True, False):
        case = Case("x", "x", 1, 1, q_len=8, head_dim=8, check=False, deterministic=deterministic)
        measure.measure(case, "forward", [Watcher()], "cpu", 1, 1e-4, inputs.make(case), None)
        assert len(seen) >= 2 and set(seen) == {deterministic}
        assert ("deterministic" in case.shape()) == deterministic  # older files are compared by shapes
        seen.clear()
    assert of_ceilings and not any(of_ceilings)  # a matrix product of cuBLAS would be refused
    assert not torch.are_deterministic_algorithms_enabled()


FLASH = [  # of flash-attn's own functions over ours: the peers' layout, options and alignment
    Case("x", "x", 2, 4, 2, q_len=24, head_dim=16, dtype="bf16", causal=True),
    Case("x", "x", 2, 4, q_len=24, head_dim=16, dtype="fp16", option="alibi", deterministic=True),
    Case("x", "x", 2, 4, q_len=24, head_dim=16, dtype="bf16", option="window", extent=5, causal=True),
    Case("x", "x", 2, 4, 2, q_len=1, kv_len=40, head_dim=16, dtype="bf16", decode="dense"),
]


@pytest.mark.parametrize("case", FLASH, ids=lambda case: case.option or case.decode or "causal")
def test_flash_attn_is_called_rightly(case, monkeypatch):
    from attnjourney.integrations import flash_attn

    tensors = inputs.make(case)
    truth = Truth(case, tensors)
    eps = 16 * torch.finfo(case.torch_dtype).eps
    for name, package in (("fa2", "flash_attn"), ("fa3", "flash_attn_interface")):
        monkeypatch.setitem(sys.modules, package, flash_attn)
        peer = peers.PEERS[name]
        assert peer.missing("cuda") is None and peer.missing("cpu") == "not on cpu"
        if case.option == "alibi" and name == "fa3":
            with pytest.raises(peers.Skip, match="no alibi"):
                peer.build(case, tensors, "forward")
            continue
        with torch.no_grad():
            assert truth.error(peer.build(case, tensors, "forward")()) <= eps * truth.out.abs().max()
        if not case.decode:
            grads = peer.build(case, tensors, "backward")()
            assert truth.error(grads) <= eps * max(g.abs().max() for g in truth.grads)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="fp32"), "16-bit"), (dict(mask="padding"), "no padding"), (dict(option="sinks"), "no sinks"),
        (dict(v_head_dim=8), "head sizes"), (dict(decode="paged"), "no such cache"),
        (dict(causal=True, kv_len=30), "aligned"), (dict(layer="mha"), None), (dict(function="linear"), "softmax"),
    ],
)  # fmt: skip
def test_what_flash_attn_does_not_do_is_skipped(change, message, monkeypatch):
    from attnjourney.integrations import flash_attn

    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    case = Case("x", "x", **{"heads": 2, "q_len": 8, "head_dim": 16, "dtype": "bf16", **change})
    if message is None:
        peers.PEERS["fa2"].build(case, inputs.make(case), "both")()
        return
    with pytest.raises(peers.Skip, match=message):
        peers.PEERS["fa2"].build(case, inputs.make(case), "forward")


def test_plots_are_written(document, tmp_path):
    written = plots.write(document, tmp_path)
    assert [path.name for path in written] == ["speed_forward.png", "speed_backward.png", "speed_both.png", "ratio.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_the_crossover_is_printed_saved_and_drawn(tmp_path, monkeypatch, capsys):
    small = [
        dataclasses.replace(case.tiny(), q_len=n, kv_len=n) for case in select("linear-fp32-n128") for n in (16, 24)
    ]
    monkeypatch.setattr(run, "select", lambda pattern, cases: small)
    path = tmp_path / "new.json"
    arguments = "--case x --peers plain,softmax --passes forward,backward --threads 1 --seconds 0.002 --no-memory"
    assert run.main([*arguments.split(), "--json", str(path), "--plot", str(tmp_path)]) == 0
    document = json.loads(path.read_text())
    assert [(x["dtype"], x["pass"]) for x in document["crossover"]] == [("fp32", "forward"), ("fp32", "backward")]
    assert all(list(x["ratios"]) == ["16", "24"] for x in document["crossover"])
    assert "linear attention beside softmax, fp32 forward:" in capsys.readouterr().out
    assert (tmp_path / "crossover.png").read_bytes().startswith(b"\x89PNG")


def test_compare_finds_what_got_slower_at_the_same_ceiling(document, tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"

    def change(factor, ceiling=1.0, **fields):
        other = copy.deepcopy(document)
        record = other["cases"][0]
        ours = record["results"]["ours"]
        ours["seconds"] *= factor
        record["ceilings"] = {name: value * ceiling for name, value in record["ceilings"].items()}
        ours["fraction"] /= factor * ceiling
        record.update(fields)
        new.write_text(json.dumps(other))
        return compare.main([str(old), str(new)])

    old.write_text(json.dumps(document))
    assert change(1) == 0
    assert change(1.04) == 0
    assert change(1.07) == 1
    assert "slower: fp32-d64-n128-full forward" in capsys.readouterr().out
    assert change(1.2, ceiling=1 / 1.2) == 0  # the whole machine was slower
    assert change(0.8) == 0
    assert "faster: fp32-d64-n128-full forward" in capsys.readouterr().out
    assert change(2, threads=2) == 0
    assert "not compared: fp32-d64-n128-full forward: threads was 1, is 2" in capsys.readouterr().out


def test_a_run_is_compared_and_what_seems_slower_is_measured_again(document, tmp_path, monkeypatch, capsys):
    old = copy.deepcopy(document)
    for record in old["cases"]:
        for result in record["results"].values():
            result["fraction"] = result.get("fraction", 0) * (100 if record["pass"] == "forward" else 0.01)
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    monkeypatch.setattr(run, "select", lambda pattern, cases: select("fp32-b1-h8-n16-d64"))
    arguments = f"--case x --peers none --threads 1 --seconds 0.002 --no-memory --compare {path}"
    assert run.main(arguments.split()) == 1
    shown = capsys.readouterr().out
    assert "measuring 1 case(s) again" in shown and "3 compared with" in shown and "1 slower by more than 5%" in shown


def test_the_tables_of_the_documents_come_from_the_results(document, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readme, "SHORT", ("fp32, (1, 8, 16, 64)",))
    results, short, page = tmp_path / "results", tmp_path / "README.md", tmp_path / "performance.md"
    results.mkdir()
    arguments = ["--readme", str(short), "--page", str(page), "--results", str(results)]
    for path in (short, page):
        path.write_text(f"before\n{readme.START}\n{readme.END}\nafter\n")
    assert readme.main(arguments) == 1  # no results yet
    (results / "b.json").write_text(json.dumps(document))
    older = {**document, "date": "2001-01-01T00:00:00Z", "cpu": "an older machine"}
    (results / "c.json").write_text(json.dumps(older))

    assert readme.main([*arguments, "--check"]) == 1
    assert "not up to date" in capsys.readouterr().err
    assert readme.main(arguments) == 0 and readme.main([*arguments, "--check"]) == 0
    text = short.read_text()
    assert text.startswith(f"before\n{readme.START}\nIn a cell: ") and text.endswith(f"{readme.END}\nafter\n")
    assert f"- A: {document['cpu']}" in text and "- B: an older machine" in text and "Peak memory beyond" not in text
    assert "| A: forward | A: backward | B: forward | B: backward |" in text and document["command"] in text
    text = page.read_text()
    assert "| fp32, (1, 8, 16, 64) |" in text and document["command"] in text and "Peak memory beyond" in text
    assert text.index(f"### {document['cpu']}") < text.index("### an older machine")
    assert readme.main(arguments) == 0 and page.read_text() == text

    (results / "c.json").write_text(json.dumps({**older, "finished": False}))
    assert readme.main(arguments) == 0 and page.read_text().count("The run did not finish.") == 1

    page.write_text("no markers\n")
    assert readme.main(arguments) == 1 and readme.START in capsys.readouterr().err


def test_memory_sees_scratch_that_malloc_gave_and_freed():
    # a peer that touches 48 MiB of malloc'ed memory, frees it, and returns an output of 16 MiB
    program = """
import ctypes, torch
from benchmarks import memory, peers
from benchmarks.cases import Case
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
class Greedy(peers.Peer):
    name = "greedy"
    def build(self, case, tensors, which):
        def call():
            size = 48 << 20 if case.q_len > 512 else 1 << 10
            block = libc.malloc(size)
            ctypes.memset(block, 1, size)
            libc.free(block)
            return torch.ones(4 << 20 if case.q_len > 512 else 1)
        return call
peers.PEERS["greedy"] = Greedy()
import dataclasses
case = dataclasses.asdict(Case("x", "x", heads=1, q_len=600))
question = {"case": case, "pass": "forward", "peer": "greedy", "threads": 1}
print(memory._extra(question), memory._extra(question))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=memory.ROOT)
    # the scratch is freed before the output is made: the peak is the larger of the two, less the output
    for extra in map(int, done.stdout.split()):
        assert 31 <= extra / 2**20 <= 34
