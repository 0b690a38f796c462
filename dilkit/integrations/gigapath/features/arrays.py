"""The files of a cohort, features and coordinates of their own, and their arrays: shapes at once, numbers when asked for."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dilkit import files
from dilkit.files import check_regular
from dilkit.integrations.gigapath.checkpoint import MOST_BYTES, load_tensors
from dilkit.integrations.gigapath.hdf5 import list_datasets, read_dataset

SUFFIXES = (".pt", ".npy", ".npz", ".h5")
NAMES = ("features", "tile_embeds", "feats")
COORDS = "coords"


@dataclass(frozen=True)
class Content:
    """The content of a file: `shapes` of its arrays by name, facts `said` about its tiles, and a function that reads an array."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    said: Mapping[str, Any]
    numbers: Callable[[str], Any]

    def read(self, name: str) -> Any:
        with _naming(self.path):
            return self.numbers(name)


def content_of(path: Path) -> Content:
    """Read the content of a file. Raises OSError, ImportError without h5py, and ValueError naming it for what is no such file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no file of features; one of {', '.join(SUFFIXES)} is needed")
    check_regular(path, path.stat(), MOST_BYTES)
    with _naming(path):
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return Content(path, {NAMES[0]: array.shape}, {}, lambda _: array)
        if path.suffix == ".h5":
            shapes, said = list_datasets(path)
            return Content(path, shapes, said, partial(read_dataset, path))
        return _pt(path) if path.suffix == ".pt" else _npz(path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn whatever a library raises over a damaged file within the block into a ValueError that names the file."""
    try:
        yield
    except MemoryError:
        raise ValueError(f"{path} holds more numbers than memory has room for, or is damaged") from None
    except Exception as error:
        if isinstance(error, ImportError) or getattr(error, "filename", None) is not None or str(path) in str(error):
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is damaged, or no {path.suffix} file of numbers: {what}") from None


def _pt(path: Path) -> Content:
    """Read a dictionary, or features alone. Tensors are mapped into memory where the file's format allows it."""
    content = load_tensors(path, mapped=True)
    if isinstance(content, Tensor):
        content = {NAMES[0]: content}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; a dictionary with features and coords is needed")
    said = {str(name): value for name, value in content.items()}
    shapes = {name: np.shape(value) if isinstance(value, (list, tuple, Tensor)) else () for name, value in said.items()}
    return Content(path, shapes, said, lambda name: said[name].clone() if isinstance(said[name], Tensor) else said[name])


def _npz(path: Path) -> Content:
    shapes: dict[str, tuple[int, ...]] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                version = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shapes[name.removesuffix(".npy")] = header(file)[0]
    scalars = [name for name, shape in shapes.items() if shape == ()]
    return Content(path, shapes, {name: _member(path, name).item() for name in scalars}, partial(_member, path))


def _member(path: Path, name: str) -> Any:
    with np.load(path, allow_pickle=False) as file:
        return file[name]


NPY = ".coords.npy"
NPZ, META = ".coordinates.npz", ".meta.json"

ENDINGS = (NPY, NPZ, "_patches.h5", ".h5")


def features_in(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files among `paths` and, sorted, of features in folders. Raises ValueError for a folder without any, OSError."""
    features: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [one for one in sorted(path.iterdir()) if one.suffix in SUFFIXES and not _is_apart(one)]
            if not inside:
                raise ValueError(f"{path} holds no file of features ({', '.join(SUFFIXES)})")
            features += inside
        else:
            if not path.exists():
                known = ", ".join(SUFFIXES)
                raise FileNotFoundError(
                    f"{str(path)!r} does not exist; give files of tile features ({known}), or folders of them"
                )
            features.append(path)
    return features


def check_apart(option: str, out: Path, paths: Iterable[Path]) -> None:
    """Raise ValueError where results would lie among features: the next run would take them for slides."""
    if any(out.resolve() == (path if path.is_dir() else path.parent).resolve() for path in paths):
        raise ValueError(f"{option}: {out} is the folder of the features themselves; name another, such as {out / 'results'}")


def others_in(paths: Iterable[str | Path]) -> list[Path]:
    inside = [one for path in map(Path, paths) if path.is_dir() for one in sorted(path.iterdir())]
    return [one for one in inside if one.suffix not in SUFFIXES and not _is_apart(one)]


def _is_apart(path: Path) -> bool:
    """True for hidden files, such as those that macOS puts beside others, and for files of coordinates or attributes."""
    return path.name.startswith(".") or path.name.endswith((NPY, NPZ, META))


def coordinates_of(path: Path, folder: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the coordinates of the tiles in `path`, `(n, 2)`, from a file of their own or None, and attributes beside it.

    They are in `folder`, by its `ENDINGS`; or beside the features, or where slide2vec's NAME.meta.json says. Raises ValueError or
    OSError.
    """
    said = _meta(path.with_name(path.stem + META))
    named = [Path(str(said["coordinates_npz_path"]))] if said.get("coordinates_npz_path") else []
    places = [path.with_name(f"{path.stem}{ending}") for ending in (NPY, NPZ)] + named
    if folder is not None:
        places = [folder / f"{path.stem}{ending}" for ending in ENDINGS]
    for place in places:
        if place.is_file() and place.resolve() != path.resolve():
            content = content_of(place)
            return _places(content), {**said, **_meta(place.with_suffix(META)), **content.said}
    return None, said


def _places(content: Content) -> Any:
    path, names = content.path, [*content.shapes]
    if path.name.endswith(NPY):
        return content.read(names[0])
    if path.name.endswith(NPZ) and {"x", "y"} <= {*names}:
        return list(zip(content.read("x").tolist(), content.read("y").tolist(), strict=True))
    if COORDS not in names:
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; {COORDS}, or x and y in {NPZ}, are needed")
    return content.read(COORDS)


def _meta(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(files.read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    parts = content.values() if isinstance(content, dict) else ()
    nested = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    return {**nested, **content} if isinstance(content, dict) else {}
