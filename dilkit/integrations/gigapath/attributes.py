"""What a file of tile features says of its tiles beside their numbers, by the names that TRIDENT, CLAM and STAMP write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIZE = "patch_size_level0"
"""TRIDENT's: the side of a tile in pixels of level 0, which are the units of its coordinates."""
PIXELS = ("px", "pixel", "pixels")


def tile_size_of(said: Mapping[str, Any]) -> int | None:
    """Pixels of level 0 a side; None where that is not said. CLAM says it of tiles that are cut at level 0 (`patch_level`).

    Raises ValueError for what is no size.
    """
    if SIZE in said:
        return _whole(SIZE, said[SIZE])
    cut = {name: _whole(name, said[name]) for name in ("patch_level", "custom_downsample") if name in said}
    if "patch_size" in said and cut.get("patch_level") == 0 and cut.get("custom_downsample", 1) == 1:
        return _whole("patch_size", said["patch_size"])
    return None


def tile_encoder_of(said: Mapping[str, Any]) -> str | None:
    """The name of the network that made the features; None where that is not said."""
    names = [_text(said[name]) for name in ("encoder", "extractor") if name in said]
    return names[0] if names and names[0] != "None" else None


def check_places(coords: Tensor, said: Mapping[str, Any]) -> None:
    """Raise ValueError where the file says that coordinates are no pixels, or that the slide is smaller than they reach."""
    if "unit" in said and (unit := _text(said["unit"])).lower() not in PIXELS:
        raise ValueError(f"coords are in unit={unit!r}; pixels are needed")
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


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
