"""The fixed sin-cos positions of a grid of tiles, by coordinate: no table of all cells is made."""

from __future__ import annotations

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
    """The position of the tile in cell (x, y) of the grid: the half for y, then the half for x; each is sines, then cosines.

        half(p) = [sin(p w_0), sin(p w_1), ..., cos(p w_0), cos(p w_1), ...]        w_i = BASE ** (-i / (embed_dim / 4))

    It holds `ngrids` rows of `embed_dim / 2` numbers, worked out in double precision and rounded to single.
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
        """Return `(n, embed_dim)` for `cells` `(n, 2)`, x and y, as `cells` gives them."""
        x, y = cells.unbind(dim=1)
        return torch.cat((self.halves[y], self.halves[x]), dim=1)

    def cells(self, coords: Tensor, tile_size: int) -> Tensor:
        """Return the cells of the grid that tiles at `coords` `(n, 2)`, pixels x and y, are in: `(n, 2)`, x and y.

        Raises TypeError for numbers that do not hold every pixel, ValueError for a tile outside the grid.
        """
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
