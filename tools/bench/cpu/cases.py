"""What attention on CPUs is measured at: patterns, those over ranks too, and the sizes of the suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilkit.integrations.gigapath.config import ARCHITECTURES, SlideEncoderConfig
from dilkit.pattern import Neighborhood, SlidingWindow
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import Sizes


@dataclass(frozen=True)
class Grid:
    """A grid, and the neighborhoods of its cells: `kernel` cells a side, `dilation` apart."""

    shape: tuple[int, ...]
    kernel: int
    dilation: int = 1

    def of(self, divisor: int) -> Grid:
        """One of about so many times fewer cells, in which there is room for a neighborhood."""
        part = round(divisor ** (1 / len(self.shape)))
        return Grid(tuple(max(size // part, self.kernel * self.dilation) for size in self.shape), self.kernel, self.dilation)

    @property
    def neighborhood(self) -> Neighborhood:
        """The neighborhoods."""
        return Neighborhood(self.shape, self.kernel, self.dilation)

    @property
    def window(self) -> SlidingWindow:
        """The window that shows as many keys."""
        return SlidingWindow((self.kernel ** len(self.shape) + 1) // 2)

    def __str__(self) -> str:
        return f"neighborhoods of {self.sides} on {' x '.join(map(str, self.shape))}"

    @property
    def sides(self) -> str:
        """Such as "7 x 7, 1 in 4"."""
        return " x ".join([str(self.kernel)] * len(self.shape)) + f", 1 in {self.dilation}" * (self.dilation > 1)


@dataclass(frozen=True)
class CpuSizes(Sizes):
    """One head of `long` tokens, so many that the rate is the inner loops', and of `short` ones, so few that fixed costs show.

    `passes` over long ones: head_dim, and whether with the backward pass. `configurations`, by name, have `head_dim`, but for
    those that have another in `head_dims`. `threads`: of what is not measured on one. A call on `few` tokens with `few_heads`;
    `grids` of `grid_heads`, beside torch with a mask up to `masked` tokens; the slide encoder `model` on so many `tiles`. How
    tasks fall to `idle` threads: of A under causality; of a `window` with some `global_tokens` and `dilated` segments, length
    and rate; of `packed` sequences.
    """

    long: int = 4096
    short: tuple[int, ...] = (256, 512, 1024)
    passes: tuple[tuple[int, bool], ...] = ((48, False), (64, False), (128, False), (48, True), (64, True))
    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    head_dim: int = 64
    head_dims: Mapping[str, int] = field(default_factory=lambda: {"G": 48})
    threads: int = 4
    few: int = 16
    few_heads: int = 8
    grids: tuple[Grid, ...] = (
        *(Grid((128, 128), 13), Grid((24, 24, 28), 7)),
        *(Grid((128, 128), 7, dilation=4), Grid((64, 512), 7, dilation=4)),
    )
    grid_heads: int = 4
    masked: int = 16_384
    model: SlideEncoderConfig = ARCHITECTURES["gigapath_slide_enc12l768d"]
    tiles: int = 10_000
    idle: tuple[int, ...] = (2, 4, 8, 16)
    window: int = 512
    global_tokens: int = 16
    dilated: tuple[int, int] = (8192, 8)
    packed: tuple[int, ...] = (2_000, 5_000, 9_000, 20_000)
