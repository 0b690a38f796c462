"""Files of tile features with their coordinates: what `dilkit encode-slide` embeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilkit.files import check_regular
from dilkit.integrations.gigapath.attributes import check_places, tile_encoder_of, tile_size_of
from dilkit.integrations.gigapath.checkpoint import MOST_BYTES, load_tensors
from dilkit.integrations.gigapath.positions import holds_pixels

FEATURES = ("features", "tile_embeds")
COORDS = "coords"
BESIDE = ".coords.npy"
"""How the file of coordinates ends that lies beside features in a .npy file."""
SUFFIXES = (".pt", ".npy", ".h5")


class Features(NamedTuple):
    """The tiles of one slide, as `read_features` finds them.

    - `tiles`: `(n, in_chans)` floating-point numbers.
    - `coords`: `(n, 2)` pixels x and y, of level 0 in files of TRIDENT and CLAM.
    - `tile_size`: how many such pixels a side the tiles have, as the file says: `model.tile_size`. None where it does not say.
    - `tile_encoder`: the network that made the features, as the file says; None where it does not.
    """

    tiles: Tensor
    coords: Tensor
    tile_size: int | None
    tile_encoder: str | None


def read_features(path: str | Path) -> Features:
    """The tiles of one slide: `Features(tiles, coords, tile_size, tile_encoder)`.

    - `.pt`: a dictionary of tensors, `features` or `tile_embeds`, and `coords`; no code is read.
    - `.h5`: datasets of these names. It needs h5py.
    - `.npy`: the features; the coordinates are in the file beside it, `NAME.coords.npy` for `NAME.npy`.

    What else a file says is in attributes of an `.h5` file or its datasets, or in entries of the dictionary: `patch_size_level0`,
    or `patch_size` where `patch_level` is 0; `encoder` or `extractor`; `level0_width`, `level0_height` and `unit` are checked.
    A first dimension of 1 is dropped. Raises OSError for a file that cannot be read, ImportError where h5py is missing, and
    ValueError, naming the file, for other content: names, shapes, dtypes, no tiles, numbers that are not finite, coordinates in
    other units than pixels or outside the slide.

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
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no file of features; one of {', '.join(SUFFIXES)} is needed")
    check_regular(path, path.stat(), MOST_BYTES)
    content, said = {".pt": _read_pt, ".npy": _read_npy, ".h5": _read_h5}[path.suffix](path)
    tiles, coords = (_tensor(path, name, value) for name, value in _named(path, content))
    _check_tensors(path, tiles, coords)
    try:
        check_places(coords, said)
        return Features(tiles, coords, tile_size_of(said), tile_encoder_of(said))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_tensors(path: Path, tiles: Tensor, coords: Tensor) -> None:
    """Raise ValueError for shapes, dtypes and numbers that do not fit."""
    if tiles.dim() != 2 or coords.shape != (len(tiles), 2):
        raise ValueError(
            f"{path}: features {tuple(tiles.shape)} and coords {tuple(coords.shape)}; (n, in_chans) and (n, 2) are needed"
        )
    if len(tiles) == 0:
        raise ValueError(f"{path}: the slide has no tiles; leave it out")
    if not tiles.is_floating_point():
        raise ValueError(f"{path}: features are {tiles.dtype}; floating-point numbers are needed")
    if not holds_pixels(coords.dtype):
        raise ValueError(f"{path}: coords are {coords.dtype}, which does not hold every pixel; integers or float32 are needed")
    finite = tiles.isfinite().all(dim=1)
    if not bool(finite.all()):
        raise ValueError(f"{path}: features of tile {int(finite.logical_not().nonzero()[0])} are not finite")


def features_in(paths: Iterable[str | Path]) -> list[Path]:
    """The files of features that are named, and those that lie in the folders named, sorted within each.

    Raises ValueError for a folder that holds none, OSError for what is not there.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [one for one in sorted(path.iterdir()) if one.suffix in SUFFIXES and not one.name.endswith(BESIDE)]
            if not inside:
                raise ValueError(f"{path} holds no file of features ({', '.join(SUFFIXES)})")
            found += inside
        else:
            path.stat()  # raises where there is none
            found.append(path)
    return found


def others_in(paths: Iterable[str | Path]) -> list[Path]:
    """What lies in the folders named and is not read: other files and folders, but not hidden ones."""
    inside = [one for path in map(Path, paths) if path.is_dir() for one in sorted(path.iterdir())]
    return [one for one in inside if not one.name.startswith(".") and one.suffix not in SUFFIXES]


def _named(path: Path, content: Any) -> list[tuple[str, Any]]:
    """Features and coordinates, each with its name. Raises ValueError where one is not there."""
    names = sorted(map(str, content)) if isinstance(content, Mapping) else None
    if names is None:
        raise ValueError(f"{path} holds a {type(content).__name__}; a dictionary with features and coords is needed")
    features = [name for name in FEATURES if name in names]
    if len(features) != 1 or COORDS not in names:
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; {COORDS} and one of {' or '.join(FEATURES)} are needed")
    return [(name, content[name]) for name in (features[0], COORDS)]


def _tensor(path: Path, name: str, value: Any) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(_in_native_order(np.array(value)))
    except TypeError as error:
        raise ValueError(f"{path}: {name} is no array of numbers: {error}") from None
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _in_native_order(numbers: Any) -> Any:
    return numbers.astype(numbers.dtype.newbyteorder("="), copy=False)


def _read_pt(path: Path) -> tuple[Any, Mapping[str, Any]]:
    content = load_tensors(path)
    return content, content if isinstance(content, Mapping) else {}


def _read_npy(path: Path) -> tuple[Any, Mapping[str, Any]]:
    beside = path.with_name(path.stem + BESIDE)
    if not beside.is_file():
        raise ValueError(f"{path}: the coordinates of its tiles are missing; {beside.name}, an array (n, 2), is needed beside it")
    return {FEATURES[0]: _array(path), COORDS: _array(beside)}, {}


def _array(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from None


def _read_h5(path: Path) -> tuple[Any, Mapping[str, Any]]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path} needs h5py, which cannot be imported ({error}): pip install h5py, or give .pt or .npy"
        ) from None
    try:
        with h5py.File(path, "r") as file:
            read = [name for name in (*FEATURES, COORDS) if name in file]
            said = {name: value for part in (file, *(file[one] for one in read)) for name, value in part.attrs.items()}
            return {name: np.asarray(file[name]) if name in read else None for name in file}, said
    except OSError as error:
        raise ValueError(f"{path} is no HDF5 file: {error}") from None
