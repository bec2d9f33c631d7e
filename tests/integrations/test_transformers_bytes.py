"""Caches of bytes behind transformers: eager attention over the numbers that these bytes are, step by step."""

import pytest
import torch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", minversion="5")

from attnjourney.integrations import transformers as ours  # noqa: E402
from tests.support.transformers_models import build, rounded_cache  # noqa: E402

TOKENS = torch.randint(3, 64, (2, 84), generator=torch.Generator().manual_seed(2))
PIECES = (60, 5, 1, 1, 1, 16)  # a prompt, a piece, steps; the room of the first cache runs out


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    ours.calls.clear()


@torch.no_grad()
def logits(model, cache):
    rows, begin = [], 0
    for n in PIECES:
        positions = torch.arange(begin, begin + n).expand(2, n)
        rows.append(model(TOKENS[:, begin : begin + n], position_ids=positions, past_key_values=cache).logits)
        begin += n
    return torch.cat(rows, 1)


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn), ids=str)
@pytest.mark.parametrize(
    "name, operator, paged",
    [
        ("llama", "decode", False),
        ("llama", "decode", True),
        ("qwen3", "decode", False),
        ("deepseek_v3", "mla_decode", False),
    ],
)
def test_logits(name, operator, paged, dtype):
    """To a twentieth of what rounding changes, which is less than 0.2 of the logits (int8: 0.06)."""
    model = build(name, "eager", max_position_embeddings=128).eval()
    exact, rounded = (
        logits(model, transformers.DynamicCache(config=model.config)),
        logits(model, rounded_cache(model, dtype)),
    )
    cache = ours.cache(ours.use(model), paged=paged, block_size=16, dtype=dtype)
    got = logits(model, cache)
    assert ours.calls == {operator: 2 * len(PIECES)}
    assert 20 * (got - rounded).norm() < (rounded - exact).norm()
    assert (rounded - exact).norm() < (0.06 if dtype == torch.int8 else 0.2) * exact.norm()
    held = cache.layers[0].cache
    assert held.key.dtype == dtype and held.lengths.tolist() == [84, 84]


@pytest.mark.parametrize("paged", (False, True))
def test_beams(paged):
    model = build("llama", "eager").eval()
    options = dict(max_new_tokens=8, num_beams=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    prompt = TOKENS[:, :20]
    expected = model.generate(prompt, past_key_values=rounded_cache(model, torch.int8), **options)
    cache = ours.cache(ours.use(model), paged=paged, block_size=4, dtype=torch.int8)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)
    assert set(ours.calls) == {"decode"}


def test_others_get_the_numbers():
    model = build("llama", "eager").eval()
    for paged in (False, True):
        cache = ours.cache(model, paged=paged, block_size=4, dtype=torch.int8)
        got, expected = (logits(model, c) for c in (cache, rounded_cache(model, torch.int8)))
        torch.testing.assert_close(got, expected)


def test_what_is_refused():
    with pytest.raises(ValueError, match="dtype: expected None, torch.int8 or torch.float8_e4m3fn, got torch.float16"):
        ours.cache(build("llama", "eager"), dtype=torch.float16)
