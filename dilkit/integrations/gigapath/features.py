"""Files of tile features with their coordinates: what `dilkit encode-slide` embeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit.files import check_regular
from dilkit.integrations.gigapath.checkpoint import MOST_BYTES, load_tensors

FEATURES = ("features", "tile_embeds")
COORDS = "coords"
BESIDE = ".coords.npy"
"""How the file of coordinates ends that lies beside features in a .npy file."""
SUFFIXES = (".pt", ".npy", ".h5")


def read_features(path: str | Path) -> tuple[Tensor, Tensor]:
    """`(tiles, coords)` of one slide: `(n, in_chans)` floating-point numbers and `(n, 2)` pixels x and y.

    - `.pt`: a dictionary of tensors, `features` or `tile_embeds`, and `coords`; no code is read.
    - `.h5`: datasets of these names. It needs h5py.
    - `.npy`: the features; the coordinates are in the file beside it, `NAME.coords.npy` for `NAME.npy`.

    A first dimension of 1 is dropped. Raises OSError for a file that cannot be read, ImportError where h5py is missing, and
    ValueError, naming the file, for other content: names, shapes, dtypes, no tiles, numbers that are not finite.

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath import read_features
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "slide.pt")
        ...     torch.save({"features": torch.randn(5, 8), "coords": torch.zeros(5, 2)}, path)
        ...     [x.shape for x in read_features(path)]
        [torch.Size([5, 8]), torch.Size([5, 2])]
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no file of features; one of {', '.join(SUFFIXES)} is needed")
    check_regular(path, path.stat(), MOST_BYTES)
    read = {".pt": load_tensors, ".npy": _read_npy, ".h5": _read_h5}[path.suffix]
    tiles, coords = (_tensor(path, name, value) for name, value in _named(path, read(path)))
    if tiles.dim() != 2 or coords.shape != (len(tiles), 2):
        raise ValueError(
            f"{path}: features {tuple(tiles.shape)} and coords {tuple(coords.shape)}; (n, in_chans) and (n, 2) are needed"
        )
    if len(tiles) == 0:
        raise ValueError(f"{path}: the slide has no tiles; leave it out")
    if not tiles.is_floating_point():
        raise ValueError(f"{path}: features are {tiles.dtype}; floating-point numbers are needed")
    finite = tiles.isfinite().all(dim=1)
    if not bool(finite.all()):
        raise ValueError(f"{path}: features of tile {int(finite.logical_not().nonzero()[0])} are not finite")
    return tiles, coords


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
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except TypeError as error:
        raise ValueError(f"{path}: {name} is no array of numbers: {error}") from None
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _read_npy(path: Path) -> dict[str, Any]:
    beside = path.with_name(path.stem + BESIDE)
    if not beside.is_file():
        raise ValueError(f"{path}: the coordinates of its tiles are missing; {beside.name}, an array (n, 2), is needed beside it")
    return {FEATURES[0]: _array(path), COORDS: _array(beside)}


def _array(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from None


def _read_h5(path: Path) -> dict[str, Any]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path} needs h5py, which cannot be imported ({error}): pip install h5py, or give .pt or .npy"
        ) from None
    try:
        with h5py.File(path, "r") as file:
            return {name: np.asarray(file[name]) for name in (*FEATURES, COORDS) if name in file}
    except OSError as error:
        raise ValueError(f"{path} is no HDF5 file: {error}") from None
