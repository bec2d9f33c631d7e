"""Operators that write their arguments: memory that overlaps, views of negatives, caches of inference mode; numbers of
int64 arguments that no size bounds."""

import pytest
import torch

import attnjourney
from tests.support.direct_calls import arguments_of, call_of, covered

ops = torch.ops.attnjourney


def written(name):
    return [a.name for a in arguments_of(name) if a.alias_info is not None and a.alias_info.is_write]


WRITERS = [name for name in covered() if written(name)]


def a_call(name):
    """One in which every written tensor has elements and something is written."""
    for seed in range(200):
        call = call_of(name, seed, torch.float32)
        sizes = [call[n].shape for n in written(name) if call[n] is not None]
        if all(s.numel() > 1 and s[0] > 1 for s in sizes) and call.get("key", sizes[0]) is not None:
            return call
    raise AssertionError(f"{name}: no such call")


@pytest.mark.parametrize("name", WRITERS)
def test_a_written_tensor_that_overlaps_itself_is_refused(name):
    call = a_call(name)
    before = {n: x.clone() for n, x in call.items() if isinstance(x, torch.Tensor)}
    for which in written(name):
        if call[which] is None or call[which].dim() < 2 or call[which].dtype == torch.int32:  # these must be contiguous
            continue
        same = call[which][:1].expand_as(call[which])
        with pytest.raises(RuntimeError, match=f"{which}: unsupported operation: more than one element"):
            getattr(ops, name)(**{**call, which: same})
    assert all(torch.equal(call[n], x) for n, x in before.items())


def test_two_written_tensors_that_overlap_are_refused():
    cache, lengths, new = torch.zeros(2, 1, 8, 4), torch.tensor([1, 2]), torch.ones(2, 1, 1, 4)
    with pytest.raises(RuntimeError, match="value_cache: unsupported operation: expected memory apart from key_cache"):
        ops.kv_cache_append(cache, cache, lengths, new, new)
    both = torch.zeros(2, 1, 8, 8)  # side by side in one tensor: apart
    ops.kv_cache_append(both[..., :4], both[..., 4:], lengths, new, 2 * new)
    assert both[0, 0, 1].tolist() == [1] * 4 + [2] * 4


def test_what_is_read_is_read_as_it_was():
    cache = torch.randn(1, 2, 9, 4)
    before = cache.clone()
    ops.kv_cache_append(cache, None, torch.tensor([1]), cache[:, :, 0:3], None)
    assert torch.equal(cache[:, :, 1:4], before[:, :, 0:3])
    lengths, cache = torch.tensor([1, 0, 2]), torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 1, 4, 1)
    ops.kv_cache_reorder(cache, None, lengths, lengths)
    assert lengths.tolist() == [0, 1, 2]
    table = torch.rand(4, 4)
    turned = ops.rope(table.view(1, 1, 4, 4), table[:, :2].clone(), table[:, 2:].clone())
    ops.rope_(table.view(1, 1, 4, 4), table[:, :2], table[:, 2:])
    assert torch.equal(table.view(1, 1, 4, 4), turned)


def negative(x):
    """The same numbers as a view of another tensor's negative."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("name", ["rope_", "kv_cache_append", "kv_cache_reorder", "paged_cache_append"])
def test_views_of_negatives(name):
    call = a_call(name)
    other = {n: negative(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for n, x in call.items()}
    other = {n: x.clone() if isinstance(x, torch.Tensor) and not x.is_neg() else x for n, x in other.items()}
    getattr(ops, name)(**other)
    getattr(ops, name)(**call)
    for which in written(name):
        assert call[which] is None or torch.equal(other[which], call[which])


def test_a_cache_of_inference_mode_is_not_written_outside_of_it():
    with torch.inference_mode():
        cache = attnjourney.KVCache(1, 1, 8, 4)
        cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    with pytest.raises(RuntimeError, match="inplace update to inference tensor outside InferenceMode"):
        cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))


HUGE = (2**63 - 1, 2**62, 2**56 + 1, 2**40, 2**31, -(2**63), -1)


@pytest.mark.parametrize("name", [n for n in covered() if any(str(a.type) == "int" for a in arguments_of(n))])
def test_numbers_that_no_size_bounds(name):
    call = call_of(name, 5, torch.float32)
    for argument in arguments_of(name):
        for number in HUGE if str(argument.type) == "int" and argument.name in call else ():
            try:
                getattr(ops, name)(**{**call, argument.name: number})
            except ValueError as error:
                assert argument.name in str(error) or "head dimensions" in str(error)
                continue
            sizes = {"block_size": 2**40, "query_block_size": 2**40, "prefix_length": 2**63, "need": 2**63}
            most = sizes.get(argument.name, 0)
            fits = argument.name == "need" or 0 < number <= most
            assert fits, f"{argument.name}={number} was accepted"


def test_block_size_that_overflows_the_capacity():
    i32 = dict(dtype=torch.int32)
    tables = torch.tensor([5]), torch.zeros(1, 1, **i32), torch.ones(1, **i32)
    for size in (2**63 - 1, 2**62, 0, -1):
        with pytest.raises(ValueError, match="block_size: expected a number of at least 1"):
            ops.paged_cache_truncate(*tables, torch.tensor([2]), block_size=size)


def test_a_block_has_fewer_holders_than_its_count_can_tell():
    i32 = dict(dtype=torch.int32)
    refs = torch.tensor([2**31 - 1, 1], **i32)
    with pytest.raises(ValueError, match="block_refs: expected fewer than 2\\^31 - 1 for block 0"):
        ops.paged_cache_reorder(torch.tensor([1, 1]), torch.tensor([[0], [1]], **i32), refs, torch.tensor([0, 0]))
    assert refs.tolist() == [2**31 - 1, 1]


def test_sizes_of_empty_tensors_that_no_memory_bounds():
    wide = torch.empty(0, 1, 1, 8).as_strided((0, 2**62, 2**62, 8), (1, 1, 1, 1))
    key = torch.zeros(1, 1, 1, 8)
    for name in ("attention", "attention_forward"):
        with pytest.raises(ValueError, match="query: expected at most 2\\^56 numbers"):
            getattr(ops, name)(wide, key, key)
    with pytest.raises(ValueError, match="at most 2\\^56"):
        ops.attention(torch.zeros(1, 1, 1, 1, 8).expand(2**40, 1, 1, 1, 8), key.expand(1, 2**40, 1, 1, 8), key[None])
