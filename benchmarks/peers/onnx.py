"""onnxruntime's Attention operator (ai.onnx opset 23), forward only."""

from __future__ import annotations

import importlib.util

import torch

from .base import Peer, Skip


class OnnxRuntime(Peer):
    name = "onnxruntime"
    about = "onnxruntime, ONNX Attention (opset 23)"

    def missing(self, device):
        for package in ("onnxruntime", "onnx"):
            if importlib.util.find_spec(package) is None:
                return f"not installed ({package})"
        return None if device == "cpu" else "measured on CPU only"

    def build(self, case, inputs, which):
        if which != "forward":
            raise Skip("forward only")
        if case.layer or case.function or case.dropout:
            raise Skip("no dropout" if case.dropout else "attention alone")
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper

        elements = {"fp64": TensorProto.DOUBLE, "fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}
        if case.dtype not in elements:
            raise Skip("no bfloat16 in numpy")
        element = elements[case.dtype]
        feeds = dict(zip("qkv", inputs.tensors))
        kinds = dict.fromkeys("qkv", element)
        if inputs.mask is not None:
            feeds["mask"] = inputs.mask.expand(case.batch, -1, case.q_len, -1)
            kinds["mask"] = TensorProto.BOOL if inputs.mask.dtype == torch.bool else element
        node = helper.make_node("Attention", list(feeds), ["out"], is_causal=int(case.causal))
        graph = helper.make_graph(
            [node], "attention",
            [helper.make_tensor_value_info(name, kinds[name], list(t.shape)) for name, t in feeds.items()],
            [helper.make_tensor_value_info("out", element, [case.batch, case.heads, case.q_len, case.v_head_dim])],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        onnx.checker.check_model(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # spinning would disturb the others' turns
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common base
            raise Skip(f"refused: {str(error).splitlines()[0]}") from error
        values = {name: t.detach().contiguous().numpy() for name, t in feeds.items()}
        return lambda: torch.from_numpy(session.run(None, values)[0])
