"""The slides of a cohort with their tiles and tile sizes, from the headers of their files."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dilkit.files import check_regular
from dilkit.integrations.gigapath.checkpoint import check_tile_encoder, load_tensors
from dilkit.integrations.gigapath.features import read_header
from dilkit.integrations.gigapath.positions import settled_tile_size
from dilkit.integrations.ranks import digest


@dataclass(frozen=True)
class ModelRecord:
    """The model of a run: equal records, equal embeddings but for rounding. `sha256` is that of the checkpoint's file."""

    arch: str
    checkpoint: str
    sha256: str
    pooling: str
    dtype: str
    tail: str
    ngrids: int
    layers: bool

    def differences(self, other: dict[str, object]) -> str:
        """Return the settings that differ in a manifest, as text; the checkpoint may have moved and the grid may be larger."""
        differences = {
            name: f"{name} {other.get(name)!r}, not {value!r}"
            for name, value in asdict(self).items()
            if name not in ("checkpoint", "ngrids") and other.get(name) != value
        }
        if "sha256" in differences:
            differences["sha256"] = f"another checkpoint ({other.get('checkpoint')})"
        return "; ".join(differences.values())


@dataclass(frozen=True)
class ReadSettings:
    tile_size: int | None = None
    tile_encoder: str = "gigapath"
    in_chans: int | None = None
    coords: Path | None = None
    microns_per_pixel: float | None = None

    @property
    def reading(self) -> dict[str, Any]:
        return dict(coords=self.coords, microns_per_pixel=self.microns_per_pixel, tile_encoder=self.tile_encoder)

    def __post_init__(self) -> None:
        if self.coords is not None and not self.coords.is_dir():
            raise ValueError(f"--coords: {str(self.coords)!r} is no folder; name that of the files of coordinates")


@dataclass(frozen=True)
class CohortJob:
    out: Path
    model: ModelRecord
    reading: ReadSettings = field(default_factory=ReadSettings)
    heatmaps: bool = False

    def maps_of(self, slide: ListedSlide) -> tuple[Path, ...]:
        return tuple(slide.output.with_suffix(end) for end in (".png", ".geojson")) if self.heatmaps else ()

    def level0_pixels(self, slide: ListedSlide) -> float:
        """Return the size of a coordinate pixel in level-0 pixels. Raises ValueError if micrometres lack `microns_per_pixel`."""
        if slide.microns is None:
            return 1.0
        if self.reading.microns_per_pixel is None:
            raise ValueError(
                f"{slide.path}: coords are in micrometres, and the squares of a GeoJSON are pixels of level 0; "
                "give --microns-per-pixel, as the scan says, or leave out --heatmap"
            )
        return slide.microns / self.reading.microns_per_pixel


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits. Raises OSError for a device or a pipe, which may not end."""
    check_regular(path, path.stat(), most=sys.maxsize)
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class ListedSlide:
    """One slide to embed, with the size and time of change of its file, and who says the tile size.

    `places`: a digest of the coordinates, which may lie in another file; `microns`: of a pixel, where the file has micrometres.
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
    path: Path
    reason: str


def refusal(path: Path, error: Exception) -> RefusedFile:
    """Return the refusal of a file, for its content or for want of memory, in one line; raise any other error again."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return RefusedFile(path, f"{path}: memory has no room for its tiles ({text or type(error).__name__})")
    if not isinstance(error, (ValueError, OSError)):
        raise error
    return RefusedFile(path, text if str(path) in text else f"{path}: {text}")


def list_slides(paths: Iterable[Path], job: CohortJob, recorded: Container[str]) -> tuple[list[ListedSlide], list[RefusedFile]]:
    """Return the slides of these files in their order, and the files that are refused.

    `recorded`: outputs in manifests; one that cannot be read is removed. Raises ValueError where two files would be written as
    one, ImportError where a library is missing.
    """
    paths = list(paths)
    if twice := [name for name, times in Counter(path.stem for path in paths).items() if times > 1]:
        raise ValueError(f"several files would have the name {', '.join(f'{name}.pt' for name in twice)}; embed them apart")
    slides, refused = [], []
    for path in paths:
        try:
            slides.append(_slide(path, job, recorded))
        except Exception as error:
            refused.append(refusal(path, error))
    return slides, refused


def _slide(path: Path, job: CohortJob, recorded: Container[str]) -> ListedSlide:
    status, settings, output = path.stat(), job.reading, job.out / f"{path.stem}.pt"
    header = read_header(path, **settings.reading)
    _make_room(output, recorded)
    check_tile_encoder(header.tile_encoder, settings.tile_encoder)
    if settings.in_chans not in (None, header.in_chans):
        raise ValueError(
            f"tiles have {header.in_chans:,} features, and the model takes {settings.in_chans:,}; make them with its tile encoder"
        )
    size, whence = settled_tile_size(header.tile_size, settings.tile_size, header.coords, "--tile-size")
    facts = (header.tiles, header.in_chans, size, whence, digest(header.coords), header.microns)
    slide = ListedSlide(path, status.st_size, status.st_mtime_ns, output, *facts)
    if job.heatmaps:
        job.level0_pixels(slide)
    return slide


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
        raise ValueError(f"{output} exists and is no embedding; choose another --out")
