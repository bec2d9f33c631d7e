"""explain, trace and capture of attention under a BlockMask: those of the same mask as a tensor."""

import pytest
import torch

import attnjourney
from attnjourney import BlockMask
from tests.support.testing import random_tensor

ROWS, HEADS = [3, 50, 99], [2, 1]


def masks(lead):
    """A BlockMask for tensors with these leading dimensions, and the same as a tensor that broadcasts to them."""
    batch, heads = (1, 1, 1, *lead)[-2:]
    blocks = BlockMask.from_function(
        lambda b, h, i, j: (i >= j) & ((i // 16 + j // 16 + h) % 3 != b), 1, heads, 100, 90
    )
    dense = blocks.to_dense()
    return blocks, dense[0, 0] if not lead else dense[0] if len(lead) == 1 else dense


def test_explain_takes_blocks():
    q, k = random_tensor((2, 4, 100, 16)), random_tensor((2, 4, 90, 16))
    blocks, _ = masks((2, 4))
    plan = attnjourney.explain(q, k, k, blocks, softcap=2.0)
    assert plan["forward"]["items"] > 0 and plan["backward"]["query_tile"] > 0
    with pytest.raises(ValueError, match=r"attn_mask: expected a BlockMask for 100 rows and 80 keys"):
        attnjourney.explain(q, k[:, :, :80], k[:, :, :80], blocks)
    blocks.index[0] = 1000
    with pytest.raises(ValueError, match="block_index: expected rising numbers"):
        attnjourney.explain(q, k, k, blocks)


@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (3, 2, 4)])
def test_trace_of_blocks(lead):
    q, k = random_tensor((*lead, 100, 16)), random_tensor((*lead, 90, 16))
    blocks, dense = masks(lead)
    options = dict(rows=ROWS, heads=HEADS if lead else [0], softcap=1.5)
    seen, expected = (attnjourney.trace(q, k, k, mask, **options) for mask in (blocks, dense))
    assert list(seen) == list(expected)
    for name in seen:
        assert torch.equal(seen[name], expected[name].expand(seen[name].shape)), name
    with pytest.raises(ValueError, match="attn_mask: expected a BlockMask for"):
        attnjourney.trace(q, q, q, blocks)


def test_capture_of_blocks():
    q, k = random_tensor((2, 4, 100, 16)), random_tensor((2, 4, 90, 16))
    blocks, dense = masks((2, 4))

    class Layer(torch.nn.Module):
        def forward(self, x):
            return attnjourney.attention(x, k, k, blocks, prefix_length=3)

    layer = Layer()
    with attnjourney.capture(layer, rows=ROWS, heads=HEADS) as seen:
        layer(q)
    expected = attnjourney.attention_weights(q, k, dense, prefix_length=3)[:, HEADS][:, :, ROWS]
    torch.testing.assert_close(seen.records[0].weights, expected)
    stages = attnjourney.trace_module(layer, q, rows=ROWS, heads=HEADS)
    torch.testing.assert_close(stages.weights, expected)


def test_chosen_rows_of_a_mask():
    blocks, _ = masks((2, 4))
    assert torch.equal(blocks.dense_rows(torch.tensor([99, 0, 17])), blocks.to_dense()[:, :, [99, 0, 17]])
