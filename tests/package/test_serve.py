"""Continuous batching over the demo's models: tokens of each request alone, memory of the pool, requests that leave."""

import threading

import pytest
import torch

from attnjourney.ops import _shared_prefix
from examples import serve, speculate
from examples.config import Config
from examples.generate import generate_without_cache
from examples.model import GPT, OURS, VARIANTS
from examples.served_models import ServedGPT
from examples.serving import Engine

CONFIG = Config(context=64, layers=2, embed=32, heads=4, seed=3)
COMMON = b"what they all begin with, more than one block of it: "


@pytest.fixture(autouse=True)
def short_prefixes_count(monkeypatch):
    monkeypatch.setattr(_shared_prefix, "LEAST", 8)


def model_of(name="gqa"):
    """In float64, in which two orders of addition choose the same token."""
    model = GPT(VARIANTS[name], CONFIG).double().eval()
    with torch.no_grad():
        for weight in model.parameters():  # an untrained one would repeat itself
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.2)
    return model


def engine_of(model, batch=3, num_blocks=None, **options):
    served = {n: options.pop(n) for n in ("dtype", "shared_prefix") if n in options}
    return Engine(ServedGPT(model, CONFIG, batch, block_size=8, num_blocks=num_blocks, **served), **options)


def prompts(count):
    """Some with a common beginning, some without; of 1 to 50 bytes."""
    return [list(COMMON[:40]) + [65 + i] * (i % 7 + 1) if i % 3 else list(range(90, 91 + 3 * i)) for i in range(count)]


def expected(model, prompt, count):
    return list(generate_without_cache(model, bytes(prompt), count))


def idle(engine):
    """Everything has come back: no row holds a block, and what is published can go."""
    cache = engine.model.caches[0]
    assert not engine.running and not engine.waiting
    assert (cache.block_table == -1).all() and (cache.lengths == 0).all()
    for each in engine.model.caches:
        each.evict()
    return all(each.free_blocks == engine.blocks for each in engine.model.caches)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("rows", (5, 64))
def test_tokens_are_those_of_each_request_alone(name, rows):
    model = model_of(name)
    engine = engine_of(model, rows=rows)
    wanted = [(prompt, 3 + i % 9) for i, prompt in enumerate(prompts(9))]
    requests = [engine.submit(prompt, count) for prompt, count in wanted]
    engine.run()
    assert [r.result(0) for r in requests] == [expected(model, prompt, count) for prompt, count in wanted]
    assert engine.adopted >= 3 * 40 and engine.preempted == 0
    assert idle(engine)


def test_without_sharing():
    model = model_of()
    engine = engine_of(model, share=False, shared_prefix=False)
    requests = [engine.submit(prompt, 4) for prompt in prompts(5)]
    engine.run()
    assert [r.result(0) for r in requests] == [expected(model, p, 4) for p in prompts(5)]
    assert engine.adopted == 0 and len(engine.model.caches[0].prefixes) == 0


@pytest.mark.parametrize("name", ("gqa", "mla"))
def test_a_pool_that_is_too_small_for_all_starts_some_again(name):
    """8 blocks for sequences of up to 60 tokens: never more memory, and the same tokens."""
    model = model_of(name)
    engine = engine_of(model, num_blocks=8)
    pools = [cache.key.data_ptr() for cache in engine.model.caches]
    wanted = [(list(range(i, i + 9 + i)), 40 - 3 * i) for i in range(6)]
    requests = [engine.submit(*request) for request in wanted]
    engine.run()
    assert [r.result(0) for r in requests] == [expected(model, *request) for request in wanted]
    assert engine.preempted > 0
    assert pools == [cache.key.data_ptr() for cache in engine.model.caches]
    assert idle(engine)


def test_caches_of_bytes():
    """Shared blocks are bytes, too: the tokens are those of the same bytes without sharing."""
    model = model_of().float()
    results = []
    for share in (True, False):
        engine = engine_of(model, dtype=torch.int8, share=share, shared_prefix=share)
        requests = [engine.submit(prompt, 4) for prompt in prompts(5)]
        engine.run()
        results.append([r.result(0) for r in requests])
    assert results[0] == results[1]


