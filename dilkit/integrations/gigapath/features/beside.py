"""Coordinates that lie in a file of their own: beside the features, or in a folder of the coordinates of many slides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilkit import files
from dilkit.integrations.gigapath.features.arrays import COORDS, Content, content_of

NPY = ".coords.npy"
"""How the file of coordinates ends that lies beside features in a .npy file."""
NPZ, META = ".coordinates.npz", ".meta.json"
"""slide2vec's: coordinates as arrays x and y, and what is said of features or of coordinates."""

ENDINGS = (NPY, NPZ, "_patches.h5", ".h5")
"""Of the files in a folder of coordinates, in the order in which they are looked for."""


def is_beside(path: Path) -> bool:
    """Whether a file belongs to another one with features."""
    return path.name.endswith((NPY, NPZ, META))


def coordinates_of(path: Path, folder: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """The coordinates of the tiles in `path`, `(n, 2)`, from a file of their own, and what such files say of the tiles.

    `folder` is one of coordinates: NAME.h5 (CLAM's patches), NAME_patches.h5 (TRIDENT's), NAME.coordinates.npz (slide2vec's) or
    NAME.coords.npy. Without it they are looked for beside the features, and where slide2vec's NAME.meta.json says that they are.
    None where they are not there. Raises ValueError or OSError for a file that cannot be read.
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
    """The coordinates in a file, whose only array they may be."""
    path, names = content.path, [*content.shapes]
    if path.name.endswith(NPY):
        return content.read(names[0])
    if path.name.endswith(NPZ) and {"x", "y"} <= {*names}:
        return list(zip(content.read("x").tolist(), content.read("y").tolist(), strict=True))
    if COORDS not in names:
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; {COORDS}, or x and y in {NPZ}, are needed")
    return content.read(COORDS)


def _meta(path: Path) -> Mapping[str, Any]:
    """What slide2vec's file says, the parts of that of coordinates side by side; nothing where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(files.read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    parts = content.values() if isinstance(content, dict) else ()
    nested = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    return {**nested, **content} if isinstance(content, dict) else {}
