"""What the suite of slides measures the slide encoder at."""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoderConfig
from dilkit.tools.bench.suite import Sizes

ARCHITECTURE = "gigapath_slide_enc12l768d"


@dataclass(frozen=True)
class SlidesSizes(Sizes):
    """Slides of so many `tiles`, a `long` one, and `several` in one batch. `matmul`: rows of the matrices of the yardstick.

    `several_depth`: layers of the encoder that gets several: two that compute all rows, and the last, which computes the class
    token's.
    """

    model: SlideEncoderConfig = ARCHITECTURES[ARCHITECTURE]
    tiles: int = 10_000
    long: int = 100_000
    several: tuple[int, ...] = (2_000, 5_000, 9_000, 20_000)
    several_depth: int = 3
    head_dims: tuple[int, ...] = (48, 64)
    matmul: int = 4096
    threads: int = 4
