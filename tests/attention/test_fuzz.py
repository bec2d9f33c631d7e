"""Random arguments, right and wrong: the operators give the right result or a listed exception, never a crash.

Runs the same examples every time; `make asan` runs this file against a library built with AddressSanitizer and UBSan.
"""

import math

import hypothesis
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnjourney
from tests.support.testing import LSE_DTYPE, check_attention, describe, random_tensor

ops = torch.ops.attnjourney
ULPS = 8  # expanded tensors repeat a term, whose roundings then all go one way
RAISED = (ValueError, RuntimeError, TypeError, NotImplementedError)
FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=250,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)

sizes = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5, 8, 9, 17])
lengths = st.sampled_from([0, 1, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 70])
dims = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64])
floating = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
any_dtype = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8, torch.complex64]
)
coin = st.booleans()


@st.composite
def strided(draw, shape, dtype, seed=0):
    """A tensor of that shape in any layout: permuted, expanded, stepped, cut from a larger one, overlapping itself."""
    shape = tuple(shape)
    if not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype)
    x = random_tensor(shape, dtype, seed)
    for dim in range(len(shape)):
        if shape[dim] > 1 and draw(st.integers(0, 11)) == 0:
            x = x.narrow(dim, 0, 1).expand_as(x)  # stride 0
    how = draw(st.sampled_from(["as it is", "permuted", "stepped", "cut", "strange"]))
    if how == "permuted" and x.dim():
        order = draw(st.permutations(range(x.dim())))
        x = x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
    elif how in ("stepped", "cut") and x.dim():
        step = 2 if how == "stepped" else 1
        wide = torch.full([n * step + 3 for n in shape], math.nan, dtype=dtype)
        view = wide[tuple(slice(1, 1 + n * step, step) for n in shape)]
        view.copy_(x)
        x = view
    elif how == "strange" and x.numel() and x.dim():
        # overlapping rows, as unfold gives; values repeat
        strides = [draw(st.integers(0, 3)) for _ in shape]
        need = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        x = random_tensor((need + 2,), dtype, seed).as_strided(shape, strides, 1)
    return x


@st.composite
def valid_call(draw):
    """(query, key, value, mask, options) that must be accepted."""
    rank = draw(st.integers(2, 6))
    dtype = draw(floating)
    q_len, kv_len = draw(lengths), draw(lengths)
    dim, v_dim = draw(dims), draw(dims)
    leads = [[], [], []]
    full = []
    for _ in range(max(0, rank - 3)):
        n = draw(st.sampled_from([0, 1, 1, 2, 2, 3]))
        full.append(n)
        for lead in leads:
            lead.append(1 if draw(st.integers(0, 3)) == 0 else n)
    if rank >= 4:  # a dimension is what the largest of the three says; all may be 1
        full = [next((lead[d] for lead in leads if lead[d] != 1), 1) for d in range(rank - 3)]
    enable_gqa = draw(coin)
    if rank >= 3:
        heads = draw(st.sampled_from([0, 1, 2, 3, 4, 6]))
        divisors = [h for h in range(1, heads + 1) if heads % h == 0] if enable_gqa and heads else [heads, heads, 1]
        own = [heads, draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))]
        if enable_gqa and heads == 0:
            own = [0, 0, 0]
        for lead, h in zip(leads, own):
            lead.append(h)
        full.append(heads if enable_gqa else next((h for h in own if h != 1), 1))
    q = draw(strided((*leads[0], q_len, dim), dtype, 1))
    k = draw(strided((*leads[1], kv_len, dim), dtype, 2))
    v = draw(strided((*leads[2], kv_len, v_dim), dtype, 3))
    mask = None
    kind = draw(st.sampled_from(["none", "bool", "float", "float32"]))
    if kind != "none":
        shape = [n if draw(st.integers(0, 3)) else 1 for n in (*full, q_len, kv_len)]
        shape = shape[draw(st.integers(0, len(shape) - 1)) :]
        mask = draw(strided(shape, torch.float32 if kind == "float32" else dtype, 4))
        if kind == "bool":
            mask = mask > -0.5
        elif draw(coin) and mask.numel():
            mask = mask.masked_fill(mask < -1, -math.inf)
    options = {
        "is_causal": draw(coin),
        "enable_gqa": enable_gqa,
        "scale": draw(st.sampled_from([None, None, 0.5, -0.3, 0.0, 2.0])),
    }
    return q, k, v, mask, options


