"""python -m examples.serve: many requests at once over one pool of blocks, beside the same requests one by one.

--model mha, gpt, gqa, mla: the demo's, with the weights of its checkpoint where `make demo` has left one.
--model llama: a Llama of transformers, of any folder given by --weights, else small with random weights; beside
transformers' own continuous batching (generate_batch), and its generate in one batch.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MODELS = ("mha", "gpt", "gqa", "mla", "llama")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="gqa")
    add("--weights", type=Path, help="of llama: a folder of transformers")
    add("--checkpoints", type=Path, default=Path("demo-output/checkpoints"), help="of the demo (%(default)s)")
    add("--requests", type=int, default=32)
    add("--batch", type=int, default=8, help="sequences at once (%(default)s)")
    add("--prompt", type=int, default=64, help="tokens of a prompt (%(default)s)")
    add("--shared", type=int, default=48, help="tokens that all prompts begin with (%(default)s)")
    add("--new", type=int, default=32, help="tokens of an answer, at most; they differ (%(default)s)")
    add("--rows", type=int, default=256, help="tokens of a step (%(default)s)")
    add("--blocks", type=int, help="of the pool; by default what the batch needs at full length")
    add("--dtype", choices=("int8", "float8_e4m3fn"), help="of caches of bytes")
    add("--turns", type=int, default=2, help="of everyone; the best counts (%(default)s)")
    for name in ("context", "layers", "embed", "heads"):
        add(f"--{name}", type=int, metavar="N", default=argparse.SUPPRESS, help="of the demo's models")
    return parser.parse_args(argv)


def requests_of(args: argparse.Namespace, vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts with a common beginning, and answers of half of --new to --new tokens."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: torch.randint(3, vocabulary, (n,), generator=generator).tolist()  # noqa: E731
    common = draw(min(args.shared, args.prompt - 1))
    counts = torch.randint(max(1, args.new // 2), args.new + 1, (args.requests,), generator=generator).tolist()
    return [(common + draw(args.prompt - len(common)), count) for count in counts]


def demo(args: argparse.Namespace) -> tuple[list, dict[str, Callable[[], list]], Callable[[], str]]:
    """Requests, who serves them, and what the caches hold."""
    from examples import checkpoint
    from examples.config import Config
    from examples.generate import generate
    from examples.model import GPT, VARIANTS
    from examples.served_models import ServedGPT

    sizes = {n: vars(args)[n] for n in ("context", "layers", "embed", "heads") if n in vars(args)}
    state = None if sizes else checkpoint.load(args.checkpoints / f"{args.model}.pt")
    config = Config(**(sizes if state is None else state["identity"]["config"]))
    if config.problem():
        raise ValueError(config.problem())
    model = GPT(VARIANTS[args.model], config).eval()
    if state is not None:
        model.load_state_dict(state["model"])
    wanted = requests_of(args, 256)

    def alone() -> list:
        return [list(generate(model, config, bytes(prompt), count)[0]) for prompt, count in wanted]

    served = lambda: ServedGPT(model, config, args.batch, num_blocks=args.blocks, dtype=bytes_of(args))  # noqa: E731
    ours, held = batching(args, served, wanted)
    return wanted, {"continuous batching": ours, "one by one": alone}, held


def llama(args: argparse.Namespace) -> tuple[list, dict[str, Callable[[], list]], Callable[[], str]]:
    import transformers

    from examples.served_models import ServedTransformer

    transformers.logging.set_verbosity_error()
    if args.weights is not None:
        load = lambda name: transformers.AutoModelForCausalLM.from_pretrained(args.weights, attn_implementation=name)  # noqa: E731
    else:
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            initializer_range=0.1,
        )  # fmt: skip

        def load(name: str) -> Any:
            torch.manual_seed(0)
            return transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name)

    model, theirs = load("eager").eval(), load("sdpa").eval()
    wanted = requests_of(args, model.config.vocab_size)
    capacity = args.prompt + args.new
    greedy: dict[str, Any] = dict(do_sample=False, eos_token_id=None, pad_token_id=0)

    def alone() -> list:
        out = []
        for prompt, count in wanted:
            given = torch.tensor([prompt])
            tokens = theirs.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, **greedy)
            out.append(tokens[0, len(prompt) :].tolist())
        return out

    def batches() -> list:
        out = []
        for i in range(0, len(wanted), args.batch):
            part = wanted[i : i + args.batch]
            given = torch.tensor([prompt for prompt, _ in part])
            longest = max(count for _, count in part)
            tokens = theirs.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=longest, **greedy)
            out += [row[:n].tolist() for row, (_, n) in zip(tokens[:, args.prompt :], part)]
        return out

    config = transformers.GenerationConfig(**{**greedy, "eos_token_id": -1})
    pool = args.blocks or args.batch * -(-capacity // 16)
    sizes = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=pool, max_batch_tokens=args.rows, max_requests_per_batch=args.batch
    )

    def theirs_continuous() -> list:
        answers: dict[str, list] = {}
        context = theirs.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=sizes, block=True, timeout=5, warmup=False
        )
        with context as manager:
            names = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in wanted]
            while len(answers) < len(names) and manager.is_running():
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[result.request_id] = result.generated_tokens
        return [answers.get(name, []) for name in names]

    served = lambda: ServedTransformer(model, args.batch, capacity, num_blocks=args.blocks, dtype=bytes_of(args))  # noqa: E731
    ours, held = batching(args, served, wanted)
    everyone = {"continuous batching": ours, "one by one": alone, "generate in batches": batches}
    return wanted, everyone | {"transformers' generate_batch": theirs_continuous}, held


def bytes_of(args: argparse.Namespace) -> torch.dtype | None:
    return None if args.dtype is None else getattr(torch, args.dtype)


def batching(args: argparse.Namespace, served: Callable[[], Any], wanted: list) -> tuple[Callable, Callable[[], str]]:
    from examples.serving import Engine

    last: list[Engine] = []

    def serve() -> list:
        engine = Engine(served(), rows=args.rows)
        last[:] = [engine]
        requests = [engine.submit(prompt, count) for prompt, count in wanted]
        engine.run()
        return [request.result(0) for request in requests]

    def held() -> str:
        engine, whole = last[0], sum(len(prompt) for prompt, _ in wanted)
        size = sum(cache.nbytes for cache in engine.model.caches) / 2**20
        return (
            f"{engine.steps} steps; {engine.blocks} blocks, {size:.1f} MiB; {engine.adopted} of {whole} tokens of "
            f"prompts were there; {engine.preempted} started again"
        )

    return serve, held


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        wanted, everyone, held = (llama if args.model == "llama" else demo)(args)
        tokens, best, answers = sum(count for _, count in wanted), {}, {}
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # others lengthen the latter
        for _ in range(args.turns):
            for name, serve in everyone.items():
                start = clock()
                answers[name] = serve()
                best[name] = min(best.get(name, float("inf")), clock() - start)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    for name, seconds in best.items():
        same = sum(a == b for a, b in zip(answers[name], answers["one by one"]))
        note = "" if name == "one by one" else f"; {same} of {len(wanted)} answers the same"
        print(f"{name}: {tokens / seconds:.0f} tokens/s{note}")
    print(held())
    return 0


if __name__ == "__main__":
    sys.exit(main())
