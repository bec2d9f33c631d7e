"""Every public function and module on tensors that say they are on another device (pretend_device.py).

No tensor of its own on the CPU, no wait for the device but those that are written down, and the CPU's results.
"""

import importlib
from contextlib import nullcontext

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import attnjourney
from attnjourney import nn, viz
from attnjourney.seeing.recording import _dispatch_mode, _scores
from tests.seeing.test_trace_modules import MODULES, x_of
from tests.support.pretend_device import PretendDevice, Pretender
from tests.support.testing import random_tensor


def tensors(*shapes, dtype=torch.float32):
    return [random_tensor(shape, dtype, seed, outliers=False) for seed, shape in enumerate(shapes)]


QKV = tensors((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
SAME = tensors(*[(2, 2, 12, 8)] * 6)
LENGTHS = torch.tensor([12, 7])
PADDING = torch.arange(12) >= LENGTHS[:, None]
GLOBAL = torch.arange(12) == torch.tensor([[0], [3]])
TABLES = dict(cos=torch.ones(12, 4), sin=torch.zeros(12, 4))
STATE = tensors((2, 2, 8, 8), (2, 2, 8))
GQA = dict(enable_gqa=True)
aj = attnjourney

CALLS = {  # name: (function, arguments, keywords)
    "attention": (aj.attention, QKV, dict(is_causal=True, **GQA)),
    "attention, lengths": (aj.attention, QKV, dict(key_lengths=LENGTHS, query_lengths=LENGTHS, softcap=2.0, **GQA)),
    "attention, dropout": (aj.attention, QKV, dict(dropout_p=0.5, dropout_seed=torch.tensor(3), **GQA)),
    "attention_weights": (aj.attention_weights, QKV[:2], dict(is_causal=True, enable_gqa=True)),
    "varlen": (
        aj.varlen_attention,
        [x[0].transpose(0, 1) for x in SAME[:3]],
        dict(cu_seqlens_q=torch.tensor([0, 5, 12]), cu_seqlens_k=torch.tensor([0, 5, 12])),
    ),
    "decode": (aj.decode, [QKV[0][:, :, :1], *QKV[1:], LENGTHS], {}),
    "tree": (
        lambda q, k, v, n, tree: aj.decode(q, k, v, n, is_causal=False, attn_mask=aj.tree_mask(tree, n, keys=12)),
        [QKV[0][:, :, :4], *QKV[1:], LENGTHS, torch.tensor([-1, 0, 0, 1])],
        {},
    ),
    "merge_states": (aj.merge_states, [SAME[0], SAME[1][..., 0], SAME[2], SAME[3][..., 0]], {}),
    "rope": (aj.rope, SAME[:1], {}),
    "rope, positions": (aj.rope, SAME[:1], dict(position_ids=torch.arange(12).expand(2, 12))),
    "linear": (aj.linear_attention, QKV, dict(key_padding_mask=PADDING, return_state=True)),
    "linear, all keys": (aj.linear_attention, QKV, dict(is_causal=False, initial_state=STATE, feature_map=torch.exp)),
    "gated": (
        aj.gated_linear_attention,
        [*SAME[:3], SAME[3][..., 0], SAME[4][..., 0]],
        dict(return_state=True, qk_l2norm=True),
    ),
    "gated, packed": (
        aj.gated_linear_attention,
        [*[x[:1] for x in SAME[:4]], SAME[4][:1, ..., 0]],
        dict(update="kda", initial_state=STATE[0], cu_seqlens=torch.tensor([0, 5, 11])),
    ),
    "infini": (aj.infini_attention, [*QKV, torch.zeros(4)], dict(segment_length=5, return_memory=True)),
    "infini, delta": (
        aj.infini_attention, [*QKV, torch.zeros(4)], dict(segment_length=4, update="delta", memory=STATE, truncate=1)
    ),
    "infini, turned": (
        aj.infini_attention, [*QKV, torch.zeros(4)], dict(segment_length=5, **TABLES)
    ),
    "longformer": (aj.longformer_attention, SAME[:3], dict(window=2, key_padding_mask=PADDING)),
    "longformer, dilated": (
        aj.longformer_attention, SAME[:3], dict(window=2, dilation=[1, 5], key_padding_mask=PADDING)
    ),
    "longformer, global": (
        aj.longformer_attention,
        SAME,
        dict(window=2, dilation=[2, 1], global_mask=GLOBAL, key_padding_mask=PADDING, is_causal=True),
    ),
    "maps": (lambda q, k: viz.attention_maps(q, k, is_causal=True, size=4).values, SAME[:2], {}),
    "summary": (lambda q, k: torch.tensor(viz.head_summary(q, k, is_causal=True).rows[0].entropy), SAME[:2], {}),
    "trace": (lambda *x, **o: list(aj.trace(*x, **o).values()), QKV, dict(is_causal=True, rows=[-1], **GQA)),
}  # fmt: skip
WAITS = {"longformer, global"}  # the number of global tokens is read
READ_ON_THE_HOST = {"maps", "summary", "trace", "attention_weights"}  # made to be looked at


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_scores, "FUSED", ("cpu",), raising=False)
    for module in (
        _dispatch_mode,
        importlib.import_module("attnjourney.seeing.recording.capture"),
    ):  # ours has to stay on
        monkeypatch.setattr(module, "_disable_current_modes", nullcontext)
    with torch.no_grad():
        yield


def same(got, expected):
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a.inner if isinstance(a, Pretender) else a, b, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    function, arguments, keywords = CALLS[name]
    expected = function(*arguments, **keywords)
    with PretendDevice() as device:
        got = function(*tree_map(device.put, list(arguments)), **tree_map(device.put, keywords))
    same(got, expected)
    if name not in READ_ON_THE_HOST:
        assert all(isinstance(x, Pretender) for x in tree_leaves(got))
        assert bool(device.waits) == (name in WAITS), device.waits


def module_of(name):
    make, _, keywords = MODULES[name]
    torch.manual_seed(0)
    return make().eval(), x_of(), keywords


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("how", ["call", "trace", "capture"])
def test_modules(name, how):
    module, x, keywords = module_of(name)
    if how == "capture" and isinstance(module, nn.LinearAttention):
        pytest.skip("linear attention has no weights")

    def run(x, keywords):
        if how == "call":
            return module(x, **keywords)
        if how == "trace":
            return list(aj.trace_module(module, x, rows=[1, 5], heads=[2], **keywords).values())
        with aj.capture(module, rows=[1, 5], heads=[2]) as seen:
            module(x, **keywords)
        return [seen[0].weights, seen[0].lse]

    expected = run(x, keywords)
    with PretendDevice() as device:
        for owner in module.modules():
            for place in (owner._parameters, owner._buffers):
                for n, p in place.items():
                    place[n] = None if p is None else device.put(p.detach())
        got = run(device.put(x), tree_map(device.put, keywords))
    same(got, expected)
    if how == "call":
        assert isinstance(got, Pretender) and bool(device.waits) == ("global" in name), device.waits
