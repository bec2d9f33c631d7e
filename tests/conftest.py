"""What every run of the tests shares: which are slow, which are quick, and what the quick ones have to call.

The layers of the suite, from a second to the whole:

    pytest tests/cache/test_decode.py   what belongs to a change; folders are those of the library
    make test-quick                     some cases of every operator, dtype, option, derivative, cache and module
    pytest -n auto -m "not slow"        everything but the emulator, the browser, the demo and the like
    make test                           everything, with the CUDA library where nvcc is; of the emulator what is not
                                        proved as it is (tests/emulator/host/proved.py), with EMULATOR=all all of it
    make test-torch                     the `smoke` tests, with another torch
    make gpu                            the `cuda` tests and more, where a GPU is

`quick` is chosen in tests/support/quick.py. A run that holds all quick tests fails if these have not called everything
there is: see the end of this file.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.emulator.host import proved
from tests.support import quick

TESTS = Path(__file__).parent
SLOW = [  # longest first
    *(f"emulator/test_{name}.py" for name in ("attention", "options", "fp16x2", "full_sm90", "fp16x2_backward")),
    *(f"emulator/test_{name}.py" for name in ("decode", "latent", "small", "linear", "nan", "full_sm90_backward")),
    *(f"emulator/test_{name}.py" for name in ("fp32", "jvp", "large_numbers", "caches", "blocks", "weights", "rows")),
    *(f"emulator/test_{name}.py" for name in ("fp32_blocks", "fp8", "wide", "tile_kinds", "backward_jvp", "offsets")),
    "emulator/test_clusters.py",
    "cuda/test_build.py",
    "package/test_demo.py",
    "package/test_isa.py",
    "seeing/test_page.py",
    "seeing/test_show.py",
    "seeing/test_capture_models.py",
    "package/test_benchmarks.py",
    "package/test_journey.py",
    "attention/test_fuzz.py",
    "options/test_options_fuzz.py",
    "layers/test_multihead_module_info.py",
    "layers/test_multihead_opinfo.py",
    "integrations/test_transformers_sweep.py",
    "integrations/test_onnx.py",
]
# processes of xdist take the files in this order, then the short ones, so that all of them end at about one time
ORDER = ["kernels/test_kernels.py", *SLOW, "attention/test_derivatives.py", "cache/test_cached_layers.py"]
ORDER += [f"attention/test_{name}.py" for name in ("block_mask", "attention_forward", "torch_integration")]
SEEN, RAN, QUICK_ITEMS = pytest.StashKey[set](), pytest.StashKey[int](), pytest.StashKey[list]()
LACKING = pytest.StashKey[list]()


def _file(path) -> str:
    return Path(path).relative_to(TESTS).as_posix() if Path(path).is_relative_to(TESTS) else ""


def _left_out() -> frozenset[Path]:
    return proved.proved() if os.environ.get("ATTNJOURNEY_EMULATOR") == "changed" else frozenset()


def pytest_configure(config):
    config.stash[SEEN], config.stash[RAN], config.stash[QUICK_ITEMS] = set(), 0, []
    config.stash[LACKING] = []


def pytest_ignore_collect(collection_path, config):
    """With -m quick, files without quick tests are not even imported."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr == "quick" and is_test and _file(collection_path) not in quick.QUICK:
        return True
    return True if is_test and collection_path in _left_out() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = _file(item.path)
        cases.setdefault(f"{file}::{getattr(item, 'originalname', item.name)}", []).append(item)
        if file in SLOW:
            item.add_marker("slow")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    for name, own in cases.items():
        for i in quick.chosen(name, len(own)):
            own[i].add_marker("quick")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: ORDER.index(_file(item.path)) if _file(item.path) in ORDER else len(ORDER))
    config.stash[QUICK_ITEMS] = [item.nodeid for item in items if item.get_closest_marker("quick")]


# ---------------------------------------------------------------------------------------- what the quick tests called


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    if item.get_closest_marker("quick") is None:
        yield
        return
    item.config.stash[RAN] += 1
    with quick.recorded(item.config.stash[SEEN]):
        yield


def pytest_testnodedown(node, error):
    """A process of xdist is done: what it saw is added up here."""
    config, output = node.config, getattr(node, "workeroutput", {})
    config.stash[SEEN] |= set(output.get("quick_seen", ()))
    config.stash[RAN] += output.get("quick_ran", 0)
    config.stash[QUICK_ITEMS] = output.get("quick_items", config.stash[QUICK_ITEMS])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    stash = session.config.stash
    if hasattr(session.config, "workeroutput"):
        output = session.config.workeroutput
        output["quick_seen"], output["quick_ran"] = sorted(stash[SEEN]), stash[RAN]
        output["quick_items"] = stash[QUICK_ITEMS]
        return
    whole = {item.split("::")[0].removeprefix("tests/") for item in stash[QUICK_ITEMS]} >= set(quick.QUICK)
    if not whole or stash[RAN] < len(stash[QUICK_ITEMS]):
        return
    stash[LACKING] = quick.missing(stash[SEEN])
    if stash[LACKING] and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if _left_out():
        count = f"{len(_left_out())} of {len(proved.tests())} files of the emulator"
        terminalreporter.write_line(f"{count} passed with what they are made of before (tests/emulator/proved.txt)")
    if config.stash[LACKING]:
        names = ", ".join(config.stash[LACKING])
        terminalreporter.write_line(f"FAILED: the quick tests (tests/support/quick.py) do not call: {names}", red=True)
