"""The layer operators and rope on CUDA. Without a GPU: the CUDA library's own layers on CPU tensors, with the checks of
a CUDA call and the CPU's operators in place of kernels; with one, their values."""

import itertools
import subprocess
import sys

import pytest
import torch

import attnjourney
from attnjourney.reference.gpt_attention import gpt_attention as reference_gpt_attention
from attnjourney.reference.gqa import gqa as reference_gqa
from attnjourney.reference.mha import mha as reference_mha
from attnjourney.reference.mla import mla as reference_mla
from tests.cuda.test_build import LIBRARIES, built  # noqa: F401  (a fixture)
from tests.support.layer_checks import check_layer, on_device
from tests.support.testing import DTYPES, random_tensor

ops = torch.ops.attnjourney


def numbers(*shape, seed, dtype):
    columns = shape[-1] if len(shape) == 2 else 1
    return (random_tensor(shape, torch.float64, seed, outliers=False) / columns**0.5).to(dtype)


def tables(seq, half):
    angle = 3 * random_tensor((seq, half), torch.float64, 20, outliers=False)
    return {"cos": angle.cos().float(), "sin": angle.sin().float()}


def calls(dtype):
    """(operator, reference, tensors, constants): each layer with what it has of masks, rotation, biases, grouping."""

    def some(**shapes):
        return {
            name: None if shape is None else numbers(*shape, seed=i, dtype=dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }

    x = (2, 37, 48)
    biases = dict(in_proj_bias=(144,), out_proj_bias=(48,))
    weights = dict(in_proj_weight=(144, 48), out_proj_weight=(48, 48))
    mask = random_tensor((37, 37), torch.float32, 8, outliers=False)
    padding = torch.arange(37).expand(2, 37) >= torch.tensor([[37], [20]])
    tensors = some(query=x, key=x, value=x, **weights, **biases)
    yield ops.mha, reference_mha, tensors, dict(num_heads=3, is_causal=True, key_padding_mask=padding)
    tensors = some(query=x, key=x, value=x, **weights) | {"attn_mask": mask}
    yield ops.mha, reference_mha, tensors, dict(num_heads=3, in_proj_bias=None, out_proj_bias=None)
    tensors = some(x=x, qkv_weight=(144, 48), qkv_bias=(144,), out_weight=(48, 48), out_bias=(48,))
    yield ops.gpt_attention, reference_gpt_attention, tensors, dict(num_heads=3)
    tensors = some(x=x, q_weight=(64, 48), k_weight=(32, 48), v_weight=(32, 48), o_weight=(40, 64), q_bias=(64,))
    yield ops.gqa, reference_gqa, tensors, dict(num_heads=4, num_kv_heads=2, **tables(37, 6))
    for q_lora in (24, None):
        shapes = dict(q_a_weight=q_lora and (q_lora, 48), q_a_norm_weight=q_lora and (q_lora,))
        shapes |= dict(q_b_weight=(72, q_lora or 48), kv_a_weight=(40, 48), kv_a_norm_weight=(32,))
        tensors = some(x=x, **shapes, kv_b_weight=(3 * 32, 32), o_weight=(48, 3 * 16))
        sizes = dict(num_heads=3, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
        yield ops.mla, reference_mla, tensors, sizes | tables(37, 4)


PROGRAM = f"""
import sys, torch
for name in ("_C_cpu.so", "_C_cuda.so"):
    torch.ops.load_library("{LIBRARIES}/" + name)
library = torch.library.Library("attnjourney", "FRAGMENT")
for name in ("mha", "gpt_attention", "gqa", "mla"):
    for suffix in ("_forward", "_backward"):
        schema = str(torch._C._get_schema("attnjourney::" + name + suffix, ""))
        library.define("_cuda_" + schema.split("::", 1)[1])
results = []
for name, arguments in torch.load(sys.argv[1]):
    try:
        hidden = getattr(torch.ops.attnjourney, "_cuda_" + name)(**arguments)
        own = getattr(torch.ops.attnjourney, name)(**arguments)
        results.append([[a, b] for a, b in zip(hidden, own, strict=True)])
    except Exception as error:
        results.append(f"{{type(error).__name__}}: {{str(error).splitlines()[0]}}")
torch.save(results, sys.argv[2])
"""


def recorded(function, tensors, constants, grad_out):
    """The calls of op_forward and op_backward that one training step makes: [(name, arguments by name)]."""
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name.removeprefix("attnjourney::")
            if function.namespace == "attnjourney" and name.endswith(("_forward", "_backward")):
                names = [a.name for a in function._schema.arguments]
                seen.append((name, dict(zip(names, args)) | (kwargs or {})))
            return function(*args, **(kwargs or {}))

    leaves = {n: x if x is None else x.detach().requires_grad_() for n, x in tensors.items()}
    with Record():
        function(**leaves, **constants).backward(grad_out)
    return [(n, {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in a.items()}) for n, a in seen]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_the_cuda_library(built, tmp_path, dtype):  # noqa: F811
    """Its layers hand its attention views that are served, and give what the CPU's layers give."""
    made = []
    for operator, _, tensors, constants in calls(dtype):
        out = operator(**tensors, **constants)
        made += recorded(operator, tensors, constants, numbers(*out.shape, seed=30, dtype=dtype))
    assert len(made) == 12
    torch.save(made, tmp_path / "calls")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "calls"), str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (name, _), results in zip(made, torch.load(tmp_path / "results"), strict=True):
        assert not isinstance(results, str), f"{name}: {results}"
        for got, expected in results:
            assert got.shape == expected.shape and got.dtype == expected.dtype, name
            ulps = 4 * torch.finfo(dtype).eps  # RMS norm rounds in another order
            torch.testing.assert_close(got, expected, rtol=ulps, atol=ulps, msg=lambda m, name=name: f"{name}: {m}")


# ---------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", range(6))
def test_values(number, dtype):
    operator, reference, tensors, constants = next(itertools.islice(calls(dtype), number, None))
    out = reference(**tensors, **constants)
    grad_out = numbers(*out.shape, seed=30, dtype=dtype)

    def on_the_gpu(**arguments):
        return operator(**on_device("cuda", arguments)).cpu()

    check_layer(on_the_gpu, reference, tensors, constants, grad_out)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped_last", "offset"])
def test_rope(layout, interleaved, dtype):
    x = random_tensor((2, 3, 37, 80), dtype, layout=layout)
    for rotary_dim, dim in ((64, 80), (10, 31)):
        y = x[..., :dim]
        leaf = y.cuda().requires_grad_()
        options = dict(rotary_dim=rotary_dim, interleaved=interleaved)
        out = attnjourney.rope(leaf, **options)
        expected = attnjourney.rope(y, **options)
        torch.testing.assert_close(out.cpu(), expected)
        (gradient,) = torch.autograd.grad(out, leaf, out.detach())
        torch.testing.assert_close(gradient.cpu(), y.contiguous(), atol=3 * torch.finfo(dtype).eps * 8, rtol=1e-2)


@pytest.mark.cuda
def test_layers_in_a_graph():
    operator, _, tensors, constants = next(itertools.islice(calls(torch.bfloat16), 4, None))
    tensors, constants = on_device("cuda", tensors), on_device("cuda", constants)
    expected = operator(**tensors, **constants)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator(**tensors, **constants)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
