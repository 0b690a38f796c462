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
from dilkit.integrations.gigapath.features.arrays import COORDS, ENDINGS, NAMES, NPY, Content, content_of, coordinates_of
from dilkit.integrations.gigapath.positions import holds_pixels

GROUP = f"{NAMES[0]}/"
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

    Coordinates, and the attributes of tiles with them, may lie in the folder `coords`, of CLAM's or TRIDENT's patches or
    slide2vec's tiles, or beside the features. `microns_per_pixel`, of level 0, is needed for micrometres where the file does not
    say how many a pixel has. A first dimension of 1 is dropped.

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
    named = [name for name in NAMES if name in content.shapes]
    if not named and (encoders := [name for name in content.shapes if name.startswith(GROUP)]):
        return _of_encoder(content.path, encoders, tile_encoder)
    if len(named) != 1:
        held = ", ".join(content.shapes) or "nothing"
        raise ValueError(f"{content.path} holds {held}; {COORDS} and one of {_NAMES} are needed")
    return named[0]


_NAMES = " or ".join(NAMES)


def _of_encoder(path: Path, names: Sequence[str], tile_encoder: str | None) -> str:
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
        raise ValueError(f"{path}: its coords differ from those of the file with its coordinates; name the folder of these tiles")
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


SIZES = ("patch_size_level0", "tile_size_lv0")
"""TRIDENT's and slide2vec's: the side of a tile in pixels of level 0, which are the units of its coordinates."""
PIXELS = ("px", "pixel", "pixels")
MICRONS = ("um", "\N{MICRO SIGN}m", "\N{GREEK SMALL LETTER MU}m", "micron", "microns")


@dataclass(frozen=True)
class TileGrid:
    """Coordinates `(n, 2)` in pixels, a tile's side or None, and a pixel's micrometres; None for pixels of level 0."""

    coords: Tensor
    tile_size: int | None
    microns: float | None = None


def grid_of(coords: Tensor, said: Mapping[str, Any], microns_per_pixel: float | None = None) -> TileGrid:
    """Return places in pixels; micrometres by the file, else by `microns_per_pixel`. Raises ValueError for other units."""
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
    """Return a tile's side in pixels of level 0, or None; CLAM's by the level of the cut. Raises ValueError for no size."""
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
    names = [text_of(said[name]) for name in ("encoder", "extractor", "encoder_name") if name in said]
    return names[0] if names and names[0] != "None" else None


def check_inside(coords: Tensor, said: Mapping[str, Any]) -> None:
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
    numbers = np.asarray(value)
    if numbers.size != 1 or numbers.dtype.kind not in "iuf" or not 0 < numbers.item() < float("inf"):
        raise ValueError(f"{name}={value!r} is no number above 0")
    return float(numbers.item())


def text_of(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
