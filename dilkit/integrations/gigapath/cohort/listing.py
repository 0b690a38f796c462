"""The slides of a cohort with their tiles and tile sizes, from the headers of their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dilkit.integrations.gigapath.checkpoint import load_tensors
from dilkit.integrations.gigapath.cohort.settings import ReadSettings
from dilkit.integrations.gigapath.features import read_header
from dilkit.integrations.gigapath.spacing import settled_tile_size
from dilkit.integrations.ranks import digest


@dataclass(frozen=True)
class ListedSlide:
    """One slide to embed: its file with size and time of change, its output, tiles and their size, and who says that size.

    `places` is a digest of the coordinates, which may lie in another file; `microns` is how many micrometres a pixel of them has,
    where the file has micrometres.
    """

    path: Path
    bytes: int
    mtime_ns: int
    output: Path
    tiles: int
    in_chans: int
    tile_size: int
    tile_size_from: str
    places: str
    microns: float | None


@dataclass(frozen=True)
class RefusedFile:
    """A file that will not do, and why."""

    path: Path
    reason: str


def refusal(path: Path, error: Exception) -> RefusedFile:
    """Return the refusal of a file, in one line that names it. Raises `error` again where it is no fault of a slide.

    Faults of a slide are what it holds, and more tiles than memory has room for.
    """
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return RefusedFile(path, f"{path}: memory has no room for its tiles ({text or type(error).__name__})")
    if not isinstance(error, (ValueError, OSError)):
        raise error
    return RefusedFile(path, text if str(path) in text else f"{path}: {text}")


def list_slides(
    paths: Iterable[Path], out: Path, settings: ReadSettings, recorded: Container[str]
) -> tuple[list[ListedSlide], list[RefusedFile]]:
    """Return the slides of these files in their order, and the files that will not do.

    Features are not read. `recorded`: the outputs in `out` of which a manifest has records; one of them that cannot be read is
    removed. Raises ValueError where two files would be written as one, ImportError where a library is missing.
    """
    paths = list(paths)
    if twice := [name for name, times in Counter(path.stem for path in paths).items() if times > 1]:
        raise ValueError(f"several files would be written as {', '.join(f'{name}.pt' for name in twice)}; embed them apart")
    slides, refused = [], []
    for path in paths:
        try:
            slides.append(_slide(path, out / f"{path.stem}.pt", settings, recorded))
        except Exception as error:
            refused.append(refusal(path, error))
    return slides, refused


def _slide(path: Path, output: Path, settings: ReadSettings, recorded: Container[str]) -> ListedSlide:
    status = path.stat()
    header = read_header(path, **settings.reading)
    _make_room(output, recorded)
    _check_tile_encoder(header.tile_encoder, settings.tile_encoder)
    if settings.in_chans not in (None, header.in_chans):
        raise ValueError(
            f"tiles have {header.in_chans:,} features, and the model takes {settings.in_chans:,}; make them with its tile encoder"
        )
    size, whence = settled_tile_size(header.tile_size, settings.tile_size, header.coords, "--tile-size")
    facts = (header.tiles, header.in_chans, size, whence, digest(header.coords), header.microns)
    return ListedSlide(path, status.st_size, status.st_mtime_ns, output, *facts)


def _make_room(output: Path, recorded: Container[str]) -> None:
    """Remove an `output` that cannot be read and was an embedding by its record. Raise ValueError for what else is none."""
    if not output.exists():
        return
    try:
        content = load_tensors(output)
    except ValueError:
        if output.name not in recorded:
            raise
        output.unlink()  # at once: if this run ends before it is made anew, no record says to the next whose file it was
        return
    if not isinstance(content, dict) or set(content) not in ({"embedding"}, {"layers"}):
        raise ValueError(f"{output} is there, and is no embedding to be replaced; choose another --out")


def _check_tile_encoder(name: str | None, needed: str) -> None:
    if name is not None and needed.lower() not in name.lower():
        raise ValueError(
            f"features are of {name!r}, not of {needed!r}, as the file says; --tile-encoder {name} "
            "if the checkpoint was trained on them"
        )
