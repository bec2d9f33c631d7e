"""The one list of what is measured: shapes, options, FLOP and byte counts."""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass

import torch

from . import blocks, functions, layers, options

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = ("forward", "backward", "both")
DERIVATIVES = ("jvp", "double_backward")  # of the cases that list them


BYTE_CACHES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """One attention call, or one layer where `layer` is set; all lengths and counts as in the operators' docstrings."""

    name: str
    group: str
    batch: int = 1
    heads: int = 8
    kv_heads: int = 0  # 0: as heads
    q_len: int = 1024
    kv_len: int = 0  # 0: as q_len
    head_dim: int = 64
    v_head_dim: int = 0  # 0: as head_dim
    dtype: str = "fp32"
    causal: bool = False
    mask: str = (
        ""  # "float", "float-grad" (the mask is differentiated too), "padding" (bool, the last 3/8 of the keys hidden)
        # "bigbird" (bool, blocks of `extent`; ours takes a BlockMask)
    )
    dropout: float = 0.0
    layout: str = (
        "bhnd"  # "bnhd": views of (batch, length, heads, dim); "packed": of one (batch, length, 3, heads, dim)
    )
    layer: str = ""  # "mha", "gpt", "gqa", "mla": projections and attention, width heads * head_dim
    function: str = ""  # "linear", "gated_delta", "kda", "infini", "longformer", "sparse", ...: see functions.py
    extent: int = 0  # window, segment or block (of option "window": keys that a row sees)
    # The last rows of sequences over a cache: "dense", "paged", "ring", or "latent" (the absorbed form of multi-head
    # latent attention: one key head, whose first v_head_dim numbers are the value)
    decode: str = ""
    option: str = ""  # of attention: see options.py
    deterministic: bool = False  # under torch.use_deterministic_algorithms
    scaling: bool = False  # measure one thread and all threads, and print the quotient
    frozen: bool = False  # key and value get no gradient
    passes: tuple[str, ...] = PASSES
    check: bool = True  # compare with fp64
    only_memory: bool = False  # measure the peak memory alone
    quick: bool = False  # belongs to --quick

    def __post_init__(self):
        for field, value in (("kv_heads", self.heads), ("kv_len", self.q_len), ("v_head_dim", self.head_dim)):
            if not getattr(self, field):
                object.__setattr__(self, field, value)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def visible_keys(self) -> int:
        """Keys left by a padding mask."""
        return self.kv_len - self.kv_len * 3 // 8 if self.mask == "padding" else self.kv_len

    @property
    def latents(self) -> bool:
        """Values are the first v_head_dim numbers of their keys."""
        return self.decode == "latent" or self.function == "sparse_latents"

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head; causal is top-left aligned, as F.scaled_dot_product_attention."""
        if self.mask == "bigbird":
            return blocks.pairs(self)
        if self.option and options.OPTIONS[self.option].pairs:
            return options.OPTIONS[self.option].pairs(self)
        keys = self.visible_keys
        if not self.causal:
            return self.q_len * keys
        full = max(0, self.q_len - keys)  # rows that see every key
        rows = self.q_len - full
        return rows * (rows + 1) // 2 + full * keys

    def flops(self, which: str) -> int:
        """Useful floating-point operations of a pass: hidden keys do not count, recomputation in backward does.

        Forward: QK^T and PV, 2 (D + Dv) a pair. Backward: QK^T again, dP = dO V^T, dV, dQ, dK, 2 (3 D + 2 Dv) a pair;
        without dV and dK where they are frozen. Jvp: the forward, then QK^T again, its change (2 D) and that of the
        output (2 Dv). Double backward: the change of the output as there, QK^T, its change, dP and its change, the
        changes of dV (Dv), dQ and dK (2 D each).
        """
        if which == "both":
            return self.flops("forward") + self.flops("backward")
        d, dv = self.head_dim, self.v_head_dim
        if self.layer:
            return layers.LAYERS[self.layer].flops(self, which)
        if self.function:
            return functions.FUNCTIONS[self.function].flops(self, which)
        jvp = 3 * d + 2 * dv
        products = {
            "forward": d + dv,
            "backward": 2 * d + dv if self.frozen else 3 * d + 2 * dv,
            "jvp": d + dv + jvp,
            "double_backward": jvp + 7 * d + 3 * dv,
        }
        per_pair = 2 * products[which]
        return self.batch * self.heads * self.pairs * per_pair

    def bytes(self, which: str) -> int:
        """Bytes that must move at least: each input read once, each output written once."""
        if which == "both":
            return self.bytes("forward") + self.bytes("backward")
        if which in DERIVATIVES:  # everything with its tangent
            return 2 * self.bytes("forward" if which == "jvp" else "backward")
        size = self.torch_dtype.itemsize
        if self.layer:
            return size * layers.LAYERS[self.layer].numel(self, which)
        query = self.batch * self.heads * self.q_len * self.head_dim
        out = self.batch * self.heads * self.q_len * self.v_head_dim
        key = self.batch * self.kv_heads * self.kv_len * self.head_dim
        value = self.batch * self.kv_heads * self.kv_len * self.v_head_dim * (not self.latents)
        if self.decode in BYTE_CACHES:  # with a float32 scale for each key and each value
            return (query + out) * size + key + value + 8 * self.batch * self.kv_heads * self.kv_len
        mask = self.batch * self.heads * self.q_len * self.kv_len * size if self.mask.startswith("float") else 0
        if which == "forward":
            return (query + key + value + out) * size + mask
        return (2 * (query + key + value) + 2 * out) * size + mask * (2 if self.mask == "float-grad" else 1)

    @property
    def memory_bound(self) -> bool:
        """Few query rows against more keys and values than caches hold: DRAM may set the pace."""
        keys = self.batch * self.kv_heads * self.kv_len * (self.head_dim + self.v_head_dim) * self.torch_dtype.itemsize
        return (
            not (self.layer or self.function)
            and (self.q_len * self.heads // self.kv_heads <= 16 or bool(self.decode))
            and keys >= 16 << 20
        )

    def shape(self) -> dict:
        """The fields that matter to a reader of the JSON file."""
        names = "batch heads kv_heads q_len kv_len head_dim v_head_dim dtype causal mask dropout layout layer decode"
        names += " function extent option" + (" deterministic" if self.deterministic else "")
        return {name: getattr(self, name) for name in names.split()}

    def tiny(self) -> Case:
        """The same kind of case at a size that takes microseconds, for tests."""
        group = min(4, self.heads // self.kv_heads)
        d = 16 if self.head_dim == self.v_head_dim else 24
        return dataclasses.replace(
            self, batch=min(2, self.batch), heads=group * min(2, self.kv_heads), kv_heads=min(2, self.kv_heads),
            q_len=min(24, self.q_len), kv_len=min(24, self.kv_len), head_dim=d, v_head_dim=16,
            extent=min(self.extent, 16 if self.mask else 4),
            only_memory=False, check=True,
        )  # fmt: skip


def _dense() -> list[Case]:
    """fp32, bf16, fp16; full and causal; head sizes 64 and 128; lengths 128 to 4096."""
    quick = {("fp32", 64, 512, "causal"), ("fp32", 64, 1024, "full"), ("fp32", 64, 1024, "causal")}
    quick |= {("fp32", 128, 1024, "causal"), ("bf16", 64, 512, "causal")}
    cases = []
    for dtype in ("fp32", "bf16", "fp16"):
        for d in (64, 128):
            for n in (128, 512, 1024, 2048, 4096) if dtype == "fp32" else (128, 512, 1024, 4096):
                for causal in (False, True):
                    heads = 8 if n <= 1024 else 2 if dtype == "fp32" else 1
                    kind = "causal" if causal else "full"
                    cases.append(
                        Case(
                            f"{dtype}-d{d}-n{n}-{kind}", "dense", heads=heads, q_len=n, head_dim=d, dtype=dtype,
                            causal=causal, quick=(dtype, d, n, kind) in quick,
                        )
                    )  # fmt: skip
    return cases


def _decode() -> list[Case]:
    """One new token over a cache of 1k to 32k keys, multi-head and grouped heads; batch 16 up to 4k keys."""
    quick = {("bf16", 1, 32, 8192), ("fp32", 1, 8, 8192)}
    cases = []
    for dtype in ("fp32", "bf16", "fp16"):
        for batch, lengths in ((1, (1024, 8192, 32768)), (16, (1024, 4096))):
            for heads in (8, 32):
                for n in lengths:
                    name = f"decode-{dtype}-b{batch}-h{heads}.8-s{n}"
                    cases.append(
                        Case(
                            name, "decode", batch, heads, 8, q_len=1, kv_len=n, head_dim=128, dtype=dtype,
                            decode="dense",
                            passes=("forward",), quick=(dtype, batch, heads, n) in quick,
                        )
                    )  # fmt: skip
    for dtype in ("fp32", "bf16"):
        for place in ("paged", "ring"):
            cases.append(Case(f"decode-{dtype}-b4-h8.8-s8192-{place}", "decode", 4, 8, 8, q_len=1, kv_len=8192,
                              head_dim=128, dtype=dtype, decode=place, passes=("forward",)))  # fmt: skip
        for heads, n in ((16, 32768), (128, 8192)):  # DeepSeek-V2-Lite's and V3's
            cases.append(Case(f"decode-{dtype}-mla-h{heads}-s{n}", "decode", 1, heads, 1, q_len=1, kv_len=n,
                              head_dim=576, v_head_dim=512, dtype=dtype, decode="latent",
                              passes=("forward",)))  # fmt: skip
    for heads in (8, 64):
        for kind in BYTE_CACHES:
            cases.append(Case(f"decode-bf16-b1-h{heads}.8-s32768-{kind}", "decode", 1, heads, 8, q_len=1, kv_len=32768,
                              head_dim=128, dtype="bf16", decode=kind, check=False,
                              passes=("forward",)))  # fmt: skip
    return cases


def _few() -> list[Case]:
    """Few query rows of `attention` itself: decode's kernels up to some of them."""
    return [
        Case(f"few-{dtype}-h8.{kv_heads}-l{rows}-s{keys}", "few", kv_heads=kv_heads, q_len=rows, kv_len=keys,
             dtype=dtype, passes=("forward",))
        for dtype in ("fp32", "bf16") for kv_heads in (8, 2) for keys in (512, 2048) for rows in (1, 4, 8)
    ]  # fmt: skip


