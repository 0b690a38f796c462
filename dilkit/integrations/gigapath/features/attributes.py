"""The attributes of tiles in a file of features: units, sizes and tile encoder, under the names that each producer writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIZES = ("patch_size_level0", "tile_size_lv0")
"""TRIDENT's and slide2vec's: the side of a tile in pixels of level 0, which are the units of its coordinates."""
PIXELS = ("px", "pixel", "pixels")
MICRONS = ("um", "\N{MICRO SIGN}m", "\N{GREEK SMALL LETTER MU}m", "micron", "microns")


@dataclass(frozen=True)
class TileGrid:
    """The places of tiles: coordinates `(n, 2)` in pixels, the side of a tile in pixels, and of a pixel in micrometres.

    `tile_size` is None where the file has none; `microns` is None where the file's own coordinates are pixels, of level 0.
    """

    coords: Tensor
    tile_size: int | None
    microns: float | None = None


def grid_of(coords: Tensor, said: Mapping[str, Any], microns_per_pixel: float | None = None) -> TileGrid:
    """Return the places of tiles in pixels. STAMP's micrometres are turned into pixels of the tiles as they were embedded.

    `microns_per_pixel` serves where the file does not say how many pixels a tile has. Raises ValueError for coordinates in other
    units, or that lie outside the slide.
    """
    unit = text_of(said["unit"]).lower() if "unit" in said else None
    if unit in MICRONS or (unit is None and "tile_size_um" in said):
        return _from_microns(coords, said, microns_per_pixel)
    if unit is not None and unit not in PIXELS:
        raise ValueError(f"coords are in unit={unit!r}; pixels or micrometres are needed")
    check_inside(coords, said)
    return TileGrid(coords, tile_size_of(said))


def _from_microns(coords: Tensor, said: Mapping[str, Any], microns_per_pixel: float | None) -> TileGrid:
    """Convert micrometres to whole pixels: unrounded, a tile at a multiple of the tile size may fall into the cell before."""
    sizes = [positive(name, said[name]) for name in ("tile_size_um", "tile_size") if name in said]
    if "tile_size_px" in said and sizes:
        pixels = _whole("tile_size_px", said["tile_size_px"])
        if pixels < 1:
            raise ValueError(f"tile_size_px={pixels} must be at least 1")
    elif microns_per_pixel is None:
        raise ValueError(
            "coords are in unit='um', and the file does not say how many micrometres a pixel has (tile_size_um and tile_size_px, "
            "as STAMP 2.1 and later write them); give microns_per_pixel (--microns-per-pixel) of level 0, as the scan says"
        )
    elif not sizes:
        return TileGrid((coords.double() / microns_per_pixel).round().long(), None, microns_per_pixel)
    else:
        pixels = max(1, round(sizes[0] / microns_per_pixel))
    return TileGrid((coords.double() * pixels / sizes[0]).round().long(), pixels, sizes[0] / pixels)


def tile_size_of(said: Mapping[str, Any]) -> int | None:
    """Return pixels of level 0 a side; None where the file does not say. CLAM says it by the level that tiles are cut at.

    Raises ValueError for what is no size.
    """
    for name in (*SIZES, "tile_size"):
        if name in said:
            return _whole(name, said[name])
    cut = {name: _whole(name, said[name]) for name in ("patch_level", "custom_downsample") if name in said}
    if "patch_size" not in said or "patch_level" not in cut or cut.get("custom_downsample", 1) != 1:
        return None
    if cut["patch_level"] == 0:
        return _whole("patch_size", said["patch_size"])
    if "downsample" not in said:
        return None
    factor = int(positive("downsample", np.ravel(np.asarray(said["downsample"]))[0]))  # CLAM steps by whole ones
    return _whole("patch_size", said["patch_size"]) * factor


def tile_encoder_of(said: Mapping[str, Any]) -> str | None:
    """Return the name of the network that made the features; None where that is not said."""
    names = [text_of(said[name]) for name in ("encoder", "extractor", "encoder_name") if name in said]
    return names[0] if names and names[0] != "None" else None


def check_inside(coords: Tensor, said: Mapping[str, Any]) -> None:
    """Raise ValueError where the file says that the slide is smaller than coordinates reach."""
    names = ("level0_width", "level0_height")
    if not all(name in said for name in names):
        return
    width, height = sides = [_whole(name, said[name]) for name in names]
    outside = (coords.double() >= torch.tensor(sides)).any(dim=1).nonzero()
    if len(outside):
        x, y = coords[int(outside[0])].tolist()
        raise ValueError(
            f"coords of tile {int(outside[0])} are {(x, y)}, and {len(outside)} lie outside the slide of {width} x {height} "
            "pixels that the file says; x comes first, then y"
        )


def _whole(name: str, value: Any) -> int:
    numbers = np.asarray(value)
    if numbers.size != 1 or numbers.dtype.kind not in "iuf" or numbers.item() != numbers.item() // 1 or numbers.item() < 0:
        raise ValueError(f"{name}={value!r} is no whole number of pixels or levels")
    return int(numbers.item())


def positive(name: str, value: Any) -> float:
    """Return a number above 0. Raises ValueError naming it for anything else."""
    numbers = np.asarray(value)
    if numbers.size != 1 or numbers.dtype.kind not in "iuf" or not 0 < numbers.item() < float("inf"):
        raise ValueError(f"{name}={value!r} is no number above 0")
    return float(numbers.item())


def text_of(value: Any) -> str:
    """Return a text that a file holds as text or as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
