"""The arrays that a file of features holds: their shapes at once, their numbers when they are asked for."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dilkit.files import check_regular
from dilkit.integrations.gigapath.checkpoint import MOST_BYTES, load_tensors
from dilkit.integrations.gigapath.hdf5 import list_datasets, read_dataset

SUFFIXES = (".pt", ".npy", ".npz", ".h5")
NAMES = ("features", "tile_embeds", "feats")
"""The names of features: by TRIDENT, CLAM and slide2vec, by GigaPath, and by STAMP."""
COORDS = "coords"


@dataclass(frozen=True)
class Content:
    """The content of a file: the shapes of its arrays by name, what is said of its tiles, and `numbers` of an array."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    said: Mapping[str, Any]
    numbers: Callable[[str], Any]

    def read(self, name: str) -> Any:
        """Read the numbers of an array. Raises ValueError naming the file where they cannot be read."""
        with _naming(self.path):
            return self.numbers(name)


def content_of(path: Path) -> Content:
    """Read the content of a file.

    Raises OSError for one that cannot be opened, ImportError without h5py, and ValueError naming it for what is no such file.
    """
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
    return Content(path, {name: _shape(value) for name, value in said.items()}, said, partial(_entry, said))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else np.shape(value) if isinstance(value, (list, tuple)) else ()


def _entry(content: Mapping[str, Any], name: str) -> Any:
    value = content[name]
    return value.clone() if isinstance(value, Tensor) else value


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
