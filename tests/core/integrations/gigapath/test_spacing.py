"""Whether tiles lie as tiles of the size given do: what is said of a slide whose coordinates are in other units."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.slide_encoder import SMALL, slide, small

from dilkit.integrations.gigapath import attention_map
from dilkit.integrations.gigapath.spacing import commonest_step, settled_tile_size


def block(columns=10, rows=10, step=256):
    """Tiles side by side, `(1, n, in_chans)` and `(1, n, 2)`, in no order."""
    coords = step * torch.cartesian_prod(torch.arange(columns), torch.arange(rows))
    n, generator = len(coords), torch.Generator().manual_seed(0)
    tiles = torch.randn(1, n, SMALL["in_chans"], dtype=torch.float64, generator=generator)
    return tiles, coords[torch.randperm(n, generator=generator)][None]


def said(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(one.filename == __file__ for one in found), "it points at the call of the model"
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (256, None),
        (512, "coords: most neighbours are 512 pixels apart and tile_size is 256; set tile_size=512"),
        (300, "coords: most neighbours are 300 pixels apart"),
        (128, "coords: 100 of 100 tiles share a cell of 256 x 256 pixels, 25 cells in all; unless tiles overlap"),
        (224, "coords: 64 of 100 tiles share a cell of 256 x 256 pixels, 64 cells in all"),
    ],
)
def test_tiles_of_another_size_are_warned_of(step, text):
    model = small()
    found = said(lambda: model(*block(step=step)))
    assert found == [] if text is None else [one for one in found if one.startswith(text)] == found != []
    model.tile_size = step
    assert said(lambda: model(*block(step=step))) == []


def test_numbers_of_tiles_are_no_size_of_tiles():
    with pytest.raises(ValueError, match="most neighbours are 1 apart: coords are numbers of tiles, and pixels are needed"):
        settled_tile_size(None, None, torch.cartesian_prod(torch.arange(9), torch.arange(9)))


def test_numbers_of_tiles_are_no_pixels():
    with pytest.raises(ValueError, match=r"100 of 100 tiles share a cell .* 1 cells in all, where at most 16 .* set tile_size"):
        small()(*block(step=1))
    with pytest.raises(ValueError, match="coords may be tile numbers"):
        attention_map(small(), *block(step=1))


def test_each_slide_of_a_batch_is_looked_at_by_itself():
    """The same cells in two slides are no matter; padding is not looked at."""
    model, (tiles, coords) = small(), (x.repeat(3, 1, 1) for x in block())
    mask = torch.zeros(3, 100, dtype=torch.bool)
    mask[2, 30:] = True
    coords[2, 30:] = 0
    assert said(lambda: model(tiles, coords, mask)) == []
    assert [one.partition(":")[0] for one in said(lambda: model(tiles, coords))] == ["coords of slide 2"]
    coords[1] *= 2
    assert [one.partition(":")[0] for one in said(lambda: model(tiles, coords, mask))] == ["coords of slide 1"]


def test_a_few_that_overlap_and_slides_of_a_few_tiles_are_no_matter():
    tiles, coords = block()
    coords[0, :2] = coords[0, 2:4] + 5
    assert said(lambda: small()(tiles, coords)) == []
    assert said(lambda: small()(*block(columns=4, rows=2, step=512))) == []
    assert said(lambda: small()(*slide(300))) == []


@pytest.mark.parametrize(
    ("coords", "step"),
    [
        (block(step=512)[1][0], 512),
        (block(step=512)[1][0, :40], 512),  # a random part of the slide
        (block(step=512)[1][0].double() + 0.2, 512),
        (block(columns=1, rows=100)[1][0], None),  # a column has no neighbours in a row
        (torch.zeros(50, 2), None),
        (slide(300)[1][0], None),
        (torch.zeros(1, 2), None),
    ],
)
def test_the_commonest_step(coords, step):
    assert commonest_step(coords) == step
