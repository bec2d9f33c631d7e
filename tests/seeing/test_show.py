"""python -m attnjourney.show, the model it reads and the demo's checkpoints."""

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnjourney
from attnjourney.demo import byte_gpt, show
from examples import data, train
from examples.config import Config
from examples.generate import attention_weights
from examples.model import VARIANTS

ROOT = Path(__file__).parents[2]
CONFIG = Config(steps=3, context=32, batch=4, layers=2, embed=16, heads=2)


class Quiet:
    def begin(self, name, done): ...

    def step(self, name, done, loss): ...


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The folder of a demo that has trained every variant, three steps each."""
    folder = tmp_path_factory.mktemp("demo-output")
    (folder / "letters.txt").write_text("".join(random.Random(1).choices("abcdefgh", k=700)))
    text = data.load_text(folder / "letters.txt", CONFIG.context)
    (folder / "checkpoints").mkdir()
    for name in VARIANTS:
        model, _ = train.train(name, CONFIG, text, folder / "checkpoints", Quiet())
    return folder


def page_data(path: Path) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text())[1])


def note(path: Path) -> str:
    return re.search(r'<p class="note">(.*?)</p>', path.read_text())[1]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_demos_checkpoints_are_the_same_models_here(demo, name):
    state = torch.load(demo / "checkpoints" / f"{name}.pt", weights_only=True)
    from examples.model import GPT

    original = GPT(VARIANTS[name], CONFIG)
    original.load_state_dict(state["model"])
    model, losses = byte_gpt.load(demo / "checkpoints" / f"{name}.pt")
    text = b"for key in keys:"
    tokens = torch.tensor([list(text)])
    with torch.no_grad(), attnjourney.capture(model) as seen:
        torch.testing.assert_close(model(tokens), original(tokens), atol=1e-5, rtol=1e-5)
    assert losses == state["losses"] and len(seen) == CONFIG.layers
    if name in ("mha", "gpt", "gqa", "mla"):  # the others cannot be projected by hand
        expected = attention_weights(original, text)
        torch.testing.assert_close(torch.cat([r.weights for r in seen]), expected, atol=1e-5, rtol=1e-5)


def test_a_page_of_the_demo(demo, tmp_path, capsys, monkeypatch):
    out = tmp_path / "page.html"
    chosen = ["--text", "abc <b>é", "--variant", "gqa", "--layers", "1", "--heads", "0-1", "-o", str(out)]
    assert show.main(["--checkpoint", str(demo), *chosen]) == 0
    assert capsys.readouterr().out == f"{out}: 1 layers, 2 heads, 9 bytes of text\n"
    found = page_data(out)
    assert found["layers"] == [{"layer": 1, "heads": [0, 1]}]
    assert "".join(token["text"] for token in found["tokens"]) == "abc·<b>é₁é₂"
    assert note(out).startswith(
        "A byte-level GPT: 2 layers of 2 heads (GroupedQueryAttention). Trained for 3 steps, down to "
    )
    assert 'class="warning" role="note"' not in out.read_text()

    demo.rename(tmp_path / "demo-output")
    monkeypatch.chdir(tmp_path)
    try:
        assert show.main(["--checkpoint", "demo", "--text", "abc", "-o", "other.html"]) == 0
    finally:
        (tmp_path / "demo-output").rename(demo)
    assert note(tmp_path / "other.html").startswith("A byte-level GPT: 2 layers of 2 heads (CausalSelfAttention). ")


def test_without_a_checkpoint_a_model_is_trained_and_kept(tmp_path, capsys):
    out, kept = tmp_path / "page.html", tmp_path / "model.pt"
    assert show.main(["--steps", "2", "--save", str(kept), "--text", "x = 1", "-o", str(out)]) == 0
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("training a small model") and errors[1].startswith("trained in ")
    words = "Trained for 2 steps on the sources of Python&#x27;s standard library, down to "
    assert words in note(out) and " bits per byte." in note(out)

    model, losses = byte_gpt.load(kept)
    assert len(losses) == 2 and losses[0] == pytest.approx(math.log(256), abs=0.2)
    again = tmp_path / "again.html"
    assert show.main(["--checkpoint", str(kept), "--text", "x = 1", "-o", str(again)]) == 0
    assert page_data(again)["weights"] == page_data(out)["weights"]


def test_untrained_weights_are_called_so(tmp_path, capsys):
    assert show.main(["--steps", "0", "-o", str(tmp_path / "page.html")]) == 0
    assert '<p class="warning" role="note">These weights were never trained' in (tmp_path / "page.html").read_text()
    assert len(page_data(tmp_path / "page.html")["layers"]) == 4 and capsys.readouterr().err == ""


def test_a_picture(demo, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_bytes(b"abc\xff$\n")
    out = tmp_path / "maps.png"
    assert show.main(["--checkpoint", str(demo), "--file", str(tmp_path / "text"), "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_training_learns():
    model = byte_gpt.small()
    text = torch.frombuffer(bytearray(b"abc" * 200), dtype=torch.uint8)
    losses = byte_gpt.train(model, text, 12)
    assert losses[-1] < 0.5 * losses[0]


def spoil(what: str, state: dict) -> None:
    weights, config = state["model"], state["identity"]["config"]
    if what == "missing":
        del weights["blocks.1.mlp.0.weight"]
    elif what == "endless loss":
        state["losses"] = [10**400]
    elif what == "no width":
        weights["embedding.weight"] = torch.tensor(1.0)
    elif what == "complex":
        weights["head.weight"] = weights["head.weight"] * (1 + 1j)
    elif what == "stride 0":  # a model of 7 GiB out of 4 bytes
        weights["positions.weight"] = torch.zeros(1).expand(20_000_000, weights["embedding.weight"].shape[1])
    elif what == "one storage":
        weights.update({f"blocks.1.{n}": weights["embedding.weight"] for n in range(9)})
    elif what == "empty blocks":  # 50 MB each in memory, 4 bytes in the file
        weights.update({f"blocks.{n}.x": torch.zeros(1) for n in range(2, 1000)})
    else:
        config["heads"] = {"other heads": 3, "no heads": 0, "endless heads": math.inf}[what]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 half of it",
        {"model": {}},
        {"model": {}, "identity": {"config": {"heads": 2}}, "losses": []},
        {"model": {"embedding.weight": "x"}, "identity": {"config": {"heads": 2}}, "losses": []},
        [1, 2],
        "missing",
        "other heads",
        "no heads",
        "endless heads",
        "endless loss",
        "no width",
        "complex",
        "stride 0",
        "one storage",
        "empty blocks",
    ],
    ids=str,
)
def test_what_is_no_checkpoint(demo, tmp_path, capsys, content):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        state = torch.load(demo / "checkpoints" / "gqa.pt", weights_only=True)
        if isinstance(content, str):
            spoil(content, state)
        else:
            state = content
        torch.save(state, path)
    with pytest.raises(byte_gpt.CheckpointError, match=re.escape(str(path))):
        byte_gpt.load(path)
    assert show.main(["--checkpoint", str(path), "-o", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"show: {path}: not a checkpoint") and error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model": Harmful()}, tmp_path / "model.pt")
    with pytest.raises(byte_gpt.CheckpointError, match="UnpicklingError"):
        byte_gpt.load(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()


def test_wrong_input_is_one_line(demo, tmp_path, capsys):
    use = ["--checkpoint", str(demo)]
    for words, command in {
        "expected 1 to 512 bytes, got 0": ["--text", ""],
        "--text: expected 1 to 512 bytes, got 600": ["--text", "é" * 300],
        "text: expected at most the model's 32 bytes, got 33": [*use, "--text", "x" * 33],
        "--layers: expected numbers from 0 to 1, got 2": [*use, "--text", "x", "--layers", "0,2"],
        "--heads: expected numbers from 0 to 1, got 7": [*use, "--text", "x", "--heads", "7"],
        "expected a name that ends in .html or .png": ["-o", str(tmp_path / "page.pdf")],
        "No such file": ["--file", str(tmp_path / "missing")],
        "no gpt.pt in the folder": ["--checkpoint", str(tmp_path)],
        "does not exist": ["--checkpoint", str(tmp_path / "none.pt")],
        "--save: expected no --checkpoint": [*use, "--text", "x", "--save", "x.pt"],
        "No such file or directory": [*use, "--text", "x", "-o", str(tmp_path / "no" / "page.html")],
    }.items():
        assert show.main(command) == 2, command
        output = capsys.readouterr()
        assert output.out == "" and words in output.err and output.err.count("\n") == 1, output
    for command in (
        ["--layers", "x"],
        ["--layers", "1,1"],
        ["--heads", "3-1"],
        ["--steps", "-1"],
        ["--text", "a", "--file", "b"],
    ):
        with pytest.raises(SystemExit) as exit:
            show.main(command)
        assert exit.value.code == 2
    capsys.readouterr()


def test_as_a_command_of_what_is_installed(tmp_path):
    """The files that go into a wheel, alone: no examples/, and the page's template must be among them."""
    build = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(tmp_path),
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    command = [sys.executable, "-m", "attnjourney.show", "--steps", "1", "--text", "a b"]
    environment = {**os.environ, "ATTNJOURNEY_LIBRARY_DIR": str(ROOT / "attnjourney")}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "attention.html: 4 layers, 4 heads, 3 bytes of text\n"
    assert len(page_data(tmp_path / "attention.html")["tokens"]) == 3