@FIXED
@given(valid_call(), st.data())
def test_valid_arguments_give_right_results(call, data):
    q, k, v, mask, options = call
    out, lse, stats = ops.attention_forward(q, k, v, mask, **options)
    grad_out = data.draw(strided(out.shape, q.dtype, 5))
    grad_lse = data.draw(strided(lse.shape, lse.dtype, 6)) if data.draw(coin) else None
    result = check_attention(q, k, v, mask, grad_out=grad_out, grad_lse=grad_lse, ulps=ULPS, **options)
    assert result.out.is_contiguous() and result.lse.is_contiguous()
    need = data.draw(st.integers(0, 15))
    again = ops.attention_backward(
        grad_out, grad_lse, q, k, v, mask, *(data.draw(relaid(x)) for x in (out, lse, stats)), **options, need=need
    )
    for bit, grad in enumerate(again[:4]):
        full = (result.grad_query, result.grad_key, result.grad_value, result.grad_attn_mask)[bit]
        if need >> bit & 1 and full is not None:
            assert torch.equal(grad, full), describe(q, k, v, mask, **options)
        else:
            assert grad.shape == (0,)


@st.composite
def relaid(draw, x):
    """The same numbers in another layout."""
    if x.dim() == 0 or draw(coin):
        return x
    order = draw(st.permutations(range(x.dim())))
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


@st.composite
def any_tensor(draw, like, dtype, rarely=12):
    """Of that shape and dtype, but one in `rarely` far off and two a little; in any layout."""
    shape, how = list(like), rarely - draw(st.integers(1, rarely))
    if how == 0:
        shape = draw(st.lists(sizes, max_size=6))
    for _ in range(draw(st.integers(1, 2)) if how in (1, 2) else 0):
        what = draw(st.sampled_from(["size", "size", "drop", "add", "swap"]))
        d = draw(st.integers(0, max(0, len(shape) - 1)))
        if what == "size" and shape:
            shape[d] = draw(sizes)
        elif what == "drop" and shape:
            del shape[d]
        elif what == "add":
            shape.insert(d, draw(st.sampled_from([0, 1, 2])))
        elif len(shape) > 1:
            shape[d], shape[d - 1] = shape[d - 1], shape[d]
    if draw(st.integers(0, 3 * rarely)) == 3 * rarely:
        dtype = draw(any_dtype)
    return draw(strided(shape, dtype, draw(st.integers(0, 3))))


@st.composite
def any_arguments(draw, rarely=12):
    """Arguments of attention near to a right call, some of them wrong; and the shape of its output."""
    rank = draw(st.integers(2, 5))
    lead = [draw(st.sampled_from([1, 2, 3])) for _ in range(rank - 2)]
    q_len, kv_len, dim, v_dim = draw(sizes), draw(sizes), draw(dims), draw(dims)
    dtype = draw(floating)
    kwargs = {
        "query": draw(any_tensor((*lead, q_len, dim), dtype, rarely)),
        "key": draw(any_tensor((*lead, kv_len, dim), dtype, rarely)),
        "value": draw(any_tensor((*lead, kv_len, v_dim), dtype, rarely)),
        "attn_mask": draw(
            st.none()
            | any_tensor((*lead, q_len, kv_len), draw(st.sampled_from([torch.bool, torch.float32, dtype])), rarely)
        ),
        "dropout_p": draw(st.sampled_from([0.0] * 20 + [0.5, 0.5, 1.0, -0.1, 1.1, math.nan, math.inf])),
        "is_causal": draw(coin),
        "scale": draw(st.sampled_from([None] * 12 + [0.5, 0.0, -1.0, 1e300, 1e-300, math.inf, math.nan])),
        "enable_gqa": draw(coin),
    }
    return kwargs, (*lead, q_len, v_dim)