def _linear() -> list[Case]:
    """Causal linear attention from where softmax attention is faster to where it is not."""
    cases = []
    for dtype, lengths in (("fp32", (128, 256, 512, 1024, 4096, 16384)), ("bf16", (256, 512, 1024, 4096, 16384))):
        for n in lengths:
            cases.append(
                Case(
                    f"linear-{dtype}-n{n}", "linear", heads=2, q_len=n, dtype=dtype, function="linear", check=n <= 4096
                )
            )
    return cases


def _gated() -> list[Case]:
    """The gated delta rule and Kimi delta attention."""
    shape = dict(heads=2, head_dim=128)
    return [
        Case(f"{name}-{dtype}-n{n}", "gated", q_len=n, dtype=dtype, function=name, check=n <= 1024, **shape)
        for name in ("gated_delta", "kda") for dtype in ("fp32", "bf16") for n in (1024, 4096, 16384)
    ]  # fmt: skip


def _options() -> list[Case]:
    """Options beside the plain case of the same shape; windows, padding and a packed batch."""
    cases = []
    for dtype in ("fp32", "bf16"):
        for n in (1024, 4096):
            heads = 4 if n == 1024 else 1
            for option, causal in (("", False), ("", True), ("softcap", False), ("sinks", False), ("alibi", False),
                                   ("alibi", True)):  # fmt: skip
                name = f"options-{dtype}-n{n}-{option or 'plain'}{'-causal' if causal else ''}"
                cases.append(Case(name, "options", heads=heads, q_len=n, dtype=dtype, causal=causal, option=option))
        for mask in ("float", "float-grad"):
            cases.append(Case(f"options-{dtype}-n1024-{mask}", "options", heads=4, dtype=dtype, mask=mask))
        cases.append(Case(f"options-{dtype}-n1024-dropout", "options", heads=4, dtype=dtype, dropout=0.1))
        cases.append(Case(f"window128-{dtype}-n4096", "options", heads=2, q_len=4096, dtype=dtype, option="window",
                          extent=128))  # fmt: skip
        cases.append(Case(f"lengths-{dtype}-b4-n1024", "options", batch=4, heads=2, dtype=dtype, option="lengths"))
        for causal in (False, True):
            name = f"ragged-{dtype}-n4096{'-causal' if causal else ''}"
            cases.append(Case(name, "options", heads=2, q_len=4096, dtype=dtype, causal=causal, option="ragged",
                              layout="bnhd"))  # fmt: skip
    return cases


