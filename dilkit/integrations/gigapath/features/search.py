"""The files of features that are named, or lie in folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dilkit.integrations.gigapath.features.arrays import SUFFIXES
from dilkit.integrations.gigapath.features.beside import is_beside


def features_in(paths: Iterable[str | Path]) -> list[Path]:
    """The files of features that are named, and those that lie in the folders named, sorted within each, hidden ones left out.

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


def _is_apart(path: Path) -> bool:
    """True for what is no slide: hidden files, such as those that macOS puts beside others, and what belongs to another file."""
    return path.name.startswith(".") or is_beside(path)


def others_in(paths: Iterable[str | Path]) -> list[Path]:
    """What lies in the folders named and is not read: other files and folders, but not hidden ones."""
    inside = [one for path in map(Path, paths) if path.is_dir() for one in sorted(path.iterdir())]
    return [one for one in inside if one.suffix not in SUFFIXES and not _is_apart(one)]
