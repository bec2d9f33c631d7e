"""python -m benchmarks.models: every contestant has its figures, and ours are those of our operators."""

import json

import pytest
import torch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers", minversion="5")

from attnjourney.integrations import transformers as ours  # noqa: E402
from benchmarks import models  # noqa: E402


def test_every_namesake_has_its_cases():
    cases = list(models.cases())
    assert {case.model for case in cases} == set(models.MODELS)
    assert {case.batch for case in cases if case.work == "generate"} == {1, 8}
    assert len({case.name for case in cases}) == len(cases)


def test_a_case(tmp_path):
    threads = torch.get_num_threads()
    ours.calls.clear()
    try:
        assert models.main(["--case", "vit-fp32-train", "--turns", "1", "--json", str(tmp_path / "models.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    (record,) = json.loads((tmp_path / "models.json").read_text())["models"]
    assert set(record["results"]) == set(models.CONTESTANTS) and not record["refused"]
    assert all(result["tokens_per_second"] > 0 for result in record["results"].values())
    assert ours.calls["attention"] == 4  # two layers, to warm up and in a turn
