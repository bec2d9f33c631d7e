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


def exported(model, inputs, opset=ours.OPSET, linear_node=False, **options):
    table = ours.translation_table(linear_node=linear_node)
    return torch.onnx.export(
        model, inputs, dynamo=True, opset_version=opset, custom_translation_table=table, verbose=False, **options
    )


def run_all(program, inputs):
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [x.name for x in session.get_inputs()]
    return [torch.from_numpy(x) for x in session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})]


def run(program, inputs):
    return run_all(program, inputs)[0]


def assert_equal(program, inputs, expected):
    for got, wanted in zip(run_all(program, inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("name", ["causal", "sinks", "a row without keys", "floating mask, alibi"])
def test_lse(name):
    model = Model(attnjourney.attention, enable_gqa=True, return_lse=True, **OPTIONS[name])
    program = exported(model, (Q, K, V))
    assert nodes(program).count("Attention") == 1
    assert_equal(program, (Q, K, V), model(Q, K, V))


def test_decode():
    lengths = torch.tensor([9, 4])
    mask = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    key, value = (torch.cat([x, torch.full((2, 2, 3, 8), 5.0)], 2) for x in (K, V))  # room that is not read
    model = Model(attnjourney.decode, attn_mask=mask, window_size=(5, -1), softcap=4.0, return_lse=True)
    inputs = (Q[:, :, :3], key, value, lengths)
    assert_equal(exported(model, inputs), inputs, model(*inputs))

    blocks = torch.tensor([[3, 0, 2], [1, -1, -1]], dtype=torch.int32)
    pools = [random_tensor((4, 2, 4, 8), torch.float32, i, outliers=False) for i in (11, 12)]
    model = Model(lambda q, k, v, n, table: attnjourney.decode(q, k, v, n, block_table=table))
    inputs = (Q[:, :, :2], *pools, torch.tensor([10, 3]), blocks)
    program = exported(model, inputs)
    assert nodes(program).count("Attention") == 1
    assert_equal(program, inputs, [model(*inputs)])
    (key, key_scale), (value, value_scale) = (attnjourney.reference.quantize(x, torch.int8) for x in (K, V))
    model = Model(lambda q, k, v, n, s, t: attnjourney.decode(q, k, v, n, key_scale=s, value_scale=t))
    inputs = (Q[:, :, :2], key, value, lengths, key_scale, value_scale)
    assert_equal(exported(model, inputs), inputs, [model(*inputs)])
    with pytest.raises(Exception, match="ring: expected False"):
        exported(Model(attnjourney.decode, ring=True, window_size=(3, -1)), (Q[:, :, :1], K, V, lengths))


def test_keys_from_before_are_inputs_of_the_node():
    model = Model(ours.attention_with_past, window_size=(6, -1), softcap=5.0)
    past = torch.export.Dim("past", min=2, max=64)
    inputs = (Q, Q[:, :2], Q[:, 2:], K, V)
    program = exported(model, inputs, dynamic_shapes=(({}, {}, {}, {2: past}, {2: past}),))
    node = next(node for node in program.model_proto.graph.node if node.op_type == "Attention")
    assert len(node.input) == 6 and all(node.input[4:]) and len([x for x in node.output if x]) == 3
    results = model(*inputs)
    assert_equal(program, inputs, results)
    inputs = (*inputs[:3], *results[1:])  # what came out goes in
    assert_equal(program, inputs, model(*inputs))
    whole = attnjourney.attention(
        Q, *results[1:], is_causal=True, causal_alignment="bottom_right", enable_gqa=True, window_size=(6, -1),
        softcap=5.0,
    )  # fmt: skip
    assert torch.equal(results[0], whole)


STATE = (
    random_tensor((2, 2, 8, 6), torch.float32, 8, outliers=False).abs(),
    random_tensor((2, 2, 8), torch.float32, 9, outliers=False).abs(),
)
PADDING = torch.arange(7) < torch.tensor([[0], [2]])
LINEAR = {
    "normalized": dict(initial_state=STATE, return_state=True, key_padding_mask=PADDING),
    "plain": dict(feature_map=None, normalize=False, scale=0.4),
    "all keys": dict(feature_map="relu", is_causal=False, return_state=True),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, node", [("normalized", False), ("normalized", True), ("plain", True), ("all keys", False)]
)
def test_linear_attention(name, node):
    model, inputs = Model(attnjourney.linear_attention, **LINEAR[name]), (Q, K[:, :, :7], V[:, :, :7, :6])
    if node:
        program = ours.with_linear_attention(exported(model, inputs, 25, linear_node=True))
        assert program.model.opset_imports[""] == 27
    else:
        program = exported(model, inputs)
        with pytest.raises(ValueError, match="expected opset_version=25 at its export, got 23"):
            ours.with_linear_attention(program)
    assert nodes(program).count("LinearAttention") == node
    assert_equal(program, inputs, torch.utils._pytree.tree_leaves(model(*inputs)))


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
    for name in [x for x in sys.modules if x.startswith("attnjourney.integrations.onnx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxscript.onnx_opset", None)
    with pytest.raises(ImportError, match="needs onnxscript"):
        importlib.import_module("attnjourney.integrations.onnx")
