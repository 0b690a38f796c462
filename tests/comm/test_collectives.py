"""What training needs of ranks besides the attention: sums and copies that are the same on all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dilkit.comm import copy_from_rank, run_threads, sum_over_ranks
from dilkit.comm.transports.threads import ThreadComm

SHAPES = [(3, 2), (), (0,), (5,)]


def drawn(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of a rank; one of them is not contiguous."""
    draw = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    return [*tensors, torch.randn(4, 3, generator=draw).to(dtype).t()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 40])
def test_sums_are_right_and_the_same_bits_on_every_rank(world_size: int, dtype: torch.dtype) -> None:
    def on_rank(comm: ThreadComm) -> list[Tensor]:
        tensors = drawn(comm.rank, dtype)
        sum_over_ranks(tensors, comm)
        return tensors

    expected = drawn(0, dtype)
    wide = [x.to(torch.float64 if dtype == torch.float64 else torch.float32) for x in expected]
    for rank in range(1, world_size):
        wide = [total + x for total, x in zip(wide, drawn(rank, dtype), strict=True)]
    for found in run_threads(world_size, on_rank):
        for x, total in zip(found, wide, strict=True):
            assert torch.equal(x, total.to(dtype))


@pytest.mark.parametrize("source", [0, 2])
def test_copies_are_what_the_source_has(source: int) -> None:
    def on_rank(comm: ThreadComm) -> list[Tensor]:
        tensors = [x.requires_grad_() for x in drawn(comm.rank, torch.float32)]
        copy_from_rank(tensors, comm, source)
        return tensors

    for found in run_threads(3, on_rank):
        assert all(torch.equal(x, y) and x.requires_grad for x, y in zip(found, drawn(source, torch.float32), strict=True))


def test_a_source_that_is_no_rank_and_tensors_that_are_none() -> None:
    def on_rank(comm: ThreadComm) -> None:
        with pytest.raises(ValueError, match="source=2 is no rank; ranks are 0 to 1"):
            copy_from_rank([], comm, 2)
        with pytest.raises(TypeError, match="tensors holds one that is a NoneType"):
            sum_over_ranks([None], comm)  # type: ignore[list-item]

    run_threads(2, on_rank)
