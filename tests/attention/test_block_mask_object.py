"""BlockMask: how it is made, what it tells, what it refuses; and its operator under torch.compile, export and vmap."""

import pytest
import torch
from torch.func import grad, vmap
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

import attnjourney
from attnjourney import BlockMask
from tests.support.block_patterns import PATTERNS, case, dense
from tests.support.testing import random_tensor


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block_size", (16, 48, 64))
def test_both_ways_give_the_same_mask(pattern, block_size):
    seen = PATTERNS[pattern](block_size, 130, 77)
    mask = dense(seen, 2, 3, 130, 77)
    made = BlockMask.from_function(seen, 2, 3, 130, 77, block_size)
    cut = BlockMask.from_dense(mask, block_size)
    for a, b in zip(made.tensors, cut.tensors):
        assert torch.equal(a, b)
    assert torch.equal(made.to_dense(), mask)
    assert made.shape == (2, 3, 130, 77) and made.block_size == block_size


def test_sizes_of_dense_masks():
    mask = random_tensor((5, 70, 33), outliers=False) > 0
    assert torch.equal(BlockMask.from_dense(mask).to_dense()[0], mask)
    assert torch.equal(BlockMask.from_dense(mask[0]).to_dense()[0, 0], mask[0])
    for shape in ((0, 2, 5, 5), (2, 0, 5, 5), (1, 1, 0, 5), (1, 1, 5, 0)):
        empty = BlockMask.from_dense(torch.ones(shape, dtype=torch.bool))
        assert empty.to_dense().shape == shape
        assert len(repr(empty))


def test_equal_blocks_are_stored_once_and_hidden_ones_not_at_all():
    mask = BlockMask.from_function(lambda b, h, i, j: (j <= i) & (j > i - 64), 2, 4, 640, 640, 64)
    assert mask.elements.shape == (2, 64, 64)  # the diagonal's, and the window's end
    assert len(mask.index) == 2 * 4 * (10 + 9)
    assert mask.sparsity() == 1 - 19 / 100
    assert (BlockMask.from_function(lambda b, h, i, j: j >= 0, 1, 1, 100, 130, 64).partial == -1).all()


def test_never_more_pairs_than_a_row_of_blocks():
    sizes = []

    def seen(b, h, i, j):
        result = (i - j).abs() < 50
        sizes.append(result.numel())
        return result

    BlockMask.from_function(seen, 2, 2, 1000, 1200, 32)
    assert max(sizes) == 32 * 1200 and len(sizes) == 2 * 2 * 32


