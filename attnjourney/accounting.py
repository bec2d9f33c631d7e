"""What a model costs: parameters, FLOPs of training and of decoding, bytes of its cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ._dtypes import BYTE_DTYPES
from .nn import CausalSelfAttention, GroupedQueryAttention, MultiheadLatentAttention


@dataclass(frozen=True)
class Row:
    """One kind of part, all `count` of them together."""

    name: str
    count: int
    parameters: int
    forward_flops: int
    backward_flops: int
    decode_flops_per_token: int
    cache_bytes_per_token: int
    state_bytes_per_sequence: int


@dataclass(frozen=True)
class Account:
    """The result of `account`. `as_dict()` for programs; print it with rich, or `print(account)`, for a table."""

    seq_len: int
    batch: int
    dtype: str
    parts: tuple[Row, ...]
    parameters: int
    forward_flops: int
    backward_flops: int
    decode_flops_per_token: int
    cache_bytes_per_token: int
    state_bytes_per_sequence: int

    def cache_bytes(self, shared_prefix: int = 0) -> int:
        """Of caches and states of all sequences together at seq_len tokens. The first shared_prefix tokens are the same
        in all of them, in blocks of a PagedKVCache that are held once; a state cannot be shared.

        Raises ValueError for a number that is not from 0 to seq_len.
        """
        if not 0 <= shared_prefix <= self.seq_len:
            raise ValueError(
                f"shared_prefix: expected a number from 0 to {self.seq_len} (seq_len), got {shared_prefix}"
            )
        tokens = shared_prefix + self.batch * (self.seq_len - shared_prefix)
        return tokens * self.cache_bytes_per_token + self.batch * self.state_bytes_per_sequence

    def as_dict(self) -> dict:
        """All numbers; `parts` is a list of dicts."""
        return {**asdict(self), "parts": [asdict(row) for row in self.parts]}

    def __rich__(self):
        from rich.table import Table

        title = f"batch {self.batch} x {self.seq_len} tokens, {self.dtype}"
        table = Table(title=title, show_footer=True)
        total = [f"{getattr(self, name):,}" for name, _ in COLUMNS]
        table.add_column("part", "total")
        table.add_column("count", "", justify="right")
        for (_, header), number in zip(COLUMNS, total):
            table.add_column(header, number, justify="right")
        for row in self.parts:
            table.add_row(row.name, str(row.count), *(f"{getattr(row, name):,}" for name, _ in COLUMNS))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


COLUMNS = (
    ("parameters", "parameters"),
    ("forward_flops", "forward FLOPs"),
    ("backward_flops", "backward FLOPs"),
    ("decode_flops_per_token", "decode FLOPs / token"),
    ("cache_bytes_per_token", "cache bytes / token"),
    ("state_bytes_per_sequence", "state bytes / sequence"),
)


def account(
    model: nn.Module | Mapping | object, seq_len: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Account:
    """Counts what a model costs at a sequence length.

    FLOPs are those of matrix products, 2 for a multiplication and an addition, as torch.utils.flop_counter counts them:
    a causal layer counts as a full one, and the backward of attention recomputes the scores. Decoding is one
    token of one sequence after seq_len cached ones; latent attention decodes in its latent space. Linear attention with
    gates and the delta rule counts as `gated_linear_attention` does, its states in float32. Token-sparse attention
    counts the index_topk keys a row sees, as `sparse_attention` does, and its indexer all past ones, as
    `lightning_indexer` does; the indexer's keys are in the cache, and its training, by a loss of its own, is left out.
    Besides the attention layers, a module's nn.Linear layers count with every position; other layers count as
    parameters alone.

    Args:
        model: a module (parameters shared by layers count once), or a configuration of transformers, or a dict with
            the same keys: model_type gpt2, llama, mistral, qwen2, qwen3, qwen3_next, qwen3_5_text, deepseek_v3,
            deepseek_v32 or glm_moe_dsa (active experts in FLOPs).
        seq_len: tokens of a sequence.
        batch: sequences.
        dtype: of the cache; one of bytes (int8, float8_e4m3fn) has its scales beside it.

    Returns:
        Account: `parts` and their sums, as attributes, as_dict(), or a table.

    Raises:
        ValueError: a model_type or a number that is not known. TypeError: neither module nor configuration.
    """
    for name, number in (("seq_len", seq_len), ("batch", batch)):
        if number < 1:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    if isinstance(model, nn.Module):
        parts = parts_of_module(model)
    elif isinstance(model, Mapping) or hasattr(model, "model_type"):
        parts = parts_of_config(model)
    else:
        raise TypeError(f"model: expected a torch.nn.Module, a configuration or a dict, got {type(model).__name__}")
    rows = tuple(_row(part, seq_len, batch, dtype) for part in parts)
    sums = {name: sum(getattr(row, name) for row in rows) for name, _ in COLUMNS}
    return Account(seq_len, batch, str(dtype).removeprefix("torch."), rows, **sums)


def _row(part: Part, seq_len: int, batch: int, dtype: torch.dtype) -> Row:
    tokens, a, s, chooses = batch * seq_len, part.attention, part.state, part.indexer
    forward, backward = 2 * part.multiplied * tokens, 4 * part.multiplied * tokens
    decode = 2 * part.multiplied
    numbers = rows = 0
    if a is not None:
        seen = seq_len if a.topk is None else min(a.topk, seq_len)
        pairs = 2 * tokens * seen * a.heads
        forward += pairs * (a.qk_dim + a.v_dim)
        backward += pairs * (3 * a.qk_dim + 2 * a.v_dim)
        decode += 2 * seen * a.heads * a.decode_width
        numbers, rows = a.cached, a.rows
    if chooses is not None:
        forward += tokens * (seq_len + 1) * chooses.heads * chooses.dim
        backward = 0
        decode += 2 * seq_len * chooses.heads * chooses.dim
        numbers, rows = chooses.dim, 1
    cached = numbers * dtype.itemsize + (rows * 4 if dtype in BYTE_DTYPES else 0)  # a float32 scale each
    held = 0
    if s is not None:
        product = 2 * s.heads * s.qk_dim * s.v_dim  # with a state: three a token, eight backwards
        forward += 3 * product * tokens
        backward += 8 * product * tokens
        decode += 3 * product
        held = 4 * s.heads * s.qk_dim * s.v_dim
    counts = (part.parameters, forward, backward, decode, cached, held)
    return Row(part.name, part.count, *(part.count * n for n in counts))


# ---- models as parts: what each holds, multiplies and caches


@dataclass(frozen=True)
class AttentionPart:
    heads: int
    qk_dim: int
    v_dim: int
    cached: int  # numbers per token,
    rows: int  # in so many rows: keys and values of each head, or latents
    decode_width: int  # multiplications per head and cached token
    topk: int | None = None  # the most keys that a row sees


@dataclass(frozen=True)
class IndexerPart:
    """Heads over one key head, which score the past of each row."""

    heads: int
    dim: int


@dataclass(frozen=True)
class StatePart:
    """Linear attention with the delta rule: a state of qk_dim x v_dim for each head."""

    heads: int
    qk_dim: int
    v_dim: int


@dataclass(frozen=True)
class Part:
    name: str
    parameters: int
    multiplied: int  # numbers of the weight matrices that every token is multiplied with
    attention: AttentionPart | None = None
    count: int = 1
    state: StatePart | None = None
    indexer: IndexerPart | None = None


def grouped(heads: int, kv_heads: int, head_dim: int) -> AttentionPart:
    return AttentionPart(heads, head_dim, head_dim, 2 * kv_heads * head_dim, 2 * kv_heads, 2 * head_dim)


def latent(heads: int, kv_lora_rank: int, nope: int, rope: int, v: int, topk: int | None = None) -> AttentionPart:
    # decoding: scores against latent and rotary key, then a sum of latents
    return AttentionPart(heads, nope + rope, v, kv_lora_rank + rope, 1, 2 * kv_lora_rank + rope, topk)


# ---- modules


def _attention_of(module: nn.Module) -> AttentionPart | None:
    if isinstance(module, nn.MultiheadAttention):
        return grouped(module.num_heads, module.num_heads, module.head_dim)
    if isinstance(module, CausalSelfAttention):
        return grouped(module.num_heads, module.num_heads, module.out_proj.in_features // module.num_heads)
    if isinstance(module, GroupedQueryAttention):
        return grouped(module.num_heads, module.num_kv_heads, module.head_dim)
    if isinstance(module, MultiheadLatentAttention):
        dims = (module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim)
        return latent(module.num_heads, module.kv_b_proj.in_features, *dims)
    return None


def parts_of_module(model: nn.Module) -> list[Part]:
    """Attention layers of a kind together, then other linear layers, then whatever else has parameters. A parameter
    that several layers share belongs to the first; FLOPs belong to every use."""
    seen: set[int] = set()
    inside: set[int] = set()  # modules that belong to an attention layer

    def own(module: nn.Module, recurse: bool = True) -> int:
        fresh = {id(p): p.numel() for p in module.parameters(recurse) if id(p) not in seen}
        seen.update(fresh)
        return sum(fresh.values())

    parts: list[Part] = []
    linear_parameters = linear_multiplied = rest = 0
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in inside and _attention_of(module) is None:
            continue
        attention = _attention_of(module)
        if attention is not None:
            inside.update(id(m) for m in module.modules())
            matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)
            kind = type(module).__name__
            parts.append(Part(f"{kind} {name}".strip(), own(module), matrices, attention))
        elif isinstance(module, nn.Linear):
            linear_parameters += own(module)
            linear_multiplied += module.weight.numel()
        else:
            rest += own(module, recurse=False)
    parts = _together(parts)
    if linear_multiplied:
        parts.append(Part("other linear layers", linear_parameters, linear_multiplied))
    if rest:
        parts.append(Part("other parameters", rest, 0))
    return parts


def _together(parts: list[Part]) -> list[Part]:
    """Parts that differ in their name alone become one with a count."""
    kinds: dict[Part, Part] = {}
    for part in parts:
        key = replace(part, name=part.name.split()[0])
        first = kinds.get(key)
        kinds[key] = part if first is None else replace(first, count=first.count + 1)
    return list(kinds.values())


# ---- configurations


class _Config:
    """The keys of a configuration or a dict, with defaults for those that may be missing or None."""

    def __init__(self, config: Mapping | object):
        self.config = config

    def __call__(self, name: str, default: Any = None) -> Any:
        c = self.config
        value = c.get(name) if isinstance(c, Mapping) else getattr(c, name, None)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"model: expected a configuration with {name}")
        return value

    def has(self, name: str) -> bool:
        c = self.config
        return (c.get(name) if isinstance(c, Mapping) else getattr(c, name, None)) is not None


def _gpt2(c: _Config) -> list[Part]:
    d, layers, vocab = c("n_embd"), c("n_layer"), c("vocab_size")
    hidden = c("n_inner", 4 * d)
    return [
        Part("attention", 4 * d * d + 4 * d, 4 * d * d, grouped(c("n_head"), c("n_head"), d // c("n_head")), layers),
        Part("MLP", 2 * d * hidden + hidden + d, 2 * d * hidden, None, layers),
        Part("norms", 2 * d * (2 * layers + 1), 0),
        Part("position embedding", c("n_positions") * d, 0),
        Part("token embedding and output", vocab * d, vocab * d),  # one tied matrix
    ]


def _output(c: _Config, d: int) -> list[Part]:
    vocab = c("vocab_size") * d
    if c("tie_word_embeddings", False):
        return [Part("token embedding and output", vocab, vocab)]
    return [Part("token embedding", vocab, 0), Part("output", vocab, vocab)]


def _llama(c: _Config) -> list[Part]:
    """llama, mistral, qwen2, qwen3."""
    kind, d, layers, heads = c("model_type"), c("hidden_size"), c("num_hidden_layers"), c("num_attention_heads")
    kv_heads, head_dim = c("num_key_value_heads", heads), c("head_dim", d // heads)
    matrices = d * head_dim * (2 * heads + 2 * kv_heads)
    small = head_dim * (heads + 2 * kv_heads) if kind == "qwen2" or c("attention_bias", False) else 0
    small += d if kind != "qwen2" and c("attention_bias", False) else 0  # o_proj's bias
    small += 2 * head_dim if kind == "qwen3" else 0  # norms of query and key
    hidden = c("intermediate_size")
    mlp_bias = 2 * hidden + d if c("mlp_bias", False) else 0
    return [
        Part("attention", matrices + small, matrices, grouped(heads, kv_heads, head_dim), layers),
        Part("MLP", 3 * d * hidden + mlp_bias, 3 * d * hidden, None, layers),
        Part("norms", d * (2 * layers + 1), 0),
        *_output(c, d),
    ]


def _qwen_hybrid(c: _Config) -> list[Part]:
    """qwen3_next, qwen3_5_text: gated delta rule in most layers, softmax attention with a gate in the others."""
    d, layers, heads, head_dim = c("hidden_size"), c("num_hidden_layers"), c("num_attention_heads"), c("head_dim")
    kv_heads, types = c("num_key_value_heads"), c("layer_types")
    linear = sum(kind == "linear_attention" for kind in types)
    keys, values = c("linear_num_key_heads"), c("linear_num_value_heads")
    key_dim, value_dim = c("linear_key_head_dim"), c("linear_value_head_dim")
    mixed = 2 * keys * key_dim + values * value_dim  # what the convolution takes: queries, keys and values
    rule = d * (mixed + values * value_dim + 2 * values) + values * value_dim * d
    small = mixed * c("linear_conv_kernel_dim") + 2 * values + value_dim  # convolution, A and dt, norm
    full = d * head_dim * (3 * heads + 2 * kv_heads)  # queries with gates
    parts = [
        Part("gated delta rule", rule + small, rule, None, linear, StatePart(values, key_dim, value_dim)),
        Part("attention", full + 2 * head_dim, full, grouped(heads, kv_heads, head_dim), layers - linear),
        Part("norms", d * (2 * layers + 1), 0),
        *_output(c, d),
    ]
    if not c.has("num_experts"):
        hidden = 3 * d * c("intermediate_size")
        return [*parts, Part("MLP", hidden, hidden, None, layers)]
    if c("decoder_sparse_step", 1) != 1 or c("mlp_only_layers", []):
        raise ValueError("model: expected a mixture of experts in every layer")
    expert, routed = 3 * d * c("moe_intermediate_size"), c("num_experts")
    shared = 3 * d * c("shared_expert_intermediate_size") + d  # and its gate
    active = c("num_experts_per_tok") * expert + shared + routed * d
    return [*parts, Part("mixture of experts", routed * expert + shared + routed * d, active, None, layers)]


def _deepseek(c: _Config) -> list[Part]:
    """deepseek_v3, and with an indexer deepseek_v32, glm_moe_dsa."""
    d, layers, heads, kv_lora = c("hidden_size"), c("num_hidden_layers"), c("num_attention_heads"), c("kv_lora_rank")
    nope, rope, v = c("qk_nope_head_dim"), c("qk_rope_head_dim"), c("v_head_dim")
    q_lora = c("q_lora_rank") if c.has("q_lora_rank") else 0
    queries = heads * (nope + rope)
    matrices = q_lora * (d + queries) if q_lora else d * queries
    matrices += d * (kv_lora + rope) + kv_lora * heads * (nope + v) + heads * v * d
    biases = q_lora + kv_lora + rope + d if c("attention_bias", False) else 0
    dense = min(c("first_k_dense_replace", 0), layers)
    if c.has("mlp_layer_types"):
        dense = list(c("mlp_layer_types")).count("dense")
    expert, routed = 3 * d * c("moe_intermediate_size"), c("n_routed_experts")
    shared = c("n_shared_experts", 0) * expert
    mixture = routed * expert + shared + routed * d
    active = c("num_experts_per_tok") * expert + shared + routed * d
    sparse = c("model_type") != "deepseek_v3"
    attention = latent(heads, kv_lora, nope, rope, v, c("index_topk") if sparse else None)
    return [
        Part("latent attention", matrices + biases, matrices, attention, layers),
        *([_indexer(c, d, layers)] if sparse else []),
        Part("norms of the latents", (q_lora + kv_lora) * layers, 0),
        Part("MLP", 3 * d * c("intermediate_size"), 3 * d * c("intermediate_size"), None, dense),
        Part("mixture of experts", mixture, active, None, layers - dense),
        Part("norms", d * (2 * layers + 1), 0),
        *_output(c, d),
    ]


def _indexer(c: _Config, d: int, layers: int) -> Part:
    heads, dim = c("index_n_heads"), c("index_head_dim")
    matrices = c("q_lora_rank") * heads * dim + d * (dim + heads)
    own = layers  # the others choose as the layer before them
    if c.has("indexer_types"):
        own = list(c("indexer_types")).count("full")
    elif c.has("index_topk_pattern"):
        own = sum(kind in ("F", "full") for kind in c("index_topk_pattern"))
    elif c.has("index_topk_freq"):
        first, every = c("index_skip_topk_offset", 2) - 1, max(1, c("index_topk_freq"))
        own = sum(max(0, i - first) % every == 0 for i in range(layers))
    return Part("lightning indexer", matrices + 2 * dim, matrices, count=own, indexer=IndexerPart(heads, dim))


CONFIGS: dict[str, Callable[[_Config], list[Part]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_next": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "glm_moe_dsa": _deepseek,
}


def parts_of_config(config: Mapping | object) -> list[Part]:
    c = _Config(config)
    kind = c("model_type")
    if kind not in CONFIGS:
        raise ValueError(f"model: expected a model_type of {', '.join(CONFIGS)}, got {kind!r}")
    return [part for part in CONFIGS[kind](c) if part.count]
