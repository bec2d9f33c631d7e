"""python -m benchmarks.models: whole models of transformers, a training step and generation, beside sdpa and eager.

Models have the shape of their namesakes and random weights: width 256, two layers, a vocabulary of 1000. `train` is
forward, loss and backward of 512 tokens (ViT: 8 images of 197 patches); `generate` is a prompt of 512 tokens and 64
greedy ones, with a cache; ours is attnjourney.integrations.transformers with its own caches. Everyone takes turns and
the best turn counts; one thread is measured in CPU time. Memory is the rise of the peak in a process of its own, see
memory.py. Who refuses a model (sdpa some of them) has no figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import files, machine, memory

CONTESTANTS = ("ours", "sdpa", "eager")
PROMPT, NEW, BATCHES = 512, 64, (1, 8)
BASE = dict(
    vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = dict(BASE, num_key_value_heads=2, head_dim=64)
LATENT = dict(
    BASE, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
    v_head_dim=64, first_k_dense_replace=2,
)  # fmt: skip
VISION = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4)
SLIDING = ["sliding_attention", "full_attention"]

# name: class, configuration class, arguments
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(GROUPED, sliding_window=128, query_pre_attn_scalar=64)),
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        dict(GROUPED, sliding_window=128, layer_types=SLIDING, num_local_experts=2, num_experts_per_tok=1),
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "bert": ("BertForMaskedLM", "BertConfig", BASE),
    "vit": ("ViTForImageClassification", "ViTConfig", dict(VISION, image_size=224, patch_size=16)),
}  # fmt: skip
ENCODERS = ("bert", "vit")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """`batch` sequences through one model; `tokens`: those that a turn is counted in."""

    model: str
    dtype: str
    work: str  # "train" or "generate"
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dtype}-{self.work}-b{self.batch}"

    @property
    def tokens(self) -> int:
        return self.batch * (NEW if self.work == "generate" else 197 if self.model == "vit" else PROMPT)


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for model in MODELS:
            yield Case(model, dtype, "train", 8 if model == "vit" else 1)
            if model not in ENCODERS:
                yield from (Case(model, dtype, "generate", batch) for batch in BATCHES)


def build(name: str, contestant: str, dtype: torch.dtype) -> Any:
    import transformers

    from attnjourney.integrations import transformers as ours

    cls, config, arguments = MODELS[name]
    configuration = getattr(transformers, config)(**arguments)
    torch.manual_seed(0)
    attention = "eager" if contestant == "ours" else contestant
    model = getattr(transformers, cls)._from_config(configuration, attn_implementation=attention, dtype=dtype)
    if model.config._attn_implementation != attention:
        raise ValueError(f"{contestant} is not there for {cls}")
    return ours.use(model) if contestant == "ours" else model


def call(case: Case, contestant: str, length: int = PROMPT, new: int = NEW) -> Callable[[], Any]:
    """One turn of a contestant."""
    from attnjourney.integrations import transformers as ours

    model = build(case.model, contestant, DTYPES[case.dtype])
    generator = torch.Generator().manual_seed(1)
    if case.model == "vit":
        images = torch.randn(case.batch, 3, 224, 224, generator=generator).to(DTYPES[case.dtype])
        given = dict(pixel_values=images, labels=torch.zeros(case.batch, dtype=torch.int64))
    else:
        tokens = torch.randint(3, 1000, (case.batch, length), generator=generator)
        given = dict(input_ids=tokens, labels=tokens)

    def train() -> None:
        model.zero_grad()
        model(**given).loss.backward()

    def generate() -> torch.Tensor:
        own = {"past_key_values": ours.cache(model)} if contestant == "ours" else {}
        options = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        return model.generate(given["input_ids"], **options, **own)

    if case.work == "generate":
        model.eval()
        return torch.no_grad()(generate)
    return train


def peak(case: Case, contestant: str) -> int | None:
    """Bytes by which a turn raises the peak of a process that has built the model and run a short turn; of one thread:
    the pool of others would not live in a fork."""

    def work() -> int:
        call(case, contestant, 16, 2)()
        turn = call(case, contestant)
        filler = memory._level()
        before = memory._resident()
        turn()
        answer = max(0, memory._high_water() - before)
        del filler
        return answer

    return json.loads(memory.in_fork(work))


def measure(case: Case, turns: int, threads: int, with_memory: bool) -> dict:
    record: dict[str, Any] = {
        "name": case.name,
        "tokens": case.tokens,
        "threads": threads,
        "results": {},
        "refused": {},
    }
    calls, clock = {}, time.process_time if threads == 1 else time.perf_counter
    for contestant in CONTESTANTS:
        try:
            turn = call(case, contestant)
            turn()
        except (ValueError, ImportError, RuntimeError, NotImplementedError) as error:
            record["refused"][contestant] = str(error).strip().splitlines()[0].split(". ")[0]
            continue
        calls[contestant] = turn
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for contestant, turn in calls.items():
            gc.collect()
            start = clock()
            turn()
            best[contestant] = min(best[contestant], clock() - start)
    del calls
    for contestant, seconds in best.items():
        result = {"seconds": seconds, "tokens_per_second": case.tokens / seconds}
        if with_memory:
            result["memory"] = peak(case, contestant)
        record["results"][contestant] = result
    return record


def table(records: list[dict]) -> Table:
    shown = Table("case", *(f"{c} tokens/s" for c in CONTESTANTS), *(f"{c} MiB" for c in CONTESTANTS))
    for record in records:
        results = [record["results"].get(c) for c in CONTESTANTS]
        rates = ["-" if r is None else f"{r['tokens_per_second']:.0f}" for r in results]
        rooms = ["-" if r is None or r.get("memory") is None else f"{r['memory'] / 2**20:.0f}" for r in results]
        shown.add_row(record["name"], *rates, *rooms)
    return shown


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    p.add_argument("--case", default="", metavar="TEXT", help="cases whose name contains it")
    p.add_argument("--turns", type=int, default=3, help="of everyone in every case (default 3)")
    p.add_argument("--threads", type=int, default=1, help="default 1; memory is measured with one alone")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    command = " ".join(["python -m benchmarks.models", *(sys.argv[1:] if argv is None else argv)])
    document = machine.describe("cpu", args.threads) | {"command": command, "finished": False, "models": []}
    console = Console()
    for case in cases():
        if args.case not in case.name:
            continue
        console.print(case.name)
        document["models"].append(measure(case, args.turns, args.threads, args.threads == 1))
        if args.json:
            files.write_json(args.json, document)
    document["finished"] = True
    if args.json:
        files.write_json(args.json, document)
    console.print(table(document["models"]))
    return 0 if document["models"] else 1


if __name__ == "__main__":
    sys.exit(main())
