"""The files of features that are named, or lie in folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dilkit.integrations.gigapath.features.arrays import SUFFIXES
from dilkit.integrations.gigapath.features.beside import is_beside


def features_in(paths: Iterable[str | Path]) -> list[Path]:
    """The files of features that are named, and those that lie in the folders named, sorted within each.

    Raises ValueError for a folder that holds none, OSError for what is not there.
    """
    features: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [one for one in sorted(path.iterdir()) if one.suffix in SUFFIXES and not is_beside(one)]
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


def others_in(paths: Iterable[str | Path]) -> list[Path]:
    """What lies in the folders named and is not read: other files and folders, but not hidden ones."""
    inside = [one for path in map(Path, paths) if path.is_dir() for one in sorted(path.iterdir())]
    return [one for one in inside if not one.name.startswith(".") and one.suffix not in SUFFIXES and not is_beside(one)]
