"""Settings that all slides of a run share: the model, how files are read and written, and the folder of the outputs."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilkit.files import check_regular

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.cohort.listing import ListedSlide


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
        """Return a pixel of coordinates in pixels of level 0. Raises ValueError for micrometres without `microns_per_pixel`."""
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
