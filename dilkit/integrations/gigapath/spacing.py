"""Checks of the distances between tiles against their size: a mismatch means other units, or a wrong size.

Tiles that do not overlap never share a cell of the grid, and most of them have a neighbour one tile further on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_IN_A_CELL = 16
"""Tiles that overlap by three quarters each way; nobody cuts more."""
FEW = 0.1
"""Up to this share of a slide's tiles nothing is said: pieces of tissue that were cut into tiles apart may overlap a little."""
FEWEST = 8
"""Neighbours of one distance that have to be there to say something: a few tiles may lie anywhere."""


USUAL_SIZE = 256
"""Pixels a side of GigaPath's tiles."""
LEAST_SIZE = 16
"""Nobody cuts smaller tiles."""


def settled_tile_size(said: int | None, given: int | None, coords: Tensor, option: str = "tile_size") -> tuple[int, str]:
    """Return a tile's side in pixels, and who says so: the file, `option`, or nobody where tiles lie as usual ones do.

    `said`: what the file says, `given`: what `option` does. Raises ValueError where these differ, or nobody says it and tiles
    lie as those of another size.
    """
    if said is not None:
        if given not in (None, said):
            raise ValueError(f"tiles have {said} pixels a side, as the file says, but {option} says {given}")
        return said, "file"
    if given is not None:
        return given, option
    step = commonest_step(coords)
    if step is not None and step < LEAST_SIZE:
        raise ValueError(f"most neighbours are {step} apart: coords are numbers of tiles, and pixels are needed")
    if step not in (None, USUAL_SIZE):
        raise ValueError(
            f"most neighbours are {step} pixels apart, and neither the file nor {option} says how large tiles are; "
            f"give {option} {step}, or what it is if they overlap or have gaps between"
        )
    return USUAL_SIZE, "default"


def check_spacing(coords: Tensor, cells: Tensor, lengths: Sequence[int], tile_size: int) -> None:
    """Look at slides, packed, of `lengths` tiles each, by their pixels and cells, both `(n, 2)`.

    Raises ValueError where more than `MOST_IN_A_CELL` tiles come to a cell; warns where tiles share cells, or have gaps between.
    """
    slides = zip(torch.split(coords, list(lengths)), torch.split(cells, list(lengths)), strict=True)
    for slide, (pixels, own) in enumerate(slides):
        named = "coords" if len(lengths) == 1 else f"coords of slide {slide}"
        occupied, sharing = crowding(own)
        what = f"{named}: {sharing} of {len(own)} tiles share a cell of {tile_size} x {tile_size} pixels, {occupied} cells in all"
        way_out = "coords may be tile numbers or of another level than tile_size is of: give pixels, or set tile_size"
        if len(own) > MOST_IN_A_CELL * occupied:
            raise ValueError(f"{what}, where at most {MOST_IN_A_CELL} to a cell make sense; {way_out}")
        if sharing > FEW * len(own):
            _warn(f"{what}; unless tiles overlap or are there twice, {way_out}")
        elif (step := commonest_step(pixels)) is not None and step > tile_size:
            gaps = f"set tile_size={step}, unless there are gaps between tiles"
            _warn(f"{named}: most neighbours are {step} pixels apart and tile_size is {tile_size}; {gaps}")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=9)  # the call of the model


def crowding(cells: Tensor) -> tuple[int, int]:
    """Return the number of distinct cells in `(n, 2)`, and the number of the n that share their cell."""
    _, counts = torch.unique((cells[:, 0] << 32) + cells[:, 1], return_counts=True)
    return len(counts), int(counts[counts > 1].sum())


def commonest_step(coords: Tensor) -> int | None:
    """Return the pixels from most tiles to the next of their row; None where few have the same distance."""
    numbers = coords.round().long() if coords.is_floating_point() else coords.long()
    by_x = numbers[numbers[:, 0].argsort()]
    steps_x, steps_y = by_x[by_x[:, 1].argsort(stable=True)].diff(dim=0).unbind(dim=1)
    steps, counts = torch.unique(steps_x[(steps_y == 0) & (steps_x > 0)], return_counts=True)
    most = int(counts.max()) if len(counts) else 0
    return int(steps[counts.argmax()]) if most >= max(FEWEST, FEW * len(coords)) else None
