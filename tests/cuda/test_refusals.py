"""What CUDA kernels do not serve is refused by name: the checks of a CUDA call run on CPU tensors, without a GPU."""

import json
import subprocess
import sys

import pytest
import torch

import attnjourney  # noqa: F401  (registers the operators)
from tests.cuda.test_build import LIBRARIES, built  # noqa: F401  (a fixture)

PROGRAM = f"""
import json, sys, torch
for name in ("_C_cpu.so", "_C_cuda.so"):
    torch.ops.load_library("{LIBRARIES}/" + name)
tensors = {{
    "two": torch.zeros(2, 2, 4, 8, dtype=torch.bfloat16),
    "fp32": torch.zeros(2, 2, 4, 8),
    "fp64": torch.zeros(2, 2, 4, 8).double(),
    "odd": torch.zeros(2, 2, 4, 7),
    "fp32_mask": torch.zeros(4, 4),
    "wide": torch.zeros(2, 2, 4, 1000, dtype=torch.bfloat16),
    "wide_fp32": torch.zeros(2, 2, 4, 257),
    "half_wide": torch.zeros(2, 2, 4, 512, dtype=torch.float16),
    "mask": torch.ones(4, 4, dtype=torch.bool),
    "lengths": torch.tensor([3, 4]),
    "heads": torch.zeros(2),
    "offsets": torch.tensor([0, 1]).int(),
    "index": torch.zeros(1).int(),
    "elements": torch.ones(1, 16, 16, dtype=torch.bool),
    "seed": torch.tensor(0),
    "rows": torch.zeros(1, 2, 8),
    "wide_rows": torch.zeros(1, 2, 1000, dtype=torch.bfloat16),
    "table": torch.zeros(1, 1).int(),
    "indices": torch.zeros(2, 4, 3).int(),
    "latents": torch.zeros(2, 2, 4, 576),
    "index_key": torch.zeros(2, 4, 8, dtype=torch.bfloat16),
    "wide_index_key": torch.zeros(2, 4, 1000, dtype=torch.bfloat16),
    "weights": torch.zeros(2, 2, 4, dtype=torch.bfloat16),
}}
tensors["latent_values"] = tensors["latents"][..., :512]
library = torch.library.Library("attnjourney", "FRAGMENT")
messages = []
for name, options in json.load(sys.stdin):
    if not hasattr(torch.ops.attnjourney, "_cuda_" + name):
        library.define("_cuda_" + str(torch._C._get_schema("attnjourney::" + name, "")).split("::", 1)[1])
    x = tensors[options.pop("x", "two")]
    options = {{k: tensors.get(v, v) if isinstance(v, str) else v for k, v in options.items()}}
    if name in ("attention_backward", "attention_jvp", "attention_backward_jvp"):
        lse = torch.zeros(x.shape[:-1], dtype=x.dtype if x.dtype == torch.float64 else torch.float32)
        options |= dict(out=x, lse=lse, stats=torch.stack([lse, lse], -1), attn_mask=options.get("attn_mask"))
        options |= dict(query_tangent=x) if "jvp" in name else {{}}
        options |= dict(grad_out=x, grad_lse=None) if "backward" in name else {{}}
        options |= dict(out_tangent=x, lse_tangent=lse) if "backward_jvp" in name else {{}}
    try:
        options = {{"query": x, "key": x, "value": x, **options}}
        if "indexer" in name:
            del options["value"]
        getattr(torch.ops.attnjourney, "_cuda_" + name)(**options)
        messages.append("served")
    except Exception as error:
        messages.append(f"{{type(error).__name__}}: {{str(error).splitlines()[0]}}")
print(json.dumps(messages))
"""
CHANGES = ("attention_jvp", "attention_backward_jvp")  # in a direction
REFUSED = [
    ({"x": "wide"}, "query: expected head dimensions of at most 512 on CUDA, got 1000 and (value) 1000"),
    ({"x": "wide_fp32"}, "query: expected head dimensions of at most 256 on CUDA, got 257 and (value) 257"),
    ({"origin": [1 << 28, 0, 0, 0]}, "origin: expected fewer than 2^28 rows, keys and heads on CUDA, got (268435456"),
]
SERVED = [
    {},
    {"is_causal": True, "causal_alignment": 1},
    {"scale": 2.0, "enable_gqa": True},
    {"window_size": [2, -1], "prefix_length": 2},
    {"key_lengths": "lengths", "query_lengths": "lengths"},
    {"attn_mask": "mask", "dropout_p": 0.5, "dropout_seed": "seed", "softcap": 2.0},
    {"sinks": "heads", "alibi_slopes": "heads", "scale": -1.0},
    *({"x": x, "sinks": "heads", "is_causal": True} for x in ("fp32", "fp64", "odd")),
    {"x": "fp64", "attn_mask": "fp32_mask"},
    {"origin": [5, 11, 3, 9], "dropout_p": 0.5, "dropout_seed": "seed"},
]


def run(calls, program=PROGRAM):
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(calls), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_not_served_is_refused_by_name(built):  # noqa: F811
    forward = run([("attention_forward", options) for options, _ in REFUSED])
    backward = run([("attention_backward", options) for options, _ in REFUSED])
    changes = [run([(name, options) for options, _ in REFUSED]) for name in CHANGES]
    for (options, message), *said in zip(REFUSED, forward, backward):
        assert all(message in x for x in said), options
    for said in changes:
        for (_, message), text in zip(REFUSED, said):
            assert message.replace("512", "256") in text
    for name in ("attention_forward", "attention_backward", *CHANGES):
        assert run([(name, options) for options in SERVED]) == ["served"] * len(SERVED)
    wide = {"x": "half_wide"}
    said = run([(f"attention_{name}", wide) for name in ("forward", "backward", "jvp")])
    assert said[:2] == ["served"] * 2 and "at most 256 on CUDA, got 512" in said[2]


