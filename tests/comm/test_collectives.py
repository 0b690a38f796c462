"""Sums over ranks and copies from one."""

import pytest
import torch

from dilkit.comm import PlanMismatch, copy_from_rank, run_threads, sum_over_ranks

SHAPES = [(3, 7), (), (0, 4), (11,)]


def drawn(rank, dtype):
    draw = torch.Generator().manual_seed(rank)
    first, *others = (torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES)
    return [first.t(), *others]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 40])
def test_sums_are_right_and_the_same_bits_on_every_rank(world_size, dtype):
    """Added up in the order of ranks, in float32 at least; what is sent does not grow with the ranks."""

    def on_rank(comm):
        tensors = drawn(comm.rank, dtype)
        sum_over_ranks(tensors, comm)
        return tensors, comm.sent_bytes

    wide = torch.promote_types(dtype, torch.float32)
    totals = [torch.zeros_like(x, dtype=wide) for x in drawn(0, dtype)]
    for rank in range(world_size):
        totals = [total + x for total, x in zip(totals, drawn(rank, dtype), strict=True)]
    found = run_threads(world_size, on_rank)
    for tensors, sent in found:
        assert all(torch.equal(x, total.to(dtype)) for x, total in zip(tensors, totals, strict=True))
        assert sent <= 2 * max(33, world_size) * wide.itemsize
    assert sum(sent for _, sent in found) == 2 * (world_size - 1) * 33 * wide.itemsize


def test_what_cannot_be_summed_is_refused_on_all_ranks():
    def on_rank(comm, wrong):
        good = torch.zeros(4)
        with pytest.raises((TypeError, PlanMismatch)) as caught:
            sum_over_ranks([good, wrong] if comm.rank else [good, good], comm)
        return caught.type

    assert run_threads(2, lambda comm: on_rank(comm, torch.zeros(5))) == [PlanMismatch, PlanMismatch]
    for wrong in (None, torch.zeros(4, dtype=torch.int64)):
        assert run_threads(2, lambda comm, wrong=wrong: on_rank(comm, wrong)) == [PlanMismatch, TypeError]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [0, 2])
def test_copies_are_what_the_source_has(source, dtype):
    def on_rank(comm):
        tensors = [x.requires_grad_() for x in drawn(comm.rank, dtype)]
        copy_from_rank(tensors, comm, source)
        with pytest.raises(ValueError, match="source=3 is no rank; ranks are 0 to 2"):
            copy_from_rank([], comm, 3)
        return tensors

    for found in run_threads(3, on_rank):
        assert all(torch.equal(x, y) and x.requires_grad for x, y in zip(found, drawn(source, dtype), strict=True))
