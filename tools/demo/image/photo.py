"""The photograph of the image demo as patches: crops in a strip down its middle are judged on, those beside it are trained on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dilkit import files
from dilkit.tools.console.text import error_line
from dilkit.tools.demo.image.model import ImageConfig, hidden_loss

SAMPLE = "grace_hopper.jpg"
"""Of matplotlib's sample data: a portrait in the public domain."""
SIDE = 4
"""Crops that a photograph is wide and high; the strip in the middle is one crop wide."""
BATCH = 2
"""Crops in a step."""
MASKS = 3
"""How many times each held-out crop is judged, other patches being hidden each time."""


def load_photograph(path: str | None, side: int) -> Tensor:
    """The picture in the file `path`, or the sample, cut to a square and scaled: `(side, side, 3)`, 0 to 1.

    Raises ValueError for what is no picture, or where a package is missing.
    """
    try:
        from matplotlib.cbook import get_sample_data
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ValueError(f"--image: needs matplotlib and Pillow (pip install 'dilkit[plot]'): {error}") from None
    try:
        content = files.read_bytes(Path(get_sample_data(SAMPLE, asfileobj=False) if path is None else path))
        with Image.open(io.BytesIO(content)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:
        raise ValueError(f"--image: {path or SAMPLE!r} is no picture that Pillow can read: {error_line(error)}") from None
    return torch.from_numpy(np.array(ImageOps.fit(picture, (side, side)), dtype=np.float32) / 255)


class Crops:
    """Crops of a photograph `(side, side, 3)` as patches `(n, cells, values)`, and which patches are hidden, `(n, cells)`.

    Values are standardised by what is trained on: a loss of 1 is the variance of that.
    """

    def __init__(self, photo: Tensor, config: ImageConfig) -> None:
        self.config = config
        self.start = (len(photo) - config.crop) // 2
        self.stop = self.start + config.crop
        beside = torch.cat([photo[:, : self.start], photo[:, self.stop :]], 1)
        self.mean = beside.mean((0, 1))
        self.deviation = (beside - self.mean).square().mean().sqrt()
        if self.deviation == 0:
            raise ValueError("--image: the picture is all of one colour beside its middle; give another")
        self.photo = (photo - self.mean) / self.deviation
        strip = self.photo[:, self.start : self.stop]
        self.held_out = self.patches(torch.unflatten(strip, 0, (-1, config.crop))).repeat(MASKS, 1, 1)
        self.hidden = self.hide(len(self.held_out), torch.Generator().manual_seed(0))

    def patches(self, crops: Tensor) -> Tensor:
        """`(n, crop, crop, 3)` -> `(n, cells, values)`, cells row-major."""
        grid, patch = self.config.grid, self.config.patch
        return crops.reshape(-1, grid, patch, grid, patch, 3).transpose(2, 3).reshape(-1, grid**2, 3 * patch**2)

    def picture(self, patches: Tensor) -> Tensor:
        """Crops one below the other, `(n * crop, crop, 3)`, 0 to 1."""
        grid, patch = self.config.grid, self.config.patch
        pixels = patches.reshape(-1, grid, grid, patch, patch, 3).transpose(2, 3).reshape(-1, self.config.crop, 3)
        return (pixels * self.deviation + self.mean).clamp(0, 1)

    def hide(self, crops: int, generator: torch.Generator) -> Tensor:
        """As many hidden patches in each crop, anywhere."""
        order = torch.rand(crops, self.config.cells, generator=generator).argsort(1)
        return order < round(self.config.hidden * self.config.cells)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random crops to train on, and what is hidden in them."""
        crops = torch.stack([self._random_crop(generator) for _ in range(BATCH)])
        return self.patches(crops), self.hide(BATCH, generator)

    def _random_crop(self, generator: torch.Generator) -> Tensor:
        """A crop beside the strip, turned, mirrored and its colours permuted: what is learnt must hold for all these pictures."""

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        size = self.config.crop
        row, column = draw(len(self.photo) - size + 1), draw(self.start - size + 1) + draw(2) * self.stop
        crop = torch.rot90(self.photo[row : row + size, column : column + size], draw(4))
        mirrored = crop.flip(0) if draw(2) else crop
        return mirrored[..., torch.randperm(3, generator=generator)]

    def guess(self) -> float:
        """The held-out loss of a guess without any training: the mean of what is visible, weighted by 1 / distance^4."""
        places = self.config.places
        squares = (places[:, None] - places).square().sum(-1).float().fill_diagonal_(torch.inf)
        weights = squares**-2 * ~self.hidden[:, None]
        return hidden_loss(weights @ self.held_out / weights.sum(-1, keepdim=True), self.held_out, self.hidden).item()
