"""Padded and packed batches as packed sequences, by their positions; needs no transformers."""

from __future__ import annotations

import pytest
import torch

from dilkit.integrations.transformers.packing import of_positions, of_tokens


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([[0, 1, 2, 0, 1]], [0, 3, 5]),
        ([[0, 1, 2, 4, 5]], [0, 3, 5]),  # a jump ahead begins a sequence, as in transformers' own masks
        ([[0, 1, 1, 2, 3]], [0, 2, 5]),
        ([[5, 6, 7], [0, 0, 1]], [0, 3, 4, 6]),
    ],
)
def test_a_sequence_begins_where_positions_do_not_go_on_by_one(positions: list[list[int]], starts: list[int]) -> None:
    found = of_positions(torch.tensor(positions), len(positions))
    assert found is not None
    assert found.cu_seqlens.tolist() == starts
    assert found.longest == len(positions[0])


def test_positions_of_one_row_are_those_of_the_whole_batch() -> None:
    found = of_positions(torch.tensor([[0, 1, 0]]), 2)
    assert found is not None
    assert found.cu_seqlens.tolist() == [0, 2, 3, 5, 6]
    assert of_positions(torch.tensor([[3, 4, 5]]), 2) is None


def test_tokens_of_a_padded_batch_are_packed_and_put_back() -> None:
    tokens = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    packing, x = of_tokens(tokens), torch.arange(9.0).view(3, 3, 1, 1)
    assert packing.cu_seqlens.tolist() == [0, 2, 3, 6]
    packed = packing.pack(x)
    assert packed.flatten().tolist() == [1, 2, 3, 6, 7, 8]
    assert torch.equal(packing.unpack(packed, 3, 3), x.masked_fill(~tokens[:, :, None, None], 0.0))
