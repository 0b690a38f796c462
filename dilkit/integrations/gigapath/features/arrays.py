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
import torch
from torch import Tensor

from dilkit.files import check_regular
from dilkit.integrations.gigapath.checkpoint import MOST_BYTES, load_tensors

SUFFIXES = (".pt", ".npy", ".npz", ".h5")
NAMES = ("features", "tile_embeds", "feats")
"""What features are called: by TRIDENT, CLAM and slide2vec, by GigaPath, and by STAMP."""
COORDS = "coords"


@dataclass(frozen=True)
class Stored:
    """An array in a file: its shape, and what reads its numbers."""

    shape: tuple[int, ...]
    read: Callable[[], Any]


@dataclass(frozen=True)
class Content:
    """What a file holds: arrays by name, and what it says of its tiles."""

    arrays: Mapping[str, Stored]
    said: Mapping[str, Any]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Content]:
    """What a file holds, within the block. Raises OSError, ImportError without h5py, ValueError for what is no such file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no file of features; one of {', '.join(SUFFIXES)} is needed")
    check_regular(path, path.stat(), MOST_BYTES)
    with {".pt": _pt, ".npy": _npy, ".npz": _npz, ".h5": _h5}[path.suffix](path) as content:
        yield content


@contextlib.contextmanager
def _pt(path: Path) -> Iterator[Content]:
    """A dictionary, or features alone. Tensors are mapped into memory where the file's format allows it."""
    content = _mapped(path)
    if isinstance(content, Tensor):
        content = {NAMES[0]: content}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; a dictionary with features and coords is needed")
    yield Content({str(name): _stored(value) for name, value in content.items()}, {str(k): v for k, v in content.items()})


def _mapped(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # of an older format, or damaged, which `load_tensors` says
        return load_tensors(path)


def _stored(value: Any) -> Stored:
    shape = tuple(value.shape) if isinstance(value, Tensor) else np.shape(value) if isinstance(value, (list, tuple)) else ()
    return Stored(shape, lambda: value.clone() if isinstance(value, Tensor) else value)


@contextlib.contextmanager
def _npy(path: Path) -> Iterator[Content]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from None
    yield Content({NAMES[0]: Stored(array.shape, lambda: array)}, {})


@contextlib.contextmanager
def _npz(path: Path) -> Iterator[Content]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            shapes = [_shape(archive, name) for name in archive.namelist()]
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: Stored(shape, partial(file.__getitem__, name)) for name, shape in zip(names, shapes, strict=True)}
            numbers = {name: file[name] for name, shape in zip(names, shapes, strict=True) if shape == ()}
            yield Content(arrays, {name: value.item() for name, value in numbers.items()})
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is no .npz file of numbers: {error}") from None


def _shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """The shape of an array, from its header alone."""
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return header(file)[0]


@contextlib.contextmanager
def _h5(path: Path) -> Iterator[Content]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path} needs h5py, which cannot be imported ({error}): pip install h5py, or give .pt, .npy or .npz"
        ) from None
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is no HDF5 file: {error}") from None
    with file:
        parts = (file, *(file[one] for one in (*NAMES, COORDS) if one in file))
        said = {name: value for part in parts for name, value in part.attrs.items()}
        yield Content({name: Stored(getattr(file[name], "shape", ()), partial(_dataset, file, name)) for name in file}, said)


def _dataset(file: Any, name: str) -> Any:
    return file[name][()]
