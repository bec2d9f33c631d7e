"""Wrong arguments of the attention operators: the exception's type; its text names argument, expected and got."""

import math

import pytest
import torch

import attnjourney

ops = torch.ops.attnjourney

SHAPES = {"query": (2, 4, 5, 8), "key": (2, 4, 7, 8), "value": (2, 4, 7, 6)}


def arguments(**changes):
    """The good call, with some arguments replaced."""
    return {**{name: torch.ones(shape) for name, shape in SHAPES.items()}, **changes}


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


# name -> (changed arguments, exception, patterns that its text holds)
WRONG = {
    # ranks
    "query_of_no_dimension": (dict(query=zeros()), ValueError, ("query", "at least 2 dimensions", r"\(\)")),
    "query_of_1_dimension": (dict(query=zeros(8)), ValueError, ("query", "at least 2 dimensions", r"\(8,\)")),
    "key_of_1_dimension": (dict(key=zeros(8)), ValueError, ("key", "at least 2 dimensions", r"\(8,\)")),
    "key_of_rank_3": (dict(key=zeros(4, 7, 8)), ValueError, ("key", "rank of query, 4", r"\(4, 7, 8\)")),
    "value_of_rank_5": (
        dict(value=zeros(1, 2, 4, 7, 6)),
        ValueError,
        ("value", "rank of query, 4", r"\(1, 2, 4, 7, 6\)"),
    ),
    "rank_20": (dict.fromkeys(SHAPES, zeros(*[1] * 20)), ValueError, ("query", "at most 19 dimensions", "20")),
    # lengths and head dims
    "key_head_dim": (dict(key=zeros(2, 4, 7, 9)), ValueError, ("key", "head_dim of query, 8", "9", r"\(2, 4, 7, 9\)")),
    "value_length": (dict(value=zeros(2, 4, 6, 6)), ValueError, ("value", "length of key, 7", "6", r"\(2, 4, 6, 6\)")),
    "head_dim_0": (
        dict(query=zeros(2, 4, 5, 0), key=zeros(2, 4, 7, 0)),
        ValueError,
        ("query", "head_dim.*at least 1", r"\(2, 4, 5, 0\)"),
    ),
    "value_head_dim_0": (dict(value=zeros(2, 4, 7, 0)), ValueError, ("value", "at least 1", r"\(2, 4, 7, 0\)")),
    "all_sizes_0": (dict.fromkeys(SHAPES, zeros(0, 0, 0, 0)), ValueError, ("head_dim", r"\(0, 0, 0, 0\)")),
    # heads
    "fewer_key_heads": (dict(key=zeros(2, 2, 7, 8)), ValueError, ("key", "4 heads", "2", "enable_gqa")),
    "fewer_value_heads": (dict(value=zeros(2, 2, 7, 6)), ValueError, ("value", "4 heads", "2", "enable_gqa")),
    "more_key_heads": (dict(key=zeros(2, 8, 7, 8)), ValueError, ("key", "4 heads", "8")),
    "key_heads_do_not_divide": (
        dict(key=zeros(2, 3, 7, 8), value=zeros(2, 3, 7, 6), enable_gqa=True),
        ValueError,
        ("key", "divides query's, 4", "3"),
    ),
    "value_heads_do_not_divide": (
        dict(value=zeros(2, 3, 7, 6), enable_gqa=True),
        ValueError,
        ("value", "divides.* 4", "3"),
    ),
    "more_key_heads_grouped": (dict(key=zeros(2, 8, 7, 8), enable_gqa=True), ValueError, ("key", "divides.* 4", "8")),
    "no_key_heads": (dict(key=zeros(2, 0, 7, 8)), ValueError, ("key", "4 heads", "0")),
    "no_key_heads_grouped": (dict(key=zeros(2, 0, 7, 8), enable_gqa=True), ValueError, ("key", "divides.* 4", "0")),
    "no_query_heads_grouped": (
        dict(query=zeros(2, 0, 5, 8), value=zeros(2, 0, 7, 6)),
        ValueError,
        ("key", "0 heads", "4"),
    ),
    "heads_differ_at_length_0": (
        dict(query=zeros(7, 9, 0, 7), key=zeros(7, 7, 0, 7), value=zeros(7, 7, 0, 7), is_causal=True),
        ValueError,
        ("key", "9", "7"),
    ),
    # batch
    "key_batch": (dict(key=zeros(3, 4, 7, 8)), ValueError, ("key", "batch dimension 0", "2", r"\(3, 4, 7, 8\)")),
    "value_batch": (dict(value=zeros(3, 4, 7, 6)), ValueError, ("value", "batch dimension 0", "2", r"\(3, 4, 7, 6\)")),
    "query_batch_0": (dict(query=zeros(0, 4, 5, 8)), ValueError, ("key", "batch dimension 0", "0")),
    # dtypes
    **{
        f"query_{str(dtype)[6:]}": (
            {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()},
            RuntimeError,
            ("query", "torch.float32, torch.float64, torch.bfloat16 or torch.float16", "got"),
        )
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    "key_dtype": (dict(key=zeros(2, 4, 7, 8).double()), RuntimeError, ("key", "torch.float32", "torch.float64")),
    "value_dtype": (
        dict(value=zeros(2, 4, 7, 6).bfloat16()),
        RuntimeError,
        ("value", "torch.float32", "torch.bfloat16"),
    ),
    # masks
    "mask_too_long": (dict(attn_mask=zeros(5, 8)), ValueError, ("attn_mask", r"\(2, 4, 5, 7\)", r"\(5, 8\)")),
    "mask_transposed": (dict(attn_mask=zeros(7, 5)), ValueError, ("attn_mask", r"\(2, 4, 5, 7\)", r"\(7, 5\)")),
    "mask_of_keys_per_item": (dict(attn_mask=zeros(2, 7)), ValueError, ("attn_mask", r"\(2, 4, 5, 7\)", r"\(2, 7\)")),
    "mask_per_item_without_heads": (dict(attn_mask=zeros(2, 5, 7)), ValueError, ("attn_mask", r"\(2, 5, 7\)")),
    "mask_beside_causal": (
        dict(attn_mask=zeros(3, 1), is_causal=True),
        ValueError,
        ("attn_mask", r"\(2, 4, 5, 7\)", r"\(3, 1\)"),
    ),
    "mask_of_rank_5": (dict(attn_mask=zeros(1, 2, 4, 5, 7)), ValueError, ("attn_mask", r"\(1, 2, 4, 5, 7\)")),
    "mask_of_key_heads": (
        dict(key=zeros(2, 2, 7, 8), value=zeros(2, 2, 7, 6), attn_mask=zeros(2, 2, 5, 7), enable_gqa=True),
        ValueError,
        ("attn_mask", r"\(2, 4, 5, 7\)", r"\(2, 2, 5, 7\)"),
    ),
    "mask_size_0": (dict(attn_mask=zeros(5, 0)), ValueError, ("attn_mask", r"\(5, 0\)")),
    "mask_longer_than_the_keys": (
        dict(query=zeros(1, 3, 4, 8), key=zeros(1, 3, 17, 8), value=zeros(1, 3, 17, 8), attn_mask=zeros(1, 1, 4, 20)),
        ValueError,
        ("attn_mask", "17", "20"),
    ),
    **{
        f"mask_{str(dtype)[6:]}": (
            dict(attn_mask=torch.zeros(5, 7, dtype=dtype)),
            RuntimeError,
            ("attn_mask", "torch.bool", "torch.float32", str(dtype)),
        )
        for dtype in (torch.int64, torch.uint8, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    },
    # numbers
    **{
        f"dropout_{p}": (dict(dropout_p=p), ValueError, ("dropout_p", "between 0 and 1", f"{p}".replace("+", r"\+")))
        for p in (-0.1, 1.5, math.nan, math.inf, -math.inf)
    },
    **{f"scale_{s}": (dict(scale=s), ValueError, ("scale", "finite", f"{s}")) for s in (math.inf, -math.inf, math.nan)},
}  # fmt: skip


def backward(*, dropout_p=0.0, is_causal=False, attn_mask=None, query, key, value, **options):
    out, lse, stats = torch.zeros(2, 4, 5, 6), torch.zeros(2, 4, 5), torch.zeros(2, 4, 5, 2)
    saved = out, lse, stats
    return ops.attention_backward(out, None, query, key, value, attn_mask, *saved, dropout_p, is_causal, **options)


CALLS = {
    "attnjourney.attention": attnjourney.attention,
    "ops.attention": ops.attention,
    "ops.attention_forward": ops.attention_forward,
    "ops.attention_backward": backward,
}


def raises(call, kwargs, exception, patterns):
    with pytest.raises(exception) as caught:
        call(**kwargs)
    assert type(caught.value) is exception, f"{type(caught.value).__name__}: {caught.value}"
    for pattern in patterns:
        assert caught.match(f"(?s){pattern}")


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_argument(call, wrong):
    changes, exception, patterns = WRONG[wrong]
    raises(call, arguments(**changes), exception, patterns)


@pytest.mark.parametrize("wrong", [name for name in WRONG if not name.startswith(("query_int64", "query_bool"))])
def test_wrong_argument_where_a_gradient_is_asked_for(wrong):
    changes, exception, patterns = WRONG[wrong]
    kwargs = arguments(**changes)
    kwargs["query"] = kwargs["query"].requires_grad_(kwargs["query"].is_floating_point())
    raises(ops.attention, kwargs, exception, patterns)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("name", ("key", "value", "attn_mask"))
def test_tensors_on_two_devices(call, name):
    meta = torch.zeros(SHAPES.get(name, (5, 7)), device="meta")
    with pytest.raises(RuntimeError, match=r"(?s)device"):
        call(**arguments(**{name: meta}))


SHAPE_FAULTS = [
    name
    for name, (_, kind, _) in WRONG.items()
    if kind is ValueError and not name.startswith(("rank_", "dropout_", "scale_"))
]


@pytest.mark.parametrize("call", list(CALLS.values())[:3], ids=list(CALLS)[:3])
@pytest.mark.parametrize("wrong", SHAPE_FAULTS)
def test_tensors_without_data_are_refused_alike(call, wrong):
    changes, exception, patterns = WRONG[wrong]
    kwargs = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments(**changes).items()}
    raises(call, kwargs, exception, patterns[:1])


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("name", ("query", "key", "value", "attn_mask", "dropout_p", "scale", "is_causal"))
def test_not_a_tensor_or_not_a_number(call, name):
    with pytest.raises((TypeError, RuntimeError)):
        call(**arguments(**{name: "text"}))


@pytest.mark.parametrize("call", list(CALLS.values())[:3], ids=list(CALLS)[:3])
def test_sparse_tensor(call):
    with pytest.raises((NotImplementedError, RuntimeError)):
        call(**arguments(query=torch.ones(2, 4, 5, 8).to_sparse()))


# ---------------------------------------------------------------------------------------------------- dropout_seed


@pytest.mark.parametrize("call", (ops.attention_forward, backward), ids=("forward", "backward"))
@pytest.mark.parametrize(
    "seed, exception, patterns",
    [
        (None, ValueError, ("dropout_seed", "int64", "None")),
        (torch.tensor(1, dtype=torch.int32), RuntimeError, ("dropout_seed", "torch.int64", "torch.int32")),
        (torch.tensor(1.0), RuntimeError, ("dropout_seed", "torch.int64", "torch.float32")),
        (torch.tensor([1, 2]), RuntimeError, ("dropout_seed", "one torch.int64", r"\(2,\)")),
        (torch.zeros(0, dtype=torch.int64), RuntimeError, ("dropout_seed", "one torch.int64", r"\(0,\)")),
        (torch.zeros((), dtype=torch.int64, device="meta"), RuntimeError, ("device",)),
    ],
    ids=("none", "int32", "float32", "two", "empty", "meta"),
)
def test_dropout_seed(call, seed, exception, patterns):
    raises(call, arguments(dropout_p=0.5, dropout_seed=seed), exception, patterns)


# ---------------------------------------------------------------------------------------------------- backward

GOOD = {
    "grad_out": zeros(2, 4, 5, 6), "grad_lse": zeros(2, 4, 5), "query": zeros(2, 4, 5, 8), "key": zeros(2, 4, 7, 8),
    "value": zeros(2, 4, 7, 6), "attn_mask": None, "out": zeros(2, 4, 5, 6), "lse": zeros(2, 4, 5),
    "stats": zeros(2, 4, 5, 2),
}  # fmt: skip
OUT_SHAPES = [(2, 4, 5, 8), (2, 4, 6, 6), (2, 5, 5, 6), (3, 4, 5, 6), (1, 4, 5, 6), (4, 5, 6), (0,), (), (2, 4, 5, 0)]
LSE_SHAPES = [(2, 4, 6), (2, 5, 5), (3, 4, 5), (1, 4, 5), (4, 5), (0,), (), (2, 4, 5, 1), (2, 4, 0)]


@pytest.mark.parametrize(
    "name, shape",
    [(n, s) for n in ("grad_out", "out") for s in OUT_SHAPES]
    + [(n, s) for n in ("grad_lse", "lse") for s in LSE_SHAPES]
    + [("stats", s) for s in [(2, 4, 5), (2, 4, 5, 1), (2, 4, 2, 5), (2, 2, 4, 5), (0,)]],
)
def test_backward_checks_shapes(name, shape):
    expected = str(tuple(GOOD[name].shape)).replace("(", r"\(").replace(")", r"\)")
    got = str(tuple(shape)).replace("(", r"\(").replace(")", r"\)")
    raises(ops.attention_backward, {**GOOD, name: zeros(*shape)}, ValueError, (name, expected, got))


@pytest.mark.parametrize("name", ("grad_out", "out", "lse", "stats", "grad_lse"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64), ids=str)
def test_backward_checks_dtypes(name, dtype):
    kwargs = {**GOOD, name: GOOD[name].to(dtype)}
    raises(ops.attention_backward, kwargs, RuntimeError, (name, "torch.float32", str(dtype)))


@pytest.mark.parametrize("name", ("grad_out", "out", "lse", "stats", "grad_lse"))
def test_backward_checks_devices(name):
    with pytest.raises(RuntimeError, match=r"(?s)device"):
        ops.attention_backward(**{**GOOD, name: GOOD[name].to("meta")})


@pytest.mark.parametrize("need", (-1, 64, 1 << 40))
def test_backward_checks_need(need):
    raises(ops.attention_backward, {**GOOD, "need": need}, ValueError, ("need", "0 to 63", str(need)))


def test_lse_of_16_bit_inputs_is_float32():
    good = {name: t if t is None or name in ("lse", "stats", "grad_lse") else t.bfloat16() for name, t in GOOD.items()}
    ops.attention_backward(**good)
    raises(
        ops.attention_backward,
        {**good, "lse": good["lse"].bfloat16()},
        RuntimeError,
        ("lse", "torch.float32", "torch.bfloat16"),
    )
