"""The tiles of one slide, as a file of features holds them: `read_features`, and `read_header` without the features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilkit.integrations.gigapath.checkpoint import is_dense
from dilkit.integrations.gigapath.features.arrays import COORDS, NAMES, Content, content_of
from dilkit.integrations.gigapath.features.attributes import TileGrid, grid_of, tile_encoder_of
from dilkit.integrations.gigapath.features.folders import ENDINGS, NPY, coordinates_of
from dilkit.integrations.gigapath.positions import holds_pixels

GROUP = f"{NAMES[0]}/"
"""The group of an HDF5 file in which AtlasPatch puts the features of each tile encoder."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Features(NamedTuple):
    """The tiles of one slide, as `read_features` finds them.

    - `tiles`: `(n, in_chans)` floating-point numbers.
    - `coords`: `(n, 2)` pixels x and y: of level 0, or of the tiles as they were embedded where the file has micrometres.
    - `tile_size`: how many such pixels a side the tiles have, as the file says: `model.tile_size`. None where it does not say.
    - `tile_encoder`: the network that made the features, as the file says; None where it does not.
    """

    tiles: Tensor
    coords: Tensor
    tile_size: int | None
    tile_encoder: str | None


@dataclass(frozen=True)
class Header:
    """The header of a file of features: all but the features themselves.

    `tiles` and `in_chans` are the shape of the features; `coords`, `tile_size` and `tile_encoder` those of `Features`; `microns`
    is how many micrometres a pixel of `coords` has where the file has micrometres, else None.
    """

    tiles: int
    in_chans: int
    coords: Tensor
    tile_size: int | None
    tile_encoder: str | None
    microns: float | None


def read_features(
    path: str | Path,
    *,
    coords: str | Path | None = None,
    microns_per_pixel: float | None = None,
    tile_encoder: str | None = None,
) -> Features:
    """Read the tiles of one slide: `Features(tiles, coords, tile_size, tile_encoder)`.

    - `.pt`: a dictionary of tensors, `features`, `tile_embeds` or `feats`, and `coords`; no code is read.
    - `.h5`: datasets of these names, as TRIDENT, CLAM and STAMP write them; or AtlasPatch's `features/ENCODER`, of which
      `tile_encoder` names one by a part of its name where there are several. It needs h5py.
    - `.npz`: arrays of these names.
    - `.npy`: the features; the coordinates are in the file beside it, `NAME.coords.npy` for `NAME.npy`.

    A `.pt` or `.npz` file may hold the features alone. Their coordinates are where slide2vec's `NAME.meta.json` beside it
    says, or in the folder `coords`: `NAME.h5` of CLAM's patches, `NAME_patches.h5` of TRIDENT, `NAME.coordinates.npz` of
    slide2vec. The file in that folder says the tile size, too, of features in whose own file nothing is said, as in CLAM's.

    A file says the rest in attributes of an `.h5` file or its datasets, or in entries of the dictionary:
    `patch_size_level0`, `tile_size_lv0`, or `patch_size` with `patch_level` and `downsample`; `encoder`, `extractor` or
    `encoder_name`; `level0_width`, `level0_height` and `unit` are checked. STAMP's micrometres become pixels of its tiles by
    `tile_size_um` and `tile_size_px`; where a file lacks these, `microns_per_pixel` is needed. A first dimension of 1 is dropped.

    Raises OSError for a file that cannot be read, ImportError where h5py is missing, and ValueError, naming the file, for a
    damaged one and for other content: names, shapes, dtypes, no tiles, numbers that are not finite, coordinates in other units or
    outside the slide.

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath import read_features
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "slide.pt")
        ...     torch.save({"features": torch.randn(5, 8), "coords": torch.zeros(5, 2), "patch_size_level0": 512}, path)
        ...     tiles, coords, tile_size, _ = read_features(path)
        >>> tiles.shape, coords.shape, tile_size
        (torch.Size([5, 8]), torch.Size([5, 2]), 512)
    """
    path = Path(path)
    content = content_of(path)
    name = _features(content, tile_encoder)
    where, said = _coordinates(content, coords, name)
    tiles = _tensor(path, name, content.read(name))
    grid = _grid(path, tuple(tiles.shape), where, said, microns_per_pixel)
    if tiles.dtype not in FLOATS:
        raise ValueError(f"{path}: features are {tiles.dtype}; float16, bfloat16, float32 or float64 is needed")
    finite = tiles.isfinite().all(dim=1)
    if not bool(finite.all()):
        raise ValueError(f"{path}: features of tile {int(finite.logical_not().nonzero()[0])} are not finite")
    return Features(tiles, grid.coords, grid.tile_size, tile_encoder_of(said))


