"""The node tests of an operator from the onnx wheel: inputs, attributes and the outputs that its reference computes."""

import importlib
from dataclasses import dataclass

import numpy
import pytest
import torch


@dataclass
class NodeCase:
    name: str
    attributes: dict
    inputs: dict  # by the operator's own names; what the node leaves out is missing
    outputs: list[torch.Tensor]


def as_tensor(array):
    if array.dtype.name == "bfloat16":  # numpy's own kinds have none
        return torch.from_numpy(array.view(numpy.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def node_cases(op_type, module):
    """All cases of onnx.backend.test.case.node.<module> that are one node of `op_type`; skips where onnx is missing."""
    pytest.importorskip("google.protobuf", reason="onnx needs protobuf")
    onnx = pytest.importorskip("onnx")
    collection = importlib.import_module("onnx.backend.test.case.node")
    numpy.random.seed(0)
    importlib.import_module(f"onnx.backend.test.case.node.{module}")  # fills the collection
    formal = [x.name for x in onnx.defs.get_schema(op_type).inputs]
    cases = {}
    for case in collection._NodeTestCases:
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].op_type != op_type:  # also the same as a function of simpler nodes
            continue
        arrays, outputs = case.data_sets[0]
        given = iter(arrays)
        inputs = {name: as_tensor(next(given)) for name, x in zip(formal, nodes[0].input) if x}
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
        attributes = {name: x.decode() if isinstance(x, bytes) else x for name, x in attributes.items()}
        cases[case.name] = NodeCase(case.name, attributes, inputs, [as_tensor(x) for x in outputs])
    assert cases, f"no node test of {op_type} in onnx {onnx.__version__}"
    return list(cases.values())