CASES = _dense() + _decode() + _few() + _linear() + _gated() + _options() + [
    # head sizes
    Case("fp32-d80-n1024-full", "dims", heads=4, head_dim=80),
    Case("fp32-d96-n1024-full", "dims", heads=4, head_dim=96),
    Case("fp32-d64-dv128-n1024-full", "dims", heads=4, v_head_dim=128),
    Case("fp32-d192-dv128-n1024-causal", "dims", heads=4, head_dim=192, v_head_dim=128, causal=True, quick=True),
    Case("bf16-d192-dv128-n1024-causal", "dims", heads=4, head_dim=192, v_head_dim=128, causal=True, dtype="bf16"),
    # strided views, read in place
    Case("fp32-d64-n1024-causal-bnhd", "views", causal=True, layout="bnhd"),
    Case("fp32-d64-n1024-full-bnhd", "views", layout="bnhd"),
    Case("fp32-d64-n1024-causal-packed", "views", causal=True, layout="packed", quick=True),
    Case("bf16-d128-n1024-causal-packed", "views", causal=True, layout="packed", dtype="bf16", head_dim=128),
    # grouped heads
    Case("decode-bf16-b1-h64.8-s8192", "decode", heads=64, kv_heads=8, q_len=1, kv_len=8192, head_dim=128, dtype="bf16",
         decode="dense", passes=("forward",)),
    Case("fp32-gqa8-d64-n512-causal", "grouped", kv_heads=1, q_len=512, causal=True, quick=True),
    Case("fp32-gqa4-d128-n1024-causal", "grouped", kv_heads=2, head_dim=128, causal=True),
    Case("fp32-mqa16-d64-n512-causal", "grouped", heads=16, kv_heads=1, q_len=512, causal=True),
    Case("bf16-gqa8-d64-n512-causal", "grouped", kv_heads=1, q_len=512, causal=True, dtype="bf16"),
    # short sequences
    Case("fp32-b4-h12-n197-d64", "short", batch=4, heads=12, q_len=197),
    Case("fp32-b64-h8-n32-d64", "short", batch=64, q_len=32),
    Case("fp32-b1-h8-n77-d64", "short", q_len=77),
    # the cost of a call
    Case("fp32-b1-h8-n16-d64", "tiny", q_len=16, quick=True),
    Case("fp32-b1-h1-n4-d8", "tiny", heads=1, q_len=4, head_dim=8),
    Case("layer-mha-b1-n16", "tiny", heads=4, q_len=16, layer="mha"),
    Case("layer-gpt-b1-n16", "tiny", heads=4, q_len=16, layer="gpt", causal=True),
    Case("layer-gqa-b1-n16", "tiny", heads=4, kv_heads=2, q_len=16, layer="gqa", causal=True),
    Case("layer-mla-b1-n16", "tiny", heads=4, q_len=16, layer="mla", head_dim=96, v_head_dim=64, causal=True),
    # threads: one head, and a number of heads that no thread count divides
    Case("threads-h8-n1024-causal", "threads", causal=True, scaling=True),
    Case("threads-h1-n2048-causal", "threads", heads=1, q_len=2048, causal=True, scaling=True),
    Case("threads-h3-n1024-full", "threads", heads=3, scaling=True),
    Case("threads-h3-n1024-causal", "threads", heads=3, causal=True, scaling=True),
    # dropout and masks
    Case("fp32-d64-n1024-dropout", "dropout", dropout=0.1, quick=True),
    Case("fp32-d128-n1024-dropout", "dropout", dropout=0.1, head_dim=128),
    Case("fp32-d64-n1024-mask-float", "masks", heads=4, mask="float"),
    Case("fp32-d64-n1024-mask-float-grad", "masks", heads=4, mask="float-grad"),
    Case("fp32-d64-n1024-mask-padding", "masks", mask="padding", batch=2, heads=4, quick=True),
    # derivatives in a direction and of second order; frozen keys and values
    Case("fp32-d64-n1024-full-derivatives", "derivatives", heads=2, passes=("forward", "backward", *DERIVATIVES)),
    Case("fp32-d64-n2048-causal-derivatives", "derivatives", heads=2, q_len=2048, causal=True,
         passes=("forward", "backward", *DERIVATIVES)),
    Case("bf16-d64-n1024-full-derivatives", "derivatives", heads=2, dtype="bf16",
         passes=("forward", "backward", *DERIVATIVES)),
    Case("bf16-d128-n2048-causal-derivatives", "derivatives", heads=2, q_len=2048, head_dim=128, causal=True,
         dtype="bf16", passes=("forward", "backward", *DERIVATIVES)),
    Case("fp32-d64-n1024-full-frozen", "derivatives", heads=2, frozen=True, passes=("backward",)),
    Case("memory-n8192-derivatives", "derivatives", heads=1, q_len=8192, check=False, only_memory=True,
         passes=("forward", "both", *DERIVATIVES)),
    Case("memory-bf16-n8192-derivatives", "derivatives", heads=1, q_len=8192, check=False, only_memory=True,
         dtype="bf16", passes=("forward", "both", *DERIVATIVES)),
    # memory beyond inputs and outputs
    Case("memory-n16384", "memory", heads=1, q_len=16384, check=False, only_memory=True, passes=("forward", "both")),
    Case("memory-n16384-causal", "memory", heads=1, q_len=16384, check=False, only_memory=True, causal=True,
         passes=("forward", "both")),
    # a mask of blocks, beside the same mask as a tensor
    Case("blocks-fp32-n8192", "blocks", heads=2, q_len=8192, mask="bigbird", extent=64),
    Case("blocks-bf16-n8192", "blocks", heads=2, q_len=8192, mask="bigbird", extent=64, dtype="bf16"),
    # segments and windows: no tensor of the length squared
    Case("infini-fp32-n8192", "functions", heads=2, q_len=8192, function="infini", extent=512, check=False),
    Case("longformer-fp32-n8192", "functions", heads=2, q_len=8192, function="longformer", extent=256, check=False),
    # token-sparse attention over latents: 2048 of 32768
    *(Case(f"sparse-{dtype}-h128-l4", "functions", heads=128, kv_heads=1, q_len=4, kv_len=32768, head_dim=576,
           v_head_dim=512, dtype=dtype, function="sparse", extent=2048, check=False, passes=("forward",))
      for dtype in ("fp32", "bf16")),
    *(Case(f"sparse-{dtype}-h16-l128", "functions", heads=16, kv_heads=1, q_len=128, kv_len=32768, head_dim=576,
           v_head_dim=512, dtype=dtype, function="sparse", extent=2048, check=False) for dtype in ("fp32", "bf16")),
    *(Case(f"sparse-latents-{dtype}-h128-l{rows}", "functions", heads=128, kv_heads=1, q_len=rows, kv_len=32768,
           head_dim=576, v_head_dim=512, dtype=dtype, function="sparse_latents", extent=2048, check=False,
           passes=("forward",)) for dtype in ("fp32", "bf16") for rows in (4, 32)),
    Case("sparse-indexer-bf16-h64-l16", "functions", heads=64, kv_heads=1, q_len=16, kv_len=32768, head_dim=128,
         dtype="bf16", function="indexer", extent=2048, check=False, passes=("forward",)),
    Case("longformer-fp32-n32768", "functions", heads=2, q_len=32768, function="longformer", extent=256, check=False),
    # numbers in e4m3, beside the dense cases of the same shape
    Case("fp8-bf16-d64-n1024", "functions", dtype="bf16", function="fp8", passes=("forward",)),
    Case("fp8-bf16-d128-n1024", "functions", head_dim=128, dtype="bf16", function="fp8", passes=("forward",)),
    # whole layers of equal width, heads and length
    Case("layer-mha", "layers", batch=4, q_len=512, layer="mha", quick=True),
    Case("layer-gpt", "layers", batch=4, q_len=512, layer="gpt", causal=True),
    Case("layer-gqa", "layers", batch=4, q_len=512, layer="gqa", kv_heads=2, causal=True),
    Case("layer-mla", "layers", batch=4, q_len=512, layer="mla", head_dim=96, v_head_dim=64, causal=True),
    Case("layer-mla-d192-dv128-n1024", "layers", layer="mla", q_len=1024, head_dim=192, v_head_dim=128, causal=True),
    Case("memory-layer-mla-n2048", "memory", layer="mla", q_len=2048, head_dim=192, v_head_dim=128, causal=True,
         check=False, only_memory=True, passes=("forward", "both")),
    Case("layer-mha-bf16", "layers", batch=4, q_len=512, layer="mha", dtype="bf16"),
    Case("layer-gpt-bf16", "layers", batch=4, q_len=512, layer="gpt", causal=True, dtype="bf16"),
]  # fmt: skip


