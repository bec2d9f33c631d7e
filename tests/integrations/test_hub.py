"""attnjourney.integrations.hub: what it writes is loaded by `kernels` offline, in a process that has no other copy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnjourney.integrations import hub

ROOT = Path(__file__).parents[2]
USE = """
import sys, torch, kernels
kernel = kernels.get_kernel("attnjourney/flash-attention", version=1)
q, k, v = torch.randn(3, 2, 9, 4, 8)
out = kernel.flash_attn_func(q, k, v, causal=True)
wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
assert sys.modules["attnjourney"].__file__.startswith(sys.argv[1]), sys.modules["attnjourney"].__file__
assert "varlen_attention" in dir(torch.ops.attnjourney)
"""


# transformers asks for kernels 0.18.2; what it calls is in 0.17 too
BATCH = """
import importlib.metadata, sys, torch
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else version(name)
import transformers
torch.set_num_threads(1)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
prompts = [[5, 6, 7, 8, 9], [10, 11, 12], [13] * 9]
options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
alone = [model.generate(torch.tensor([x]), **options)[0, len(x) :].tolist() for x in prompts]
model.set_attn_implementation("attnjourney/flash-attention")
batching = transformers.GenerationConfig(**options, max_batch_tokens=64, num_blocks=16, block_size=16)
together = model.generate_batch(inputs=prompts, generation_config=batching, progress_bar=False)
assert [x.generated_tokens for x in together.values()] == alone
assert sys.modules["attnjourney"].__file__.startswith(sys.argv[1]), sys.modules["attnjourney"].__file__
"""


def test_layout(tmp_path):
    (folder,) = [x for x in hub.write(tmp_path) if "-cpu-" in x.name]
    assert folder.parent.name == "build" and folder.name.startswith("torch-stable-abi211-cpu-")
    assert {x.name for x in folder.iterdir()} == {"__init__.py", "metadata.json", "attnjourney"}
    assert (folder / "attnjourney/_C_cpu.so").exists()
    with pytest.raises(ValueError, match="OUT: expected a folder without"):
        hub.write(tmp_path)


@pytest.mark.clients
@pytest.mark.parametrize("client", ("kernels", "transformers"))
def test_kernels_loads_it_offline(tmp_path, client):
    """By itself, and for continuous batching of transformers."""
    pytest.importorskip("kernels"), pytest.importorskip(client)
    use = USE if client == "kernels" else BATCH
    subprocess.run([sys.executable, "-m", "attnjourney.integrations.hub", tmp_path], check=True, cwd=ROOT)
    environment = {**os.environ, "LOCAL_KERNELS": f"attnjourney/flash-attention={tmp_path}", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", use, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
