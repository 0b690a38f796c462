"""The photograph of the image demo: a strip down its middle is held out, what lies on both sides of it is trained on."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit.tools.results.kinds.demo_image import Photo

SAMPLE = "grace_hopper.jpg"
"""Of matplotlib's sample data: a portrait in the public domain, 512 x 600 pixels."""
MAX_SIDE = 640
"""Larger pictures are reduced to this, or a patch of a few pixels would show next to nothing."""
_LEAST_CONTRAST = 2 / 255
"""A standard deviation below which there is nothing to learn, nor to judge."""


@dataclass(frozen=True, eq=False)
class Photograph:
    """A picture `(rows, columns, 3)` in fp32, 0 to 1, and the side of the square crops that are taken from it, in pixels.

    Crops to train on lie left or right of the strip, which is one crop wide; those to judge on lie in it, one below the other.
    Raises ValueError for a picture too small for a crop in each of the three parts.
    """

    source: str
    pixels: Tensor
    crop: int

    def __post_init__(self) -> None:
        rows, columns, _ = self.pixels.shape
        if rows < self.crop or columns < 3 * self.crop:
            raise ValueError(
                f"--image: {self.source} has {columns} x {rows} pixels; at least {3 * self.crop} x {self.crop} are needed, "
                f"a crop of {self.crop} x {self.crop} to judge on between two to train on: give a larger picture"
            )

    @property
    def strip(self) -> tuple[int, int]:
        """The first column that is held out, and the first after it that is not."""
        start = (self.pixels.shape[1] - self.crop) // 2
        return start, start + self.crop

    @property
    def held_out_rows(self) -> tuple[int, int]:
        """The rows of the held-out crops: as many crops as fit, in the middle."""
        rows = self.pixels.shape[0]
        used = rows // self.crop * self.crop
        return (rows - used) // 2, (rows - used) // 2 + used

    def train_pixels(self) -> Tensor:
        """All pixels that are trained on, `(pixels, 3)`."""
        start, stop = self.strip
        return torch.cat([self.pixels[:, :start].flatten(0, 1), self.pixels[:, stop:].flatten(0, 1)])

    def held_out_crops(self) -> Tensor:
        """What is judged on, `(crops, side, side, 3)`, from top to bottom."""
        (top, bottom), (start, stop) = self.held_out_rows, self.strip
        return torch.unflatten(self.pixels[top:bottom, start:stop], 0, (-1, self.crop))

    def random_crop(self, generator: torch.Generator) -> Tensor:
        """A crop to train on, `(side, side, 3)`: anywhere beside the strip, mirrored and its colours permuted at random.

        These changes make many pictures of one: what is learnt must hold for all of them.
        """
        (start, stop), (rows, columns, _) = self.strip, self.pixels.shape
        places = [*range(start - self.crop + 1), *range(stop, columns - self.crop + 1)]
        column = places[_draw(len(places), generator)]
        row = _draw(rows - self.crop + 1, generator)
        crop = self.pixels[row : row + self.crop, column : column + self.crop]
        if _draw(2, generator):
            crop = crop.transpose(0, 1)
        crop = crop.flip([axis for axis in (0, 1) if _draw(2, generator)])
        return crop[..., torch.randperm(3, generator=generator)]

    def facts(self) -> Photo:
        """The sizes, without the pixels."""
        rows, columns, _ = self.pixels.shape
        places = dict(held_out_columns=self.strip, held_out_rows=self.held_out_rows)
        return Photo(source=self.source, rows=rows, columns=columns, crop=self.crop, **places)


def _draw(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


def load_photograph(path: str | None, crop: int) -> Photograph:
    """The picture in the file `path`, or the sample, reduced to about `MAX_SIDE` pixels.

    Raises ValueError, in one line that names the way out, for what is no picture, too small, or needs a missing package.
    """
    image = _import("PIL.Image", "pictures are read by Pillow")
    file, source = (_sample(), SAMPLE) if path is None else (path, path)
    try:
        with image.open(file) as opened:
            opaque = _opaque(opened)
    except image.UnidentifiedImageError:
        raise ValueError(f"--image: {source!r} is no picture that Pillow can open; give a PNG or JPEG file") from None
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--image: {source!r} cannot be read: {reason}; give a whole PNG or JPEG file") from None
    # a long picture is reduced less, or its other side would be too short for a crop
    scale = min(1.0, max(MAX_SIDE / max(opaque.size), crop / opaque.height, 3 * crop / opaque.width))
    reduced = opaque.resize([max(round(scale * side), 1) for side in opaque.size], image.Resampling.LANCZOS)
    photo = Photograph(Path(source).name, torch.from_numpy(np.array(reduced, dtype=np.float32) / 255), crop)
    for what, part in (("strip down its middle", photo.held_out_crops()), ("rest", photo.train_pixels())):
        if part.flatten(0, -2).std(0).max() < _LEAST_CONTRAST:
            raise ValueError(
                f"--image: the {what} of {photo.source} is all of one colour: nothing to predict; give another picture"
            )
    return photo


def _opaque(picture: Any) -> Any:
    """The picture upright, in RGB, on white."""
    image, upright = _import("PIL.Image"), _import("PIL.ImageOps").exif_transpose(picture)
    if upright.mode[0] in "IF":  # one deep channel, which Pillow would cut off at 255
        values = np.asarray(upright, dtype=np.float64)
        values = (values - values.min()) / max(values.max() - values.min(), 1e-9)
        upright = image.fromarray((255 * values).round().astype(np.uint8))
    upright = upright.convert("RGBA")
    return image.alpha_composite(image.new("RGBA", upright.size, "white"), upright).convert("RGB")


def _sample() -> Path:
    path = Path(_import("matplotlib.cbook", "the sample comes with matplotlib").get_sample_data(SAMPLE, asfileobj=False))
    if not path.is_file():
        raise ValueError(f"--image: this matplotlib comes without its sample {SAMPLE}; name a picture: --image FILE")
    return path


def _import(module: str, why: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--image: {why} (pip install 'dilkit[plot]'): {error}") from None


def to_patches(crops: Tensor, patch: int) -> Tensor:
    """`(n, side, side, 3)` -> `(n, cells, patch * patch * 3)`, cells row-major."""
    n, side = crops.shape[:2]
    grid = side // patch
    return crops.reshape(n, grid, patch, grid, patch, 3).transpose(2, 3).reshape(n, grid**2, -1)


def to_pixels(patches: Tensor, patch: int) -> Tensor:
    """The inverse of `to_patches`."""
    n, grid = len(patches), int(patches.shape[1] ** 0.5)
    return patches.reshape(n, grid, grid, patch, patch, 3).transpose(2, 3).reshape(n, grid * patch, grid * patch, 3)
