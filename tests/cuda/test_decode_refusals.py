"""What decoding does not serve on CUDA is refused by name: as cuda/test_refusals.py, without a GPU."""

import json
import subprocess
import sys

import torch

import attnjourney  # noqa: F401  (registers the operators)
from tests.cuda.test_build import LIBRARIES, built  # noqa: F401  (a fixture)

PROGRAM = f"""
import json, sys, torch
for name in ("_C_cpu.so", "_C_cuda.so"):
    torch.ops.load_library("{LIBRARIES}/" + name)
tensors = {{
    "wide": torch.zeros(2, 2, 4, 300), "wider": torch.zeros(2, 2, 4, 513, dtype=torch.bfloat16),
    "half_wide": torch.zeros(2, 2, 4, 512, dtype=torch.float16),
    "mask": torch.ones(1, 5, dtype=torch.bool), "heads": torch.zeros(2),
    "table": torch.zeros(2, 3, dtype=torch.int32), "columns": torch.zeros(4, 4),
    "bytes": torch.zeros(2, 2, 4, 8, dtype=torch.int8), "scale": torch.ones(2, 2, 4),
}}
library = torch.library.Library("attnjourney", "FRAGMENT")
library.define("_cuda_" + str(torch._C._get_schema("attnjourney::decode", "")).split("::", 1)[1])
messages = []
for options in json.load(sys.stdin):
    dtype = getattr(torch, options.pop("dtype", "float32"))
    x = tensors[options.pop("x")] if "x" in options else torch.zeros(2, 2, 4, 8, dtype=dtype)
    cache = tensors[options.pop("cache")] if "cache" in options else x
    options = {{k: tensors[v] if isinstance(v, str) else v for k, v in options.items()}}
    try:
        torch.ops.attnjourney._cuda_decode(x, cache, cache, torch.tensor([99, -1]), **options)
        messages.append("served")
    except Exception as error:
        messages.append(f"{{type(error).__name__}}: {{str(error).splitlines()[0]}}")
print(json.dumps(messages))
"""
REFUSED = [
    ({"x": "wide"}, "ValueError: query: expected head dimensions of at most 256 on CUDA, got 300 and (value) 300"),
    ({"x": "wider"}, "ValueError: query: expected head dimensions of at most 512 on CUDA, got 513 and (value) 513"),
    (
        {"x": "half_wide", "ring": True, "attn_mask": "mask", "window_size": [0, 0]},
        "ValueError: query: expected head dimensions of at most 256 beside a mask over a ring on CUDA, got 512 and",
    ),
    ({"attn_mask": "mask"}, "ValueError: attn_mask: expected a last dimension of at most the capacity, 4, got shape"),
]
SERVED = [  # lengths out of range among them: nobody looks
    {"x": "half_wide", "attn_mask": "columns"},
    {"x": "half_wide", "ring": True, "window_size": [0, 0]},
    {"dtype": "bfloat16", "is_causal": False, "scale": 0.5},
    {"dtype": "float16", "window_size": [0, -1], "ring": True, "attn_mask": "mask"} | {"window_size": [0, 0]},
    {"dtype": "float64", "block_table": "table", "prefix_length": 2},
    {"softcap": 2.0, "sinks": "heads", "alibi_slopes": "heads", "attn_mask": "columns"},
    {"cache": "bytes", "key_scale": "scale", "value_scale": "scale"},
]


def run(calls):
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(calls), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_not_served_is_refused_by_name(built):  # noqa: F811
    for (options, message), said in zip(REFUSED, run([options for options, _ in REFUSED])):
        assert message in said, options
    assert run(SERVED) == ["served"] * len(SERVED)


def test_every_option_of_the_operator_is_tried():
    schema = torch.ops.attnjourney.decode.default._schema
    options = {a.name for a in schema.arguments} - {"query", "key", "value", "lengths"}
    assert {n for entry, _ in REFUSED for n in entry} | {n for entry in SERVED for n in entry} >= options