def read_header(
    path: str | Path,
    *,
    coords: str | Path | None = None,
    microns_per_pixel: float | None = None,
    tile_encoder: str | None = None,
) -> Header:
    """Read a file's header, without the features. Raises as `read_features` does.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from dilkit.integrations.gigapath import read_header
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"features": torch.randn(5, 8), "coords": torch.zeros(5, 2)}, Path(folder, "slide.pt"))
    ...     header = read_header(Path(folder, "slide.pt"))
    >>> header.tiles, header.in_chans
    (5, 8)
    """
    path = Path(path)
    content = content_of(path)
    name = _features(content, tile_encoder)
    shape = content.shapes[name]
    where, said = _coordinates(content, coords, name)
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    grid = _grid(path, shape, where, said, microns_per_pixel)
    return Header(shape[0], shape[1], grid.coords, grid.tile_size, tile_encoder_of(said), grid.microns)


def _features(content: Content, tile_encoder: str | None) -> str:
    """Return the name of the features. Raises ValueError unless one array has such a name, or one is of this tile encoder."""
    named = [name for name in NAMES if name in content.shapes]
    if not named and (encoders := [name for name in content.shapes if name.startswith(GROUP)]):
        return _of_encoder(content.path, encoders, tile_encoder)
    if len(named) != 1:
        held = ", ".join(content.shapes) or "nothing"
        raise ValueError(f"{content.path} holds {held}; {COORDS} and one of {_NAMES} are needed")
    return named[0]


_NAMES = " or ".join(NAMES)


def _of_encoder(path: Path, names: Sequence[str], tile_encoder: str | None) -> str:
    """Return the features of one tile encoder: that of this name, or the only one with this in its name."""
    known = {name.removeprefix(GROUP): name for name in names}
    if tile_encoder in known:
        return known[tile_encoder]
    fitting = [name for name in known if (tile_encoder or "").lower() in name.lower()]
    if len(fitting) != 1:
        which = f"and {len(fitting)} of them fit {tile_encoder!r}; " if tile_encoder else ""
        raise ValueError(f"{path} holds features of {', '.join(known)}; {which}name one by tile_encoder (--tile-encoder)")
    return known[fitting[0]]


def _coordinates(content: Content, folder: str | Path | None, features: str) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the coordinates of the tiles and their attributes; those in the file of the features take precedence."""
    path = content.path
    sidecar, said = coordinates_of(path, None if folder is None else Path(folder))
    if folder is not None and sidecar is None:
        raise ValueError(f"{path}: the folder {folder} has no coordinates of it: {path.stem}.h5, or {', '.join(ENDINGS)}")
    has_coords = COORDS in content.shapes
    numbers = content.read(COORDS) if has_coords else sidecar
    if numbers is None:
        raise ValueError(f"{path}: the coordinates of its tiles are missing; {_needed(content)}")
    where = _tensor(path, COORDS, numbers)
    if has_coords and sidecar is not None and not torch.equal(where.double(), _tensor(path, COORDS, sidecar).double()):
        raise ValueError(f"{path}: its coords are not those of the file with its coordinates; name the folder of these tiles")
    named = {"encoder": features.removeprefix(GROUP)} if features.startswith(GROUP) else {}
    return where, {**said, **content.said, **named}


def _needed(content: Content) -> str:
    if content.path.suffix == ".npy":
        return f"{content.path.stem}{NPY}, an array (n, 2), is needed beside it"
    held = ", ".join(content.shapes)
    return f"it holds {held}; {COORDS} and one of {_NAMES} are needed, or the folder of the coordinates (--coords)"


def _grid(
    path: Path, shape: tuple[int, ...], coords: Tensor, said: Mapping[str, Any], microns_per_pixel: float | None
) -> TileGrid:
    """Return the places of tiles. Raises ValueError for shapes, dtypes and numbers that do not fit."""
    if len(shape) != 2 or coords.shape != (shape[0], 2):
        raise ValueError(f"{path}: features {tuple(shape)} and coords {tuple(coords.shape)}; (n, in_chans) and (n, 2) are needed")
    if shape[0] == 0:
        raise ValueError(f"{path}: the slide has no tiles; leave it out")
    if not holds_pixels(coords.dtype):
        raise ValueError(f"{path}: coords are {coords.dtype}, which does not hold every pixel; integers or float32 are needed")
    if not bool(coords.isfinite().all()):
        raise ValueError(f"{path}: coords are not finite")
    try:
        return grid_of(coords, said, microns_per_pixel)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _tensor(path: Path, name: str, value: Any) -> Tensor:
    try:
        if not isinstance(value, Tensor):
            numbers = np.array(value)
            value = torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name} is no array of numbers: {error}") from None
    if not is_dense(value):
        raise ValueError(f"{path}: {name} is a sparse, quantised, nested or empty tensor; a dense one is needed")
    tensor: Tensor = value[0] if value.dim() == 3 and len(value) == 1 else value
    is_read_region = name == COORDS and tensor.dim() == 2 and tensor.shape[1] == 5  # AtlasPatch's: x, y, width, height, level
    return tensor[:, :2] if is_read_region else tensor