def test_picture():
    mask = BlockMask.from_function(lambda b, h, i, j: (j // 16 < i // 16) | (j == i), 1, 1, 64, 64, 16)
    first, *picture = repr(mask).split("\n")
    assert first == "BlockMask(batch=1, heads=1, q_len=64, kv_len=64, block_size=16, sparsity=37.5%)"
    assert picture == ["  ▒···", "  █▒··", "  ██▒·", "  ███▒"]
    large = BlockMask.from_function(lambda b, h, i, j: j <= i, 1, 1, 16 * 100, 16 * 100, 16)
    lines = repr(large).split("\n")[1:]
    assert len(lines) <= 32 and all(len(line) <= 34 for line in lines)


def test_to_and_pytree():
    mask = BlockMask.from_function(PATTERNS["ragged"](16, 50, 60), 1, 2, 50, 60, 16)
    leaves, spec = _pytree.tree_flatten({"mask": mask})
    again = _pytree.tree_unflatten(leaves, spec)["mask"]
    assert len(leaves) == 4 and torch.equal(again.to_dense(), mask.to_dense())
    assert mask.to("meta").device.type == "meta" and mask.to("meta").shape == mask.shape
    assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense())


def made(fn=lambda b, h, i, j: i <= j, *sizes):
    return BlockMask.from_function(fn, *(sizes or (1, 1, 5, 5)))


REFUSED = [
    (lambda: made(None), TypeError, "fn: expected a function"),
    (lambda: made(lambda b, h, i, j: i + j), TypeError, "fn: .*torch.bool, got torch.int64"),
    (lambda: made(lambda b, h, i, j: True), TypeError, "fn: .*torch.bool, got bool"),
    (lambda: made(lambda b, h, i, j: (i <= j)[:, :3]), ValueError, r"fn: .* broadcasts to \(5, 5\), got \(5, 3\)"),
    (lambda: made(torch.equal, 1, 1, 5, 5, 24), ValueError, "block_size: .*16, got 24"),
    (lambda: made(torch.equal, 1, 1, 5, 5, 0), ValueError, "block_size: .*16, got 0"),
    (lambda: made(torch.equal, 1, -1, 5, 5), ValueError, "heads: .*got -1"),
    (lambda: made(torch.equal, 1.5, 1, 5, 5), ValueError, "batch: .*got 1.5"),
    (lambda: made(torch.equal, 1, 1, 5, 2.5), ValueError, "kv_len: .*got 2.5"),
    (lambda: BlockMask.from_dense(torch.ones(5, 5)), TypeError, "mask: .*torch.bool, got torch.float32"),
    (lambda: BlockMask.from_dense(torch.ones(5, dtype=torch.bool)), ValueError, "mask: expected 2 to 4 dimensions"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message[:30] for _, _, message in REFUSED])
def test_refused(make, error, message):
    with pytest.raises(error, match="^" + message):
        make()


def test_a_mask_that_does_not_fit_the_call():
    q, k = torch.zeros(2, 4, 70, 8), torch.zeros(2, 4, 90, 8)
    seen = PATTERNS["causal_blocks"](16, 70, 90)

    def call(q, k, *sizes):
        return attnjourney.attention(q, k, k, BlockMask.from_function(seen, *sizes, 16))

    for sizes, message in (
        ((1, 1, 71, 90), "attn_mask: expected a BlockMask for 70 rows and 90 keys, got one for 71 and 90"),
        ((1, 1, 70, 16), "attn_mask: expected a BlockMask for 70 rows and 90 keys, got one for 70 and 16"),
        ((3, 1, 70, 90), r"block_offsets: expected a shape that broadcasts to \(2, 4, 6\)"),
        ((1, 2, 70, 90), r"block_offsets: expected a shape that broadcasts to \(2, 4, 6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call(q, k, *sizes)
    with pytest.raises(ValueError, match="attn_mask: expected a BlockMask of one batch item"):
        call(q[0], k[0], 2, 1, 70, 90)
    with pytest.raises(TypeError, match="attn_mask"):
        attnjourney.varlen_attention(q[0], k[0], k[0], *torch.zeros(2, 2).int(), attn_mask=seen)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("block_index", lambda t: t + 100, "block_index: expected rising numbers below 6 in .* 0, got 100"),
        ("block_index", lambda t: t.flip(0), "block_index: expected rising numbers"),
        ("block_index", lambda t: t.long(), "block_index: expected dtype torch.int32, got torch.int64"),
        ("block_offsets", lambda t: t + 50, "block_offsets: expected numbers from 0 to 10 that never fall, got 50"),
        ("block_offsets", lambda t: t - 1, "block_offsets: expected numbers from 0 to 10 that never fall, got -1"),
        ("block_partial", lambda t: t + 50, "block_partial: expected numbers from -1 to"),
        ("block_partial", lambda t: t - 5, "block_partial: expected numbers from -1 to"),
        ("block_partial", lambda t: t[1:], "block_partial: expected the shape of block_index"),
        ("block_elements", lambda t: t[:, :-1], "block_elements: expected shape"),
        ("block_elements", lambda t: t.float(), "block_elements: expected dtype torch.bool"),
    ],
)  # fmt: skip
def test_lists_the_operator_refuses(name, change, message):
    """Lists that lead nowhere are never followed, in forward and backward."""
    ops = torch.ops.attnjourney
    q, k = torch.zeros(1, 1, 70, 8), torch.zeros(1, 1, 90, 8)
    mask = BlockMask.from_function(PATTERNS["causal_blocks"](16, 70, 90), 1, 1, 70, 90, 16)
    names = ("block_offsets", "block_index", "block_partial", "block_elements")
    wrong = {n: change(t) if n == name else t for n, t in zip(names, mask.tensors)}
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.block_attention_forward(q, k, k, **wrong)
    out, lse, stats = ops.block_attention_forward(q, k, k, *mask.tensors)
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.block_attention_backward(q, None, q, k, k, *wrong.values(), out, lse, stats)


@pytest.mark.parametrize("names", [(), ("sinks", "alibi_per_item", "dropout")], ids=str)
def test_opcheck(names):
    tensors, arguments, _ = case("ragged", 16, names, torch.float32)
    blocks = arguments.pop("attn_mask").tensors
    dropout_p = arguments.pop("dropout_p", 0.0)
    leaves = [x.requires_grad_() for x in tensors]
    for operator in (
        torch.ops.attnjourney.block_attention.default,
        torch.ops.attnjourney.block_attention_forward.default,
    ):
        torch.library.opcheck(operator, (*leaves, *blocks, dropout_p, False), arguments)


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_whole(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(attnjourney.attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ((70, 90), (33, 50)):
        tensors, arguments, _ = case("ragged", 16, ("sinks", "causal"), q_len=lengths[0], kv_len=lengths[1])
        leaves = [x.requires_grad_() for x in (*tensors, arguments["sinks"])]
        outs = [f(*tensors, return_lse=True, **arguments) for f in (attnjourney.attention, compiled)]
        for a, b in zip(*outs):
            assert torch.equal(a, b)
        grads = [torch.autograd.grad(out.sum(), leaves) for out, _ in outs]
        for a, b in zip(*grads):
            assert torch.equal(a, b)


def test_export():
    class Model(torch.nn.Module):
        def __init__(self, mask=None):
            super().__init__()
            self.mask = mask

        def forward(self, q, k, v, mask=None):
            return attnjourney.attention(q, k, v, mask or self.mask, enable_gqa=True)

    (q, k, v), arguments, _ = case("ragged", 16)
    mask = arguments["attn_mask"]
    expected = attnjourney.attention(q, k, v, mask, enable_gqa=True)
    for model, inputs in ((Model(mask), (q, k, v)), (Model(), (q, k, v, mask))):
        program = torch.export.export(model, inputs)
        assert torch.equal(program.module()(*inputs), expected)
        assert "block_attention" in str(program.graph)


def test_vmap_and_per_sample_gradients():
    (q, k, v), arguments, _ = case("ragged", 16, ("sinks",))
    mask, sinks = arguments["attn_mask"], arguments["sinks"]

    def loss(q, k, v, sinks):
        return attnjourney.attention(q, k, v, mask, enable_gqa=True, sinks=sinks).square().sum()

    samples = [torch.stack([x, 2 * x, -x]) for x in (q, k, v)]
    batched = vmap(grad(loss, argnums=(0, 1, 2, 3)), (0, 0, 0, None))(*samples, sinks)
    loop = [grad(loss, argnums=(0, 1, 2, 3))(*(x[i] for x in samples), sinks) for i in range(3)]
    for ours, theirs in zip(batched, zip(*loop)):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-12, atol=1e-12)


def test_a_mask_a_sample():
    q = random_tensor((3, 2, 2, 40, 8), torch.float64)
    masks = [
        BlockMask.from_function(lambda b, h, i, j, n=n: (i // 16 + j // 16) % 3 != n, 1, 1, 40, 40, 16)
        for n in range(3)
    ]
    masks = [m.tensors for m in masks]
    smallest = min(len(m[1]) for m in masks)
    stacked = [torch.stack([m[0].clamp(max=smallest) for m in masks])]
    stacked += [torch.stack([m[i][:smallest] for m in masks]) for i in (1, 2)]
    operator = torch.ops.attnjourney.block_attention
    ours = vmap(lambda q, *m: operator(q, q, q, *m), (0, 0, 0, 0, None))(q, *stacked, masks[0][3])
    for i in range(3):
        theirs = operator(q[i], q[i], q[i], *(x[i] for x in stacked), masks[0][3])
        torch.testing.assert_close(ours[i], theirs, rtol=1e-12, atol=1e-12)


def test_autocast():
    (q, k, v), arguments, _ = case("ragged", 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attnjourney.attention(q, k, v, **arguments)
    assert torch.equal(ours, attnjourney.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **arguments))


def test_flops_are_those_of_the_visible_blocks():
    q = torch.zeros(2, 4, 128, 8, requires_grad=True)
    mask = BlockMask.from_function(lambda b, h, i, j: i // 32 == j // 32, 1, 1, 128, 128, 32)
    with FlopCounterMode(display=False) as counter:
        attnjourney.attention(q, q, q, mask).sum().backward()
    pairs = 2 * 4 * 4 * 32 * 32
    assert counter.get_total_flops() == 2 * pairs * (8 + 8) + 2 * pairs * 5 * 8