def test_cancelled_requests_give_their_blocks_back():
    model = model_of()
    engine = engine_of(model, batch=2, share=False)
    first, second, third = (engine.submit(list(range(i, i + 20)), 30) for i in range(3))
    for _ in range(4):
        engine.step()
    assert len(engine.running) == 2 and engine.model.caches[0].free_blocks < engine.blocks - 4
    first.cancel()
    third.cancel()  # waits
    engine.step()
    assert first.done and third.done and third.result(0) == [] and not second.done
    assert first.result(0) == expected(model, first.prompt, 30)[: len(first.tokens)] and len(first.tokens) >= 3
    assert engine.model.caches[0].free_blocks == engine.blocks - 3  # 24 tokens of the second
    engine.run()
    assert second.result(0) == expected(model, second.prompt, 30)
    assert idle(engine)


def test_a_stop_token_and_a_stream_from_another_thread():
    model = model_of()
    stop = threading.Event()
    engine = engine_of(model)
    worker = threading.Thread(target=engine.serve, args=(stop, 0.001))
    worker.start()
    try:
        whole = expected(model, prompts(1)[0], 20)
        assert list(engine.submit(prompts(1)[0], 20)) == whole
        last = whole[7]
        request = engine.submit(prompts(1)[0], 20, stop=last)
        assert request.result(60) == whole[: whole.index(last) + 1]
    finally:
        stop.set()
        worker.join(60)


def test_an_error_reaches_everybody_who_waits():
    engine = engine_of(model_of())
    requests = [engine.submit([1, 2, 3], 4) for _ in range(5)]
    engine.step()
    engine.model.model.head = None
    with pytest.raises(TypeError):
        engine.step()
    for request in requests:
        with pytest.raises(TypeError):
            request.result(0)
    assert idle(engine)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("drafter", ("repeats", "the answer and noise", "nothing"))
def test_speculation_changes_no_token(name, drafter):
    model = model_of(name)
    served = ServedGPT(model, CONFIG, 1, block_size=8)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    answer = prompt + expected(model, prompt, 56)  # to the end of the context

    def knows(tokens):
        """A path of three right tokens and a wrong one, beside two wrong ones."""
        ahead = answer[len(tokens) : len(tokens) + 3]
        wrong = [(token + 1) % 256 for token in ahead]
        parents = [-1, 0, *range(0, len(ahead)), *[0] * len(wrong)]
        nodes = [tokens[-1], 7, *ahead, *wrong]
        parents[2 : 2 + len(ahead)] = [0, *range(2, 1 + len(ahead))][: len(ahead)]
        return nodes, parents

    draft = {"repeats": speculate.repeats, "the answer and noise": knows, "nothing": lambda t: (t[-1:], [-1])}[drafter]
    tokens, calls = speculate.speculate(served, prompt, 56, draft)
    assert tokens == answer[8:]
    assert calls == {"nothing": 56, "the answer and noise": 1 + 14}.get(drafter, calls) <= 56
    for cache in served.caches:
        assert (cache.block_refs <= 1).all() and int(cache.block_refs.sum()) == -(-int(cache.lengths[0]) // 8)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e.submit([], 1), "prompt: expected at least one token, got none"),
        (lambda e: e.submit([1] * 60, 5), "count: expected from 1 to 4 tokens after a prompt of 60"),
        (lambda e: e.submit([1], 0), "got 0"),
        (lambda e: Engine(e.model, rows=2), "rows: expected at least 3, one for each sequence, got 2"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(engine_of(model_of()))


def test_the_command(capsys):
    sizes = ["--context", "64", "--layers", "1", "--embed", "16", "--heads", "2", "--prompt", "24", "--shared", "16"]
    assert serve.main(["--model", "gqa", "--requests", "3", "--new", "4", *sizes]) == 0
    out = capsys.readouterr().out
    assert "continuous batching" in out and "one by one" in out and "tokens/s" in out
    assert serve.main(["--model", "gqa", "--prompt", "64", "--context", "64"]) == 2
