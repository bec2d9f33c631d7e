"""The demo as a user meets it: it trains, can be interrupted, reports, and refuses bad texts in one line."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import context, data, demo, evaluate, train
from examples.config import Config
from examples.generate import Cache, attention_weights, forward_cached, generate, generate_without_cache
from examples.model import GPT, OURS, VARIANTS

ROOT = Path(__file__).parents[2]
SIZES = {"context": 32, "batch": 4, "layers": 2, "embed": 16, "heads": 2}
CONFIG = Config(steps=4, **SIZES)


def command(text: Path, out: Path, steps: int) -> list[str]:
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    return ["--text", str(text), "--out", str(out), "--steps", str(steps), *sizes]


def start(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *arguments],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    """Random letters: a bigram model with one added to each of its 65,536 counts is far from their entropy."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(random.Random(1).choices("abcdefgh", k=700)))
    return path


@pytest.fixture(scope="module")
def finished(letters, tmp_path_factory) -> Path:
    """The output folder of a demo that was never interrupted."""
    out = tmp_path_factory.mktemp("finished")
    process = start(command(letters, out, steps=60))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, ""), output + errors
    return out


def test_report_is_one_file_beside_its_pictures(finished):
    report = (finished / "report.html").read_text()
    pictures = {
        "beyond.png",
        "losses.png",
        "bits_per_byte.png",
        "speed.png",
        "cache.png",
        *(f"attention_{n}.png" for n in OURS),
    }
    assert {path.name for path in finished.glob("*.png")} == pictures
    assert all((finished / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert report.count('src="data:image/png;base64,') == report.count("<img ") == len(pictures)
    assert "<script" not in report and "http" not in report
    assert report.count("<li ") == report.count('<li class="ok">') == 7


def test_results_hold_what_the_issue_promises(finished):
    results = json.loads((finished / "results.json").read_text())
    assert all(len(losses) == 60 for losses in results["losses"].values())
    assert list(results["losses"]) == list(VARIANTS)
    assert results["losses"]["mha"] == pytest.approx(results["losses"]["torch-mha"], abs=1e-4)
    assert results["losses"]["gpt"] == pytest.approx(results["losses"]["torch-sdpa"], abs=1e-4)
    assert results["losses"]["gqa"] != pytest.approx(results["losses"]["mla"], abs=1e-2)
    assert max(results["bits_per_byte"].values()) == results["bits_per_byte"]["bigram"]
    # layers 2, heads 2 x 8, one kv head; latent 4, rope 4; fp32
    sizes = {"mha": 2 * 2 * 16 * 4, "gpt": 2 * 2 * 16 * 4, "gqa": 2 * 2 * 1 * 8 * 4, "mla": 2 * (4 + 4) * 4}
    assert results["cache_bytes_per_token"] == sizes
    within_and_beyond = results["bits_within_and_beyond_the_trained_length"]
    assert list(within_and_beyond) == list(context.LABELS)
    for name, size in sizes.items():
        assert Cache(GPT(VARIANTS[name], CONFIG), CONFIG).bytes_per_token() == size


def test_ctrl_c_and_resume_end_where_an_uninterrupted_run_ends(letters, finished, tmp_path):
    process = start(command(letters, tmp_path, steps=60))
    for line in process.stdout:
        if line.startswith("torch MHA") and "step    15/60" in line:  # the first variant is complete, the second not
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.count("\n") == 1 and "the same command goes on" in errors
    assert not (tmp_path / "report.html").exists()
    saved = {path.stem: len(torch.load(path)["losses"]) for path in (tmp_path / "checkpoints").glob("*.pt")}
    assert saved["mha"] == 60 and saved["torch-mha"] >= 15 and sum(saved.values()) < 60 * len(VARIANTS)

    process = start(command(letters, tmp_path, steps=60))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    for name, done in saved.items():
        lines = [line for line in output.splitlines() if line.startswith(f"{VARIANTS[name].label:<11} step")]
        assert lines[0].split()[-4:] == [f"{done}/60", "from", "the", "checkpoint"]
        assert (len(lines) == 1) == (done == 60)  # a finished variant is not trained again
    before, after = (json.loads((out / "results.json").read_text())["losses"] for out in (finished, tmp_path))
    for name in VARIANTS:
        assert after[name] == pytest.approx(before[name], abs=1e-5)


def test_a_model_that_has_not_learnt_is_said(letters, tmp_path, capsys):
    assert demo.main(command(letters, tmp_path, steps=1)) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "not below the bigram model's" in errors
    assert '<li class="failed">' in (tmp_path / "report.html").read_text()


def bad_texts(folder: Path) -> dict[str, Path]:
    (folder / "nothing" / ".git").mkdir(parents=True)
    (folder / "nothing" / ".git" / "config").write_text("words " * 100)
    (folder / "nothing" / "picture").write_bytes(b"\x89PNG\0\0" * 100)
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("x" * (2 * (CONFIG.context + 1) - 1))
    (folder / "binary").write_bytes(b"words" * 100 + b"\0")
    os.mkfifo(folder / "pipe")
    return {
        "no such file": folder / "missing.txt",
        "empty": folder / "empty.txt",
        "too short": folder / "short.txt",
        "binary": folder / "binary",
        "no readable text file": folder / "nothing",
        "neither a file nor a folder": folder / "pipe",
    }


def test_bad_texts_give_one_line(tmp_path, capsys):
    for words, path in bad_texts(tmp_path).items():
        assert demo.main(command(path, tmp_path / "out", steps=4)) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1, output
        assert words in output.err and str(path) in output.err
    assert not (tmp_path / "out").exists()


def test_bad_text_as_a_command(tmp_path):
    process = start(command(tmp_path / "missing.txt", tmp_path, steps=4))
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert errors == f"demo: {tmp_path / 'missing.txt'}: no such file or folder\n"


def test_other_wrong_input_gives_one_line(letters, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo.main(command(letters, tmp_path / "file", steps=4)) == 2
    assert demo.main([*command(letters, tmp_path, steps=4), "--heads", "3"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and str(tmp_path / "file") in errors[0] and "--heads 3" in errors[1]


def test_a_folder_is_read_in_sorted_order(tmp_path):
    for name, content in {
        "b/2": b"two",
        "b/10": b"ten",
        "a.txt": b"\xff\xfe any byte but 0",
        "c/d": b"\0",
        "d": b"last",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden").write_bytes(b"hidden")
    assert data.read_files(data.files_below(tmp_path)) == b"\xff\xfe any byte but 0tentwolast"


def test_shortest_text_and_held_out_windows(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 67)))
    text = data.load_text(path, context=32)
    assert (len(text.train), len(text.held_out)) == (33, 33)
    inputs, targets = data.held_out_windows(text.held_out, context=8, limit=2)  # 2 of the 4 windows
    assert inputs[:, 0].tolist() == [34, 50] and torch.equal(targets, inputs + 1)


def test_bigram_bits_by_hand():
    train_text, inputs, targets = (torch.tensor(list(s)) for s in (b"abab", b"aa", b"bc"))
    # a was followed by b twice, never by c: (2 + 1) / (2 + 256) and 1 / (2 + 256)
    expected = -(torch.tensor(3 / 258).log2() + torch.tensor(1 / 258).log2()) / 2
    bits = evaluate.bigram_bits_per_byte(train_text.to(torch.uint8), inputs[None], targets[None])
    assert bits == pytest.approx(expected.item())


@pytest.fixture(params=OURS)
def model(request) -> GPT:
    torch.manual_seed(0)
    model = GPT(VARIANTS[request.param], CONFIG)
    for weight in model.parameters():  # far from the start, where all bytes are equally likely
        weight.data += 0.3 * torch.randn_like(weight)
    return model


def test_generating_with_a_cache_equals_recomputing(model):
    prompt = b"def attention("
    text, cache = generate(model, CONFIG, prompt, CONFIG.context - len(prompt))
    assert text == generate_without_cache(model, prompt, CONFIG.context - len(prompt))
    assert len(set(text)) > 4 and cache.length == CONFIG.context - 1

    tokens = torch.tensor([list(prompt + text)])
    cache = Cache(model, CONFIG)
    pieces = [forward_cached(model, tokens[:, :9], cache)]
    pieces += [forward_cached(model, tokens[:, i : i + 1], cache) for i in range(9, CONFIG.context)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-4, rtol=1e-4)


def test_attention_maps_are_the_weights_of_the_layer(model):
    text = b"for key in keys:"
    first = model.blocks[0]
    x = first.attention_norm(model.embed(torch.tensor([list(text)])))
    _, kept = first.attention.project(x, start=0)
    _, value = first.attention.keys_values(kept)
    weights = attention_weights(model, text)
    torch.testing.assert_close(first.attention.merge(weights[0] @ value), first.attention(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, len(text)))
    assert weights.triu(1).count_nonzero() == 0


def test_beyond_the_trained_length():
    """Unchanged frequencies within the trained length are the model itself; the tables come back afterwards."""
    model, held_out = GPT(VARIANTS["gqa"], CONFIG), torch.randint(1, 256, (400,), dtype=torch.uint8)
    before = model.blocks[0].attention.cos
    found = context.measure(model, CONFIG, held_out)
    assert found.factor == 4 and model.blocks[0].attention.cos is before
    inputs, targets = data.held_out_windows(held_out, 4 * CONFIG.context, context.WINDOWS)
    expected = evaluate.bits_per_byte(model, inputs[:, : CONFIG.context], targets[:, : CONFIG.context])
    assert found.means()["default"][0] == pytest.approx(expected, rel=1e-5)
    assert all(bits.shape == (128,) and bits.isfinite().all() for bits in found.bits.values())
    assert len({tuple(bits.tolist()) for name, bits in found.bits.items() if name != "dynamic"}) == 6
    torch.testing.assert_close(found.bits["dynamic"], found.bits["ntk"])  # at this one length
    assert context.measure(model, CONFIG, held_out[:70]).factor == 2
    assert context.measure(model, CONFIG, held_out[:64]) is None


class Quiet:
    """Stands in for the progress bars and keeps the notes."""

    def __init__(self):
        self.notes = []

    def begin(self, name, done): ...

    def step(self, name, done, loss): ...

    def note(self, text):
        self.notes.append(text)


def test_a_damaged_or_foreign_checkpoint_starts_over(letters, tmp_path):
    text = data.load_text(letters, CONFIG.context)
    _, losses = train.train("mha", CONFIG, text, tmp_path, Quiet())
    path = tmp_path / "mha.pt"
    path.write_bytes(path.read_bytes()[:1000])
    progress = Quiet()
    assert train.train("mha", CONFIG, text, tmp_path, progress)[1] == losses
    assert len(progress.notes) == 1 and "damaged" in progress.notes[0]
    other = Config(**{**SIZES, "steps": 4, "seed": 2})
    assert train.train("mha", other, text, tmp_path, progress)[1] != losses
    assert len(progress.notes) == 2 and "other settings" in progress.notes[1]
