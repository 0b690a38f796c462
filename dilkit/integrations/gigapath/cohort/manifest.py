"""`manifest.json`: what the embeddings in a folder were made with, and one record a slide, written again after each slide.

A rank other than the first writes `manifest-RANK.json`; the next run, or the end of this one, puts them together.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import dilkit
from dilkit import files
from dilkit.integrations.gigapath.checkpoint import load_tensors
from dilkit.integrations.gigapath.cohort.listing import ListedSlide, ModelRecord, RefusedFile

NAME, PART = "manifest.json", "manifest-{rank}.json"
FORMAT = 1


@dataclass(frozen=True)
class SlideRecord:
    """A slide that was embedded; `bytes`, `mtime_ns` and `places`, a digest of coordinates, show if its file is the same."""

    file: str
    bytes: int
    mtime_ns: int
    tiles: int
    tile_size: int
    tile_size_from: str
    places: str
    output: str
    maps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


SAME = ("bytes", "mtime_ns", "tiles", "tile_size", "tile_size_from", "places")


def record_of(slide: ListedSlide, maps: Iterable[Path], warnings: Iterable[str]) -> SlideRecord:
    names: dict[str, Any] = dict(
        file=str(slide.path), output=slide.output.name, maps=tuple(path.name for path in maps), warnings=tuple(warnings)
    )
    return SlideRecord(**names, **{name: getattr(slide, name) for name in SAME})


@dataclass
class Manifest:
    """The manifest of a folder, of one model. `slides` are its records by the name of their output."""

    folder: Path
    model: ModelRecord
    rank: int = 0
    slides: dict[str, SlideRecord] = field(default_factory=dict)
    refused: list[RefusedFile] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / (NAME if self.rank == 0 else PART.format(rank=self.rank))

    def add(self, record: SlideRecord) -> None:
        """Take up a record, and write the file: it holds the old records or all of these, whenever the process is killed."""
        self.slides[record.output] = record
        self.write()

    def write(self) -> None:
        content = dict(
            format=FORMAT,
            model=asdict(self.model),
            versions={"dilkit": dilkit.__version__, "torch": torch.__version__, "python": platform.python_version()},
            slides=[asdict(self.slides[name]) for name in sorted(self.slides)],
            refused=[dict(file=str(one.path), reason=one.reason) for one in self.refused],
        )
        with files.replacing(self.path) as file:
            file.write(json.dumps(content, indent=1).encode())

    def forget(self, slides: Iterable[ListedSlide]) -> None:
        """Leave out slides that are embedded again, before that begins: of an output that is replaced no old record may stay."""
        stale = {slide.output.name for slide in slides} & set(self.slides)
        if stale or parts_in(self.folder)[1:]:
            self.slides = {name: record for name, record in self.slides.items() if name not in stale}
            self.write()
            self.drop_parts()

    def drop_parts(self) -> None:
        for path in parts_in(self.folder):
            if path != self.path:
                path.unlink(missing_ok=True)

    def keeps(self, slide: ListedSlide, maps: Iterable[Path]) -> SlideRecord | None:
        """Return the record of a slide whose outputs are whole and of the same file; None if it has to be embedded."""
        record = self.slides.get(slide.output.name)
        if record is None or Path(record.file).name != slide.path.name:
            return None
        if any(getattr(record, name) != getattr(slide, name) for name in SAME):  # its folder may have moved
            return None
        wanted = {path.name for path in maps}
        there = wanted <= set(record.maps) and all((self.folder / name).is_file() for name in wanted)
        return record if there and _is_whole(slide.output, self.model.layers) else None


def parts_in(folder: Path) -> list[Path]:
    return [path for path in (folder / NAME, *sorted(folder.glob(PART.format(rank="*")))) if path.is_file()]


def read_manifest(folder: Path, model: ModelRecord) -> Manifest:
    """Return the manifest in a folder; empty without embeddings. Raises ValueError for other settings, or no manifest."""
    manifest = Manifest(folder, model)
    for path in parts_in(folder):
        content = _content(path)
        records = [_record(path, one) for one in content["slides"]]
        if records and (other := model.differences(content["model"])):
            raise ValueError(
                f"{folder} holds {len(records)} embeddings made with {other}; give each model and setting a folder of its own: "
                "choose another --out"
            )
        manifest.slides |= {record.output: record for record in records}
    return manifest


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(files.read_bytes(path))
        if content["format"] == FORMAT and isinstance(content["model"], dict) and isinstance(content["slides"], list):
            return dict(content)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is no manifest of format {FORMAT}; move it away, or choose another --out")


def _record(path: Path, values: Any) -> SlideRecord:
    try:
        return SlideRecord(**{**values, "maps": tuple(values["maps"]), "warnings": tuple(values["warnings"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} holds a damaged record of a slide ({error}); move it away") from None


def _is_whole(path: Path, layers: bool) -> bool:
    try:
        content = load_tensors(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and set(content) == {"layers" if layers else "embedding"}
