"""attnjourney.integrations.varlen_attn: torch.nn.attention.varlen on the CPU, beside the formula for each sequence."""

import pytest
import torch

varlen = pytest.importorskip("torch.nn.attention.varlen")

from attnjourney.integrations import varlen_attn as ours  # noqa: E402
from tests.support.flash_reference import reference  # noqa: E402
from tests.support.testing import random_tensor  # noqa: E402

CLOSE = dict(rtol=1e-11, atol=1e-12)
ENDS_Q, ENDS_K = [0, 5, 5, 12], [0, 8, 8, 19]
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in (ENDS_Q, ENDS_K))
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 1)]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Those of our operator: without them torch would have no kernel, or another one."""
    count, operator = [], ours.varlen_attention

    def counted(*args, **kwargs):
        count.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(ours, "varlen_attention", counted)
    return count


def packed(kv_heads=2, dtype=torch.float64):
    return [random_tensor((n, h, 8), dtype, i) for i, (n, h) in enumerate([(12, 4), (19, kv_heads), (19, kv_heads)])]


def expected_of(q, k, v, window, ends_k=ENDS_K, used=None):
    parts = []
    for i, (a, b) in enumerate(zip(ENDS_Q, ENDS_Q[1:])):
        c = ends_k[i]
        d = ends_k[i + 1] if used is None else c + used[i]
        parts.append(reference(q[a:b], k[c:d], v[c:d], window=window))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], -1)


@pytest.mark.parametrize("window", WINDOWS)
def test_values_and_gradients(window, calls):
    inputs = [x.requires_grad_() for x in packed()]
    options = dict(window_size=window, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True))
    out, lse = varlen.varlen_attn(*inputs, CU_Q, CU_K, 7, 11, **options)
    assert len(calls) == 1
    wanted, wanted_lse = expected_of(*inputs, window)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(lse, wanted_lse.float())
    weighing = random_tensor(out.shape, out.dtype, 5)
    got, want = (torch.autograd.grad((x * weighing).sum(), inputs) for x in (out, wanted))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("window", WINDOWS[:2])
def test_into_a_tensor(window, calls):
    q, k, v = packed(4)
    out = torch.full_like(q, torch.nan)
    same = varlen.varlen_attn_out(out, q, k, v, CU_Q, CU_K, 7, 11, window_size=window)
    assert same is out and len(calls) == 1
    torch.testing.assert_close(out, expected_of(q, k, v, window)[0], **CLOSE)


def test_keys_in_use_and_blocks(calls):
    q, k, v = packed()
    used = [6, 0, 11]
    seqused = torch.tensor(used, dtype=torch.int32)
    wanted = expected_of(q, k, v, (-1, 0), used=used)[0]
    options = dict(window_size=(-1, 0), enable_gqa=True, seqused_k=seqused)
    torch.testing.assert_close(varlen.varlen_attn(q, k, v, CU_Q, CU_K, 7, 11, **options), wanted, **CLOSE)
    pools = [x.new_full((6, 4, 2, 8), torch.nan) for x in (k, v)]
    table = torch.tensor([[5, 0, -1], [-1, -1, -1], [3, 2, 1]], dtype=torch.int32)
    for b, (c, d) in enumerate(zip(ENDS_K, ENDS_K[1:])):
        for j in range(c, d):
            pools[0][table[b, (j - c) // 4], (j - c) % 4] = k[j]
            pools[1][table[b, (j - c) // 4], (j - c) % 4] = v[j]
    paged = varlen.varlen_attn(q, *pools, CU_Q, None, 7, 11, block_table=table, **options)
    torch.testing.assert_close(paged, wanted, **CLOSE)
    assert len(calls) == 2


def test_compiled(calls):
    torch._dynamo.reset()
    compiled = torch.compile(varlen.varlen_attn, backend="aot_eager", fullgraph=True)
    inputs = [x.requires_grad_() for x in packed(4, torch.float32)]
    results = []
    for function in (varlen.varlen_attn, compiled):
        out = function(*inputs, CU_Q, CU_K, 7, 11, window_size=(-1, 0))
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(*results)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "options, pattern",
    [
        (dict(block_table=torch.zeros(3, 3, dtype=torch.int32)), "seqused_k"),
        (dict(cu_seq_k=None), "cu_seq_k"),
        (dict(cu_seq_k=None, seqused_k=torch.tensor([1, 0, 1])), "cu_seq_k"),
    ],
)
def test_wrong_arguments(options, pattern):
    q, k, v = packed(4)
    if "block_table" in options:
        k = v = k[None]
    cu_k = options.pop("cu_seq_k", CU_K)
    with pytest.raises(ValueError, match=pattern):
        varlen.varlen_attn(q, k, v, CU_Q, cu_k, 7, 11, **options)