def test_a_mask_of_blocks_is_served(built):  # noqa: F811
    blocks = dict(block_offsets="offsets", block_index="index", block_partial="index", block_elements="elements")
    calls = ({"x": "wide"}, {"is_causal": True}, {"x": "fp32"}, {"x": "fp64"})
    wide, *served = run([("block_attention_forward", {**blocks, **more}) for more in calls])
    assert served == ["served"] * 3 and REFUSED[0][1] in wide


def test_packed_rows_over_paged_caches_are_served(built):  # noqa: F811
    call = dict(cu_seqlens_q="offsets", cu_seqlens_k="offsets", block_table="table")
    calls = ({"x": "fp32", "query": "rows"}, {"x": "wide", "query": "wide_rows"})
    served, wide = run([("paged_attention", {**call, **more}) for more in calls])
    assert served == "served" and REFUSED[0][1].replace("512", "256") in wide


def test_what_linear_attention_does_not_serve_is_refused_by_name(built):  # noqa: F811
    said = run([("linear_attention_forward", {"x": "wide"}), ("linear_attention_forward", {"is_causal": False})])
    assert "query: expected head dimensions of at most 256 on CUDA, got 1000 and (value) 1000" in said[0]
    assert said[1] == "served"


def test_what_sparse_attention_does_not_serve_is_refused_by_name(built):  # noqa: F811
    calls = [{"x": "two"}, {"x": "wide"}, {"x": "latents"}, {"x": "latents", "value": "latents"}]
    calls = [{"value": call["x"], "indices": "indices", **call} for call in calls]
    calls[2]["value"] = "latent_values"
    served, wide, latents, no_values = run([("sparse_attention_forward", call) for call in calls])
    assert served == latents == "served"
    limits = "query: expected head dimensions of at most 256 on CUDA, or 576 and (value) 512 where value is the front"
    assert limits in wide and limits in no_values


def test_what_gated_linear_attention_does_not_serve_is_refused_by_name(built):  # noqa: F811
    backward = dict(grad_out=None, grad_state=None, gate=None, beta=None, initial_state=None, cu_seqlens=None)
    backward |= dict(update=0, scale=1.0, qk_l2norm=False, need=63)
    calls = [("gated_linear_attention_forward", dict(update=0)), ("gated_linear_attention_backward", backward)]
    for name, options in calls:
        wide, served = run([(name, {"x": "wide", **options}), (name, options)])
        assert "query: expected head dimensions of at most 256 on CUDA, got 1000 and (value) 1000" in wide
        assert served == "served"


def test_what_the_indexer_does_not_serve_is_refused_by_name(built):  # noqa: F811
    given = {"index_query": "two", "index_key": "index_key", "weights": "weights", "indices": "indices"}
    loss = {"query": "two", "key": "two", **given}
    calls = [
        ("lightning_indexer", {"key": "index_key", "weights": "weights", "topk": 3}),
        ("lightning_indexer", {"x": "wide", "key": "wide_index_key", "weights": "weights", "topk": 3}),
        ("lightning_indexer_loss_forward", loss),
        ("lightning_indexer_loss_forward", {**loss, "query": "wide", "key": "wide"}),
    ]
    served, wide, loss_served, wide_loss = run([(name, {**call, "value": None}) for name, call in calls])
    assert served == loss_served == "served"
    assert "query: expected a head dimension of at most 256 for the indexer on CUDA, got 1000" in wide
    assert "query: expected a head dimension of at most 576 on CUDA, got 1000" in wide_loss


def test_every_option_of_the_operator_is_tried():
    """A new argument of attention_forward needs an entry above: whether CUDA serves it or refuses it."""
    schema = torch.ops.attnjourney.attention_forward.default._schema
    options = {a.name for a in schema.arguments} - {"query", "key", "value"}
    assert {name for entry, _ in REFUSED for name in entry} | {n for entry in SERVED for n in entry} >= options


@pytest.mark.parametrize(
    "operator",
    [
        "attention_forward",
        "attention_backward",
        "block_attention_forward",
        "paged_attention",
        "decode",
        "gqa_forward",
        "gated_linear_attention_forward",
    ],  # fmt: skip
)
def test_cuda_tensors_without_a_kernel(operator):
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA: the library may be there")
    overload = getattr(torch.ops.attnjourney, operator).default
    some = {"Tensor": torch.zeros(1), "Optional[Tensor]": None, "int": 1}
    required = [some[str(a.type)] for a in overload._schema.arguments if not a.has_default_value()]
    with pytest.raises(NotImplementedError, match=rf"^{operator}: expected tensors on the CPU, got CUDA tensors: "):
        overload._op_dk(torch._C.DispatchKey.CUDA, *required)


def test_deterministic_mode_is_seen():
    """What the CUDA backward asks before it picks a kernel."""
    asked = torch.ops.attnjourney._deterministic_algorithms
    assert asked() is False
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert asked() is True
    finally:
        torch.use_deterministic_algorithms(False)
