"""The files of a cohort: features, named or in folders, and coordinates in files of their own.

Such a file of coordinates lies beside the features, or in a folder of the coordinates of many slides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dilkit import files
from dilkit.integrations.gigapath.features.arrays import COORDS, SUFFIXES, Content, content_of

NPY = ".coords.npy"
"""Ending of the file of coordinates beside features in a .npy file."""
NPZ, META = ".coordinates.npz", ".meta.json"
"""Endings of slide2vec: coordinates as arrays x and y, and attributes of features or of coordinates."""

ENDINGS = (NPY, NPZ, "_patches.h5", ".h5")
"""Endings of the files in a folder of coordinates, in the order of the search."""


def features_in(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files of features among `paths`, and those in the folders among them, sorted; hidden files are left out.

    Raises ValueError for a folder that holds none, OSError for what is not there.
    """
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
    """Return the files and folders in the folders among `paths` that are not read, hidden ones left out."""
    inside = [one for path in map(Path, paths) if path.is_dir() for one in sorted(path.iterdir())]
    return [one for one in inside if one.suffix not in SUFFIXES and not _is_apart(one)]


def _is_apart(path: Path) -> bool:
    """True for hidden files, such as those that macOS puts beside others, and for files of coordinates or attributes."""
    return path.name.startswith(".") or path.name.endswith((NPY, NPZ, META))


def coordinates_of(path: Path, folder: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the coordinates of the tiles in `path`, `(n, 2)`, from a file of their own, and the attributes in such files.

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
    """Return the coordinates in a file, whose only array they may be."""
    path, names = content.path, [*content.shapes]
    if path.name.endswith(NPY):
        return content.read(names[0])
    if path.name.endswith(NPZ) and {"x", "y"} <= {*names}:
        return list(zip(content.read("x").tolist(), content.read("y").tolist(), strict=True))
    if COORDS not in names:
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; {COORDS}, or x and y in {NPZ}, are needed")
    return content.read(COORDS)


def _meta(path: Path) -> Mapping[str, Any]:
    """Read slide2vec's attributes, the parts of a file of coordinates merged; none without a file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(files.read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    parts = content.values() if isinstance(content, dict) else ()
    nested = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    return {**nested, **content} if isinstance(content, dict) else {}