def survives(function, **kwargs):
    """Result or None where it raised one of the listed exceptions."""
    try:
        return function(**kwargs)
    except RAISED as error:
        assert str(error), f"{type(error).__name__} without a text"
        return None


@FIXED
@given(any_arguments(), st.data())
def test_any_arguments_of_the_forward(arguments, data):
    kwargs, _ = arguments
    out = survives(attnjourney.attention, **kwargs)
    seed = data.draw(st.none() | st.integers(-(1 << 63), (1 << 63) - 1).map(torch.tensor) | any_tensor((), torch.int64))
    results = survives(ops.attention_forward, **kwargs, dropout_seed=seed)
    if kwargs["dropout_p"] == 0:
        assert (out is None) == (results is None)
    if results is None:
        return
    q, v = kwargs["query"], kwargs["value"]
    assert results[0].dtype == q.dtype and results[0].shape[-2:] == (q.size(-2), v.size(-1))
    assert results[1].shape == results[0].shape[:-1] and results[1].dtype == LSE_DTYPE.get(q.dtype, torch.float32)
    if kwargs["dropout_p"] == 0:
        assert torch.equal(out.nan_to_num(), results[0].nan_to_num())


@FIXED
@given(any_arguments(), st.data())
def test_any_arguments_with_autograd(arguments, data):
    kwargs, _ = arguments
    leaves = []
    for name in ("query", "key", "value", "attn_mask"):
        t = kwargs[name]
        if t is not None and t.is_floating_point() and data.draw(coin):
            kwargs[name] = t.detach().requires_grad_()
            leaves.append(kwargs[name])
    out = survives(attnjourney.attention, **kwargs)
    if out is not None and leaves:
        for t, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves)):
            assert grad.shape == t.shape and grad.dtype == t.dtype


@FIXED
@given(any_arguments(rarely=40), st.data())
def test_any_arguments_of_the_backward(arguments, data):
    kwargs, out_shape = arguments
    dtype = kwargs["query"].dtype
    lse_dtype = LSE_DTYPE.get(dtype, torch.float32)
    grads = survives(
        ops.attention_backward,
        **kwargs,
        grad_out=data.draw(any_tensor(out_shape, dtype, 20)),
        grad_lse=data.draw(st.none() | any_tensor(out_shape[:-1], lse_dtype, 20)),
        out=data.draw(any_tensor(out_shape, dtype, 20)),
        lse=data.draw(any_tensor(out_shape[:-1], lse_dtype, 20)),
        dropout_seed=data.draw(any_tensor((), torch.int64) | st.none()),
        need=data.draw(st.integers(0, 63) | st.integers(-2, 65)),
    )
    if grads is not None:
        for name, grad in zip(("query", "key", "value", "attn_mask"), grads):
            assert grad.shape == (0,) or grad.shape == kwargs[name].shape


@FIXED
@given(valid_call(), st.data())
def test_one_fault_in_a_valid_call(call, data):
    q, k, v, mask, options = call
    kwargs = {"query": q, "key": k, "value": v, "attn_mask": mask, **options}
    name = data.draw(st.sampled_from(["query", "key", "value", "attn_mask"]))
    like = kwargs[name]
    kwargs[name] = data.draw(any_tensor((q.size(-2), k.size(-2)) if like is None else like.shape, q.dtype))
    if survives(ops.attention_forward, **kwargs) is not None:
        check_attention(**kwargs, ulps=ULPS)  # what is accepted after all is right
