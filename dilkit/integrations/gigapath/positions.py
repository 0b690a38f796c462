"""The places of tiles: fixed sin-cos positions by coordinate, without a table of all cells, and checks of tiles' distances."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

BASE = 10000.0


def holds_pixels(dtype: torch.dtype) -> bool:
    """True if coordinates of this dtype hold every pixel of a slide: half types round beyond 2,048, or 256."""
    if dtype.is_floating_point:
        return dtype in (torch.float32, torch.float64)
    return not dtype.is_complex and dtype != torch.bool


class GridPositions(nn.Module):
    """The position of cell (x, y) of the grid: the half for y, then the half for x, from `halves` `(ngrids, embed_dim / 2)`.

    half(p) = [sin(p w_0), sin(p w_1), ..., cos(p w_0), cos(p w_1), ...]        w_i = BASE ** (-i / (embed_dim / 4))
    """

    halves: Tensor

    def __init__(self, embed_dim: int, ngrids: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.ngrids = ngrids
        place = torch.empty(0, device=device).device  # of None torch's default
        halves = _halves(embed_dim, ngrids).to(place)
        self.register_buffer("halves", halves, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> GridPositions:
        """Convert the buffer, and fill it when it leaves the meta device (`to_empty`): no state dict holds its numbers."""
        had_none = self.halves.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if had_none and not self.halves.is_meta:
            self.halves.copy_(_halves(2 * self.halves.shape[1], self.ngrids))
        return self

    def forward(self, cells: Tensor) -> Tensor:
        x, y = cells.unbind(dim=1)
        return torch.cat((self.halves[y], self.halves[x]), dim=1)

    def cells(self, coords: Tensor, tile_size: int) -> Tensor:
        """Return the cells `(n, 2)` of tiles at pixels `coords`. Raises TypeError for half types, ValueError outside the grid."""
        if not holds_pixels(coords.dtype):
            raise TypeError(f"coords is {coords.dtype}, which does not hold every pixel; integers or float32 are needed")
        numbers = coords if coords.is_floating_point() else coords.long()
        cells = torch.div(numbers, tile_size, rounding_mode="floor")
        inside = ((cells >= 0) & (cells < self.ngrids)).all(dim=1)  # NaN is neither
        if not bool(inside.all()):
            first, outside = int(inside.logical_not().nonzero()[0]), int(inside.logical_not().sum())
            raise ValueError(
                f"coords: tile {first} of {len(coords)} is at {tuple(coords[first].tolist())}, and {outside} lie outside the "
                f"grid of {self.ngrids} x {self.ngrids} tiles of {tile_size} pixels: 0 to {self.ngrids * tile_size - 1} is "
                "needed; raise ngrids, or give pixels of the level that tile_size is of"
            )
        return cells.long()

    def extra_repr(self) -> str:
        return f"ngrids={self.ngrids}"


def _halves(embed_dim: int, ngrids: int) -> Tensor:
    exact: dict[str, Any] = dict(dtype=torch.float64, device="cpu")
    frequencies = BASE ** -(torch.arange(embed_dim // 4, **exact) / (embed_dim // 4))
    angles = torch.arange(ngrids, **exact)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


MOST_IN_A_CELL = 16
"""Tiles that overlap by three quarters each way; nobody cuts more."""
FEW = 0.1
"""Up to this share of a slide's tiles nothing is said: pieces of tissue that were cut into tiles apart may overlap a little."""
FEWEST = 8
"""Neighbours of one distance that have to be there to say something: a few tiles may lie anywhere."""


USUAL_SIZE = 256
LEAST_SIZE = 16
"""Nobody cuts smaller tiles."""


def settled_tile_size(said: int | None, given: int | None, coords: Tensor, option: str = "tile_size") -> tuple[int, str]:
    """Return a tile's side in pixels, and who says so: the file (`said`), `option` (`given`), or nobody where tiles lie as usual.

    Raises ValueError where these differ, or nobody says it and tiles lie as those of another size.
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
    """Warn of packed slides whose tiles share cells or have gaps between. Raises ValueError above `MOST_IN_A_CELL` to a cell."""
    slides = zip(torch.split(coords, list(lengths)), torch.split(cells, list(lengths)), strict=True)
    for slide, (pixels, own) in enumerate(slides):
        named = "coords" if len(lengths) == 1 else f"coords of slide {slide}"
        _, counts = torch.unique((own[:, 0] << 32) + own[:, 1], return_counts=True)
        occupied, sharing = len(counts), int(counts[counts > 1].sum())
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


def commonest_step(coords: Tensor) -> int | None:
    """Return the pixels from most tiles to the next of their row; None where few have the same distance."""
    numbers = coords.round().long() if coords.is_floating_point() else coords.long()
    by_x = numbers[numbers[:, 0].argsort()]
    steps_x, steps_y = by_x[by_x[:, 1].argsort(stable=True)].diff(dim=0).unbind(dim=1)
    steps, counts = torch.unique(steps_x[(steps_y == 0) & (steps_x > 0)], return_counts=True)
    most = int(counts.max()) if len(counts) else 0
    return int(steps[counts.argmax()]) if most >= max(FEWEST, FEW * len(coords)) else None