def _gpu() -> list[Case]:
    """For a data-centre GPU, the most telling first: 16k tokens of width 2048, decoding, options, cases for
    FlexAttention, which compiles for each, and linear attention."""
    cases = []
    training = ("forward", "backward")
    for n in (8192, 1024):
        for d, dv in ((128, 128), (64, 64), (192, 128), *((256, 256),) * (n == 8192)):
            sizes = dict(batch=16384 // n, heads=2048 // dv, q_len=n, head_dim=d, v_head_dim=dv, dtype="bf16")
            for causal in (False, True):
                cases.append(Case(f"gpu-bf16-d{d}-n{n}-{'causal' if causal else 'full'}", "gpu", causal=causal,
                                  check=n == 1024 and d == 128, passes=PASSES, **sizes))  # fmt: skip
            if (n, d) == (8192, 128):
                for causal in (False, True):
                    name = f"gpu-bf16-d{d}-n{n}-{'causal' if causal else 'full'}-deterministic"
                    cases.append(Case(name, "gpu", causal=causal, check=False, deterministic=True, passes=("backward",),
                                      **sizes))  # fmt: skip
    cases.append(Case("gpu-bf16-gqa8-n8192-causal", "gpu", 2, 16, 2, q_len=8192, head_dim=128, dtype="bf16",
                      causal=True, check=False))  # fmt: skip
    decode = [(1, 32768, "bf16", "dense"), (16, 8192, "bf16", "dense"), (64, 1024, "bf16", "dense")]
    decode += [(16, 8192, "bf16", "paged"), (4, 4096, "fp32", "dense")]
    for batch, n, dtype, place in decode:
        name = f"gpu-decode-{dtype}-b{batch}-h32.8-s{n}" + ("" if place == "dense" else f"-{place}")
        cases.append(Case(name, "gpu-decode", batch, 32, 8, q_len=1, kv_len=n, head_dim=128, dtype=dtype, decode=place,
                          passes=("forward",)))  # fmt: skip
    for batch, n in ((64, 4096), (4, 32768)):
        cases.append(Case(f"gpu-latent-bf16-b{batch}-h128-s{n}", "gpu-decode", batch, 128, 1, q_len=1, kv_len=n,
                          head_dim=576, v_head_dim=512, dtype="bf16", decode="latent", check=False,
                          passes=("forward",)))  # fmt: skip
    # with options; a float mask is one for each head
    of_options = [("padding", dict(mask="padding")), ("float", dict(mask="float")),
                  ("float-grad", dict(mask="float-grad", passes=training)), ("dropout", dict(dropout=0.1)),
                  ("alibi", dict(option="alibi")),
                  ("window512", dict(option="window", extent=512, causal=True))]  # fmt: skip
    for d in (128, 64):
        for name, fields in of_options[: 6 if d == 128 else 4]:
            cases.append(Case(f"gpu-options-bf16-d{d}-n4096-{name}", "gpu-options", 4, 2048 // d,
                              q_len=4096, head_dim=d, dtype="bf16", check=False, **fields))  # fmt: skip
    for d in (64, 128):
        cases.append(Case(f"gpu-fp32-d{d}-n4096-causal", "gpu", 4, 2048 // d, q_len=4096, head_dim=d, causal=True,
                          check=False, passes=PASSES))  # fmt: skip
    cases.append(Case("gpu-blocks-bf16-n8192", "gpu-blocks", 1, 16, q_len=8192, head_dim=128, mask="bigbird", extent=64,
                      dtype="bf16", check=False))  # fmt: skip
    for d in (64, 128):
        cases.append(Case(f"gpu-flex-bf16-d{d}-n4096-causal", "gpu-flex", 4, 2048 // d, q_len=4096, head_dim=d,
                          dtype="bf16", causal=True, check=False, passes=training))  # fmt: skip
    for d in (64, 128, 256):
        cases.append(Case(f"gpu-fp8-bf16-d{d}-n8192", "gpu", 2, 2048 // d, q_len=8192, head_dim=d, dtype="bf16",
                          function="fp8", check=False, passes=("forward",)))  # fmt: skip
    for dtype, n in (("bf16", 2048), ("bf16", 16384), ("fp32", 16384)):
        cases.append(Case(f"gpu-linear-{dtype}-n{n}", "gpu-linear", 16384 // n, 16, q_len=n, dtype=dtype,
                          function="linear", check=n <= 4096, passes=training))  # fmt: skip
    for layer, sizes in (("gqa", dict(kv_heads=4, head_dim=128)), ("mla", dict(head_dim=192, v_head_dim=128))):
        cases.append(Case(f"gpu-layer-{layer}-n4096", "gpu", 2, 16, q_len=4096, layer=layer, causal=True, dtype="bf16",
                          check=False, **sizes))  # fmt: skip
    return cases


GPU_CASES = _gpu()  # what --device cuda measures


def from_shape(text: str) -> Case:
    """A case from "B,H,Hkv,L,S,D,Dv[,causal][,dtype]", as given on the command line; ValueError if it is not one."""
    parts = [part.strip() for part in text.split(",")]
    usage = f'--shape: expected "B,H,Hkv,L,S,D,Dv[,causal][,dtype]", got {text!r}'
    if len(parts) < 7 or not all(part.isdigit() and int(part) > 0 for part in parts[:7]):
        raise ValueError(usage)
    extra = set(parts[7:])
    dtypes = extra & DTYPES.keys()
    if extra - DTYPES.keys() - {"causal"} or len(dtypes) > 1:
        raise ValueError(f"{usage}; dtype is one of {', '.join(DTYPES)}")
    batch, heads, kv_heads, q_len, kv_len, d, dv = map(int, parts[:7])
    if heads % kv_heads:
        raise ValueError(f"--shape: expected H to be a multiple of Hkv, got {heads} and {kv_heads}")
    dtype = dtypes.pop() if dtypes else "fp32"
    name = f"{dtype}-b{batch}-h{heads}.{kv_heads}-l{q_len}-s{kv_len}-d{d}.{dv}" + (
        "-causal" if "causal" in extra else ""
    )
    return Case(name, "shape", batch, heads, kv_heads, q_len, kv_len, d, dv, dtype, "causal" in extra, quick=True)


def select(patterns: str | None, cases: list[Case] = CASES) -> list[Case]:
    """Cases that fit one of the comma-separated patterns: a group, part of a name, or a wildcard for the whole name."""
    if not patterns:
        return list(cases)

    def fits(case: Case) -> bool:
        for pattern in filter(None, patterns.split(",")):
            if any(c in pattern for c in "*?["):
                if fnmatch.fnmatch(case.name, pattern):
                    return True
            elif pattern == case.group or pattern in case.name:
                return True
        return False

    return [case for case in cases if fits(case)]
