"""Inputs from public reports on which attention libraries went wrong, with the right result derived here.

Those of one theme alone are in that theme's file; these concern several operators, or the options together.
"""

import copy
import math

import pytest
import torch
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import attnjourney
from attnjourney import reference
from tests.support.options_cases import OPTIONS, check, make
from tests.support.testing import DTYPES, assert_close_to_reference, random_tensor, reference_attention

attention = attnjourney.attention


# ------------------------------------------------------------------------------------ one rule for every code path


def seen_by_every_path(q_len, kv_len, dtype, **options):
    """name -> (q_len, kv_len) bool: the keys with a weight, a gradient or a place in the weights, by each operator."""
    q, k = torch.zeros(1, 1, q_len, 4, dtype=dtype), torch.zeros(1, 1, kv_len, 4, dtype=dtype)
    v = torch.eye(kv_len, dtype=dtype)[None, None].clone().requires_grad_()
    out = attention(q, k, v, **options)
    rows = [torch.autograd.grad(out[0, 0, i, :].sum(), v, retain_graph=True)[0][0, 0].sum(-1) for i in range(q_len)]
    paths = {
        "forward": out[0, 0],
        "backward": torch.stack(rows) if rows else out[0, 0],
        "weights": attnjourney.attention_weights(q, k, **options)[0, 0],
    }
    packed = [x[0].transpose(0, 1).detach() for x in (q, k, v)]
    ends = [torch.tensor([0, n]) for n in (q_len, kv_len)]
    paths["varlen"] = attnjourney.varlen_attention(*packed, *ends, **options)[:, 0]
    return {name: x > 0 for name, x in paths.items()}


@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
def test_one_alignment_for_all_shapes_and_every_operator(alignment):
    for q_len in (1, 2, 5, 9):
        for kv_len in (1, 2, 3, 8, 9, 16, 20):
            shift = kv_len - q_len if alignment == "bottom_right" else 0
            expected = torch.ones(q_len, kv_len).tril(shift) > 0
            dtype = DTYPES[(q_len + kv_len) % 4]
            for name, got in seen_by_every_path(
                q_len, kv_len, dtype, is_causal=True, causal_alignment=alignment
            ).items():
                assert torch.equal(got, expected), (name, q_len, kv_len)


@pytest.mark.parametrize("q_len, kv_len", ((70, 150), (150, 70), (130, 130)))
@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
def test_one_window_and_prefix_for_every_operator_at_the_borders_of_tiles(q_len, kv_len, alignment):
    shift = kv_len - q_len if alignment == "bottom_right" else 0
    i, j = torch.arange(q_len)[:, None] + shift, torch.arange(kv_len)
    options = dict(window_size=(33, 17), prefix_length=5, causal_alignment=alignment)
    expected = (j < 5) | ((j >= i - 33) & (j <= i + 17))
    for dtype in (torch.float64, torch.bfloat16):
        for name, got in seen_by_every_path(q_len, kv_len, dtype, **options).items():
            assert torch.equal(got, expected), (name, dtype)


@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
@pytest.mark.parametrize("window", ((2**63 - 1, 2**63 - 1), (0, 2**63 - 1), (2**63 - 1, 0)))
def test_the_largest_window_does_not_overflow(window, alignment):
    q, k, v = (random_tensor((2, n, 4), torch.float64, s) for s, n in enumerate((7, 5, 5)))
    shift = -2 if alignment == "bottom_right" else 0
    i, j = torch.arange(7)[:, None] + shift, torch.arange(5)
    mask = ((j >= i) | (window[0] > 0)) & ((j <= i) | (window[1] > 0))
    options = dict(window_size=window, causal_alignment=alignment)
    for function in (attention, reference.attention):
        torch.testing.assert_close(function(q, k, v, **options), attention(q, k, v, mask))


@pytest.mark.parametrize("kv_len", (511, 512, 600, 1025))
def test_one_query_over_split_keys_is_the_last_row_of_a_causal_run(kv_len):
    q, k, v = (random_tensor((1, 2, n, 16), seed=s, outliers=False) for s, n in enumerate((1, kv_len, kv_len)))
    whole = torch.cat([random_tensor((1, 2, kv_len - 1, 16), seed=4), q], 2)
    expected = attention(whole, k, v, is_causal=True)[:, :, -1:]
    torch.testing.assert_close(attention(q, k, v, is_causal=True, causal_alignment="bottom_right"), expected)


def test_a_prompt_in_chunks_equals_the_whole():
    n, chunks = 206, (1, 7, 100, 98)
    q, k, v = (random_tensor((1, 2, n, 16), torch.float64, s, outliers=False) for s in range(3))
    end, outs = 0, []
    for size in chunks:
        rows, end = q[:, :, end : end + size], end + size
        outs.append(attention(rows, k[:, :, :end], v[:, :, :end], is_causal=True, causal_alignment="bottom_right"))
    torch.testing.assert_close(torch.cat(outs, 2), attention(q, k, v, is_causal=True), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("key_lengths", "query_lengths")])
def test_no_option_lets_a_row_see_the_future(name):
    q, k, v, arguments = make([name], q_len=12, kv_len=12)
    arguments = {**arguments, "is_causal": True, "prefix_length": 0}
    k, v = (x.requires_grad_() for x in (k, v))
    out = attention(q, k, v, **arguments)
    for row in (0, 5, 10):
        for gradient in torch.autograd.grad(out[:, :, row].sum(), (k, v), retain_graph=True):
            assert not gradient[:, :, row + 1 :].any(), (name, row)


