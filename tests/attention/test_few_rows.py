"""A few query rows: by decode's kernels where these have what the call asks for, and the right numbers."""

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.support.options_cases import OPTIONS, check, compatible, make
from tests.support.testing import DTYPES, check_attention, pairs, poison_memory, random_tensor

ROWS = (1, 3, 4, 8)


def kernel(tensors, arguments):
    given = {name: x for name, x in arguments.items() if name != "dropout_seed"}
    return attnjourney.explain(*tensors, **given)["forward"]["kernel"]


def few_rows(dtype):
    """The most rows that go to decode's kernels here; 0 on a CPU whose kernels work on single numbers."""
    q, k = torch.zeros(1, 1, 16, 8, dtype=dtype), torch.zeros(1, 1, 9, 8, dtype=dtype)
    return max((n for n in range(1, 17) if kernel((q[:, :, :n], k, k), {}) == "decode"), default=0)


@pytest.mark.parametrize("row", pairs(name=list(OPTIONS), dtype=DTYPES, rows=ROWS), ids=str)
def test_every_option(row):
    q, k, v, arguments = make([row["name"]], row["dtype"], q_len=row["rows"], kv_len=40)
    expected = "decode" if row["name"] != "dropout" and row["rows"] <= few_rows(row["dtype"]) else "tiled"
    assert kernel((q, k, v), arguments) == expected
    poison_memory()
    check((q, k, v), arguments)


@pytest.mark.parametrize("batch, lengths", [(0, None), (1, torch.tensor([0]))], ids=str)
def test_without_a_row_there_is_nothing_to_do(batch, lengths):
    query, key = torch.zeros(batch, 2, 1, 8), torch.zeros(batch, 2, 9, 8)
    assert attnjourney.explain(query, key, key, query_lengths=lengths)["forward"]["items"] == 0
    assert attnjourney.attention(query, key, key, query_lengths=lengths).shape == query.shape


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "dropout"])
def test_options_together(name):
    names = list(OPTIONS)
    for other in names[names.index(name) + 1 :]:
        if compatible([name, other]) and other != "dropout":
            q, k, v, arguments = make([name, other], q_len=3, kv_len=11)
            check((q, k, v), arguments, label=other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_are_those_of_the_derivatives(dtype):
    """Scores that round by more than 0: the weights of the backward, which adds in another order, still sum to 1."""
    factor = {torch.float64: 1e6, torch.float32: 1e3}.get(dtype, 100.0)
    q, k, v = (random_tensor((1, 4, n, 64), dtype, s, outliers=False) for s, n in enumerate((3, 40, 40)))
    k[:, :, 20:] = k[:, :, :20]  # no row has one key alone
    k[:, :, 20:, ::2] *= 1 + 4 * torch.finfo(dtype).eps
    q, k, v = q * factor, k * factor, v.requires_grad_()
    for heads in (4, 2):
        out = attnjourney.attention(q, k[:, :heads], v[:, :heads], enable_gqa=True)
        (weights,) = torch.autograd.grad(out.double().sum(), v)
        sums = weights[:, :heads].double().sum(2)
        torch.testing.assert_close(
            sums, torch.full_like(sums, 3.0 * 4 / heads), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=0
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_chunks_of_keys(dtype):
    q, k, v = (random_tensor((2, h, n, 64), dtype, s) for s, (h, n) in enumerate(((4, 2), (2, 700), (2, 700))))
    check_attention(q, k, v, enable_gqa=True, key_lengths=torch.tensor([700, 3]), window_size=(-1, 650))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("long", (0, 40))
def test_packed_sequences(dtype, long):
    """Of 1, no, 3, `long` and 2 rows, with rows of nobody behind them: the same bits as alone, by the same kernels."""
    offsets_q = torch.tensor([0, 1, 1, 4, 4, 6]) + long * torch.tensor([0, 0, 0, 0, 1, 1])
    offsets_k = torch.tensor([0, 5, 9, 9, 40, 61], dtype=torch.int32)
    q, k, v = (random_tensor((n, 4, 16), dtype, s) for s, n in enumerate((7 + long, 63, 63)))
    options = dict(is_causal=True, causal_alignment="bottom_right", return_lse=True)
    poison_memory()
    out, lse = attnjourney.varlen_attention(q, k, v, offsets_q, offsets_k, **options)
    for i in range(5):
        rows, keys = slice(offsets_q[i], offsets_q[i + 1]), slice(offsets_k[i], offsets_k[i + 1])
        one = [x[part].transpose(0, 1) for x, part in ((q, rows), (k, keys), (v, keys))]
        alone, alone_lse = attnjourney.attention(*one, **options)
        assert torch.equal(out[rows].transpose(0, 1), alone) and torch.equal(lse[:, rows], alone_lse)
    assert (out[-1] == 0).all() and (lse[:, -1] == -torch.inf).all()


def test_derivatives_in_a_direction():
    names = ["causal", "softcap", "sinks", "mask", "key_lengths"]
    q, k, v, arguments = make(names, q_len=3, kv_len=20)
    inputs, tangents = (q, k, v), tuple(random_tensor(x.shape, x.dtype, 40) for x in (q, k, v))

    def of(function):
        return torch.func.jvp(lambda *x: function(*x, **arguments), inputs, tangents)

    for got, expected in zip(of(attnjourney.attention), of(reference.attention)):
        torch.testing.assert_close(got, expected)


def test_bits_do_not_depend_on_threads():
    q, k, v = (random_tensor((2, 4, n, 64), torch.float32, s) for s, n in enumerate((2, 3000, 3000)))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attnjourney.attention(q, k, v, return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
