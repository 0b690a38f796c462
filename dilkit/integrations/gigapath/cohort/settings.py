"""What all slides of a run have in common: the model, and how files are read and written."""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import dilkit
from dilkit.files import check_regular


@dataclass(frozen=True)
class ModelRecord:
    """What embeddings are made with: two runs with the same one make the same embeddings, but for rounding.

    `sha256` is that of the checkpoint's file; `layers` says whether the embeddings of all layers are written.
    """

    arch: str
    checkpoint: str
    sha256: str
    pooling: str
    dtype: str
    tail: str
    ngrids: int
    layers: bool

    def differences(self, other: dict[str, object]) -> str:
        """The settings in which the record of a manifest differs, as text.

        The checkpoint's file may have moved, and the grid may be larger: the embeddings are the same.
        """
        own = {name: value for name, value in asdict(self).items() if name not in ("checkpoint", "ngrids")}
        names = [name for name, value in own.items() if other.get(name) != value]
        said = {name: f"{name} {other.get(name)!r}, not {getattr(self, name)!r}" for name in names}
        if "sha256" in said:
            said["sha256"] = f"another checkpoint ({other.get('checkpoint')})"
        return "; ".join(said.values())


@dataclass(frozen=True)
class ReadSettings:
    """How files of features are read: what they leave open, and what their features must be of."""

    tile_size: int | None = None
    tile_encoder: str = "gigapath"
    in_chans: int | None = None
    coords: Path | None = None
    microns_per_pixel: float | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """The options of `read_features` and `read_header`."""
        return dict(coords=self.coords, microns_per_pixel=self.microns_per_pixel, tile_encoder=self.tile_encoder)

    def __post_init__(self) -> None:
        if self.coords is not None and not self.coords.is_dir():
            raise ValueError(f"--coords: {str(self.coords)!r} is no folder; name that of the files of coordinates")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits. Raises OSError for a device or a pipe, which may never end."""
    check_regular(path, path.stat(), most=sys.maxsize)
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {"dilkit": dilkit.__version__, "torch": torch.__version__, "python": platform.python_version()}