# ------------------------------------------------------------------------------------ rows that see nothing, and NaN


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("key_lengths", "dropout")])
def test_hidden_nan_keys_do_not_leak_and_visible_ones_show(name):
    q, k, v, arguments = make([name], q_len=40, kv_len=50, dim=8, v_dim=8)
    if arguments.get("attn_mask") is not None:
        arguments["attn_mask"] = arguments["attn_mask"].expand(2, 4, 40, 50).clone()
        arguments["attn_mask"][..., 45:] = math.nan if arguments["attn_mask"].is_floating_point() else True
    arguments["key_lengths"] = torch.tensor([45, 45])
    clean = attention(q, k, v, **arguments)
    k[:, :, 45:], v[:, :, 45:] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **arguments)
    assert torch.equal(out, clean)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))
    with torch.no_grad():
        v[:, :, 20] = math.nan
    seen = attnjourney.attention_weights(q, k, **arguments)[..., 20] > 0
    shown = attention(q, k, v, **arguments).isnan()
    assert torch.equal(shown.any(-1), seen) and torch.equal(shown.all(-1), seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix", (1, 2, 3, 8))
def test_nan_in_the_key_behind_a_prefix_shows_in_the_rows_whose_window_holds_it(prefix, dtype):
    # later tiles of rows see the prefix alone, all of it: the key beside its last one must not come along
    q, k, v = (random_tensor((1, 2, 300, 16), dtype, s, outliers=False) for s in range(3))
    k[:, :, prefix], v[:, :, prefix] = math.nan, math.nan
    out = attention(q, k, v, is_causal=True, window_size=(5, -1), prefix_length=prefix)
    rows = torch.arange(300)
    expected = (rows >= prefix) & (rows <= prefix + 5)
    assert torch.equal(out.isnan().all(-1), expected.expand(1, 2, 300))
    assert torch.equal(out.isnan().any(-1), expected.expand(1, 2, 300))


def test_lse_and_gradient_of_a_sink_in_rows_that_see_nothing():
    q, k, v = (random_tensor((1, 2, n, 4), torch.float64, s) for s, n in enumerate((6, 4, 4)))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    options = dict(is_causal=True, causal_alignment="bottom_right", sinks=sinks)
    out, lse = attention(q, k, v, return_lse=True, **options)  # rows 0 and 1 see no key
    assert not out[:, :, :2].any()
    assert torch.equal(lse[0, :, :2], sinks.detach()[:, None].expand(2, 2))
    gradient = torch.autograd.grad(lse[:, :, :2].sum(), sinks)[0]
    torch.testing.assert_close(gradient, torch.full_like(sinks, 2.0))  # lse is the sink itself


# ------------------------------------------------------------------------------------ masks, layouts, transforms


@pytest.mark.parametrize(
    "shape", ((3, 1, 5, 7), (1, 4, 5, 7), (1, 1, 5, 7), (1, 1, 1, 7), (3, 1, 1, 7), (5, 7), (1, 5, 1), (3, 4, 1, 1))
)
@pytest.mark.parametrize("others", ([], ["softcap"], ["alibi", "sinks"], ["dropout"]), ids="-".join)
def test_a_broadcast_bias_beside_other_options(shape, others):
    q, k, v, arguments = make(others, batch=3, q_len=5, kv_len=7)
    arguments["attn_mask"] = random_tensor(shape, torch.float64, 3)
    small = check((q, k, v), arguments)
    arguments["attn_mask"] = arguments["attn_mask"].expand(3, 4, 5, 7).clone()
    assert torch.equal(small["out"], check((q, k, v), arguments)["out"])


def test_per_sample_gradients_of_a_shared_bias():
    q, k, v = (random_tensor((4, 1, 3, n, 4), torch.float64, s) for s, n in enumerate((5, 6, 6)))
    bias = random_tensor((1, 3, 5, 6), torch.float64, 4)

    def loss(q, k, v, bias):
        return attention(q, k, v, bias).square().sum()

    together = vmap(grad(loss, (0, 3)), (0, 0, 0, None))(q, k, v, bias)
    for i in range(4):
        for a, b in zip(together, grad(loss, (0, 3))(q[i], k[i], v[i], bias)):
            torch.testing.assert_close(a[i], b)


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x):
        return attention(*(part(x).permute(0, 2, 1, 3) for part in self.parts))


@pytest.mark.parametrize("channels_last", (False, True))
def test_a_layout_that_only_compilation_changes(channels_last):
    torch.manual_seed(0)
    module, x = Convolutions(), torch.randn(1, 4, 2, 2)
    compiled = copy.deepcopy(module)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    out, other = module(x), torch.compile(compiled, fullgraph=True)(x)
    torch.testing.assert_close(other, out, rtol=1e-6, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), list(module.parameters())),
        torch.autograd.grad(other.square().sum(), list(compiled.parameters())),
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_graph_is_kept_inside_a_dispatch_mode():
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    *tensors, arguments = make(["sinks", "alibi", "mask"])
    with Passing():
        inside = check(tensors, arguments)
    outside = check(tensors, arguments)
    for name in outside:
        assert torch.equal(inside[name], outside[name]), name


@pytest.mark.parametrize("length", (1023, 1025))
def test_positions_as_bias_and_a_partial_tile(length):
    q, k, v = (random_tensor((1, 1, length, 16), seed=s, outliers=False).requires_grad_() for s in range(3))
    bias = (torch.arange(length)[:, None] - torch.arange(length)).float()
    out = attention(q, k, v, bias, is_causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    wide = [x.detach().double() for x in (q, k, v)]
    expected, _ = reference_attention(*wide, bias.double(), is_causal=True)
    plain = reference.attention(q, k, v, bias, is_causal=True)
    assert_close_to_reference(out, plain, expected)
    assert all(g.isfinite().all() for g in grads)
