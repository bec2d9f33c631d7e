"""attnjourney.integrations.onnx: exported programs in onnxruntime give what the operators give."""

import importlib
import sys

import pytest
import torch

import attnjourney
from tests.support.testing import random_tensor

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from attnjourney.integrations import onnx as ours  # noqa: E402

Q, K, V = (
    random_tensor(s, torch.float32, i, outliers=False) for i, s in enumerate([(2, 4, 7, 8)] + [(2, 2, 9, 8)] * 2)
)
LENGTHS = torch.tensor([9, 4])
FLOATING = random_tensor((4, 7, 9), torch.float32, 4, outliers=False).masked_fill(torch.eye(7, 9) > 0, -torch.inf)
SLOPES, SINKS = torch.tensor([0.1, 0.2, 0.4, 0.8]), torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": dict(),
    "causal": dict(is_causal=True, softcap=3.0, scale=0.3),
    "bottom right": dict(is_causal=True, causal_alignment="bottom_right"),
    "window, prefix": dict(window_size=(2, 1), prefix_length=2),
    "lengths": dict(is_causal=True, causal_alignment="bottom_right", key_lengths=LENGTHS, query_lengths=LENGTHS - 3),
    "bool mask": dict(attn_mask=torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.6),
    "floating mask, alibi": dict(attn_mask=FLOATING, alibi_slopes=SLOPES),
    "sinks": dict(is_causal=True, sinks=SINKS, window_size=(3, -1)),
    "a row without keys": dict(key_lengths=torch.tensor([9, 0])),
}


class Model(torch.nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *inputs):
        return self.function(*inputs, **self.options)


def exported(model, inputs, **options):
    return torch.onnx.export(
        model, inputs, dynamo=True, opset_version=ours.OPSET, custom_translation_table=ours.translation_table(),
        verbose=False, **options,
    )  # fmt: skip


def run(program, inputs):
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [x.name for x in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})[0])


def nodes(program):
    return [node.op_type for node in program.model_proto.graph.node]


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name):
    model = Model(attnjourney.attention, enable_gqa=True, **OPTIONS[name])
    program = exported(model, (Q, K, V))
    assert nodes(program).count("Attention") == 1
    torch.testing.assert_close(run(program, (Q, K, V)), model(Q, K, V), rtol=1e-5, atol=1e-5)


def test_other_ranks_and_a_length_known_at_run_time():
    model = Model(attnjourney.attention, is_causal=True)
    torch.testing.assert_close(run(exported(model, (Q[0], K[0, :1], V[0, :1])), (Q[0], K[0, :1], V[0, :1])),
                               model(Q[0], K[0, :1], V[0, :1]), rtol=1e-5, atol=1e-5)  # fmt: skip
    length = torch.export.Dim("length", min=2, max=64)
    model = Model(attnjourney.attention, is_causal=True, window_size=(3, -1))
    program = exported(model, (Q, Q, Q), dynamic_shapes=(({2: length},) * 3,))
    longer = random_tensor((2, 4, 20, 8), torch.float32, 7, outliers=False)
    torch.testing.assert_close(run(program, (longer,) * 3), model(*(longer,) * 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved):
    table = torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.1, 0.01]))
    model = Model(lambda x: torch.ops.attnjourney.rope(x, table.cos(), table.sin(), interleaved=interleaved))
    program = exported(model, (Q,))
    assert nodes(program).count("RotaryEmbedding") == 1
    torch.testing.assert_close(run(program, (Q,)), model(Q), rtol=1e-5, atol=1e-5)


def test_what_has_no_node_is_named():
    with pytest.raises(Exception, match="dropout_p: expected 0"):
        exported(Model(attnjourney.attention, dropout_p=0.5), (Q, Q, Q))


def test_a_missing_client_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "attnjourney.integrations.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript.onnx_opset", None)
    with pytest.raises(ImportError, match="needs onnxscript"):
        importlib.import_module("attnjourney.integrations.onnx")
