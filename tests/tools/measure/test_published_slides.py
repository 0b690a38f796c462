"""The published procedure of the slide encoder, which `dilkit bench --suite slides` compares with."""

from __future__ import annotations

import pytest
from helpers.slide_encoder import LENGTHS, embeddings, slide, small

from dilkit.tools.measure.published_slides import published_embedding


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 13, 30)], ids=["multiples of the rates", "others"])
@pytest.mark.parametrize("n", [2, 31, 45, 70])
def test_the_published_procedure_is_that_of_the_paper(n: int, lengths: tuple[int, ...]) -> None:
    model, (tiles, coords) = small(segment_lengths=lengths), slide(n)
    *_, exact = embeddings(model.state_dict(), model.config, tiles[0], coords[0])
    assert (published_embedding(model, tiles, coords)[0] - exact).abs().max() <= 1e-12
