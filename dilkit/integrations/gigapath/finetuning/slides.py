"""The slides of a table of labels: their files of tile features, looked through once before training, and read when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dilkit.checks import shown
from dilkit.integrations.gigapath.features import features_in, read_features
from dilkit.integrations.gigapath.finetuning.labels import Labels, refuse
from dilkit.integrations.gigapath.spacing import settled_tile_size


@dataclass(frozen=True)
class SlideFile:
    """A file of tile features, how many tiles it has, of which size they are, in pixels a side, and how many numbers each."""

    path: Path
    tiles: int
    tile_size: int
    width: int
    tile_encoder: str | None


@dataclass(frozen=True)
class Slide:
    """`tiles` `(1, n, in_chans)` and `coords` `(1, n, 2)`, as `SlideEncoder` takes them, and the size that tiles have."""

    tiles: Tensor
    coords: Tensor
    tile_size: int


def look_through(
    labels: Labels,
    folder: Path,
    tile_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    tile_encoder: str | None = None,
) -> tuple[SlideFile, ...]:
    """Read each slide once and return the files in the order of `labels`; `progress` is called with the number read so far.

    `tile_size`, `tile_encoder`: the size of tiles where no file has it, and which features of a file with several.

    Raises ValueError naming the lines of `labels` whose slides have no file, or one that will not do: see `read_features`; tiles
    of another width or of another tile encoder than those of the first; tiles that lie as tiles of another size do.

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath.finetuning import look_through, read_labels
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels.csv")
        ...     _ = path.write_text("slide,time,event\\na,12.5,1\\n")
        ...     torch.save({"features": torch.randn(5, 8), "coords": torch.zeros(5, 2)}, Path(folder, "a.pt"))
        ...     [slide] = look_through(read_labels(path), Path(folder))
        >>> slide.path.name, slide.tiles, slide.tile_size, slide.width
        ('a.pt', 5, 256, 8)
    """
    by_name = {path.stem: path for path in features_in([folder])}
    several: list[SlideFile] = []
    complaints: list[str] = []
    for count, one in enumerate(labels.examples, 1):
        try:
            if one.slide not in by_name:
                raise ValueError(f"{folder} holds no file of features for slide {shown(one.slide)}")
            several.append(_file(by_name[one.slide], tile_size, tile_encoder))
            _check_alike(several[0], several[-1])
        except (ValueError, OSError) as error:
            complaints.append(f"line {one.line}: {error}")
        if progress:
            progress(count)
    refuse(labels.source, complaints)
    return tuple(several)


def slide_reader(files: Sequence[SlideFile], like: Tensor) -> Callable[[int], Slide]:
    """Return a function that reads the slide of an index, with tiles of the dtype and on the device of `like`."""

    def read(index: int) -> Slide:
        one = files[index]
        features = read_features(one.path, tile_encoder=one.tile_encoder)
        return Slide(features.tiles[None].to(like), features.coords[None].to(like.device), one.tile_size)

    return read


def _file(path: Path, tile_size: int | None, tile_encoder: str | None) -> SlideFile:
    features = read_features(path, tile_encoder=tile_encoder)
    tiles, width = features.tiles.shape
    try:
        size, _ = settled_tile_size(features.tile_size, tile_size, features.coords)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return SlideFile(path, tiles, size, width, features.tile_encoder)


def _check_alike(first: SlideFile, other: SlideFile) -> None:
    """Raise ValueError where tiles of two slides are not of one tile encoder."""
    if other.width != first.width:
        raise ValueError(f"{other.path}: tiles have {other.width} features, but {first.width} in {first.path}")
    if None not in (first.tile_encoder, other.tile_encoder) and first.tile_encoder != other.tile_encoder:
        raise ValueError(f"{other.path}: features are of {other.tile_encoder!r}, but of {first.tile_encoder!r} in {first.path}")
