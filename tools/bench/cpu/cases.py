"""What attention on CPUs is measured at: patterns, those over ranks too, and the sizes of the suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilkit.integrations.gigapath.config import SlideEncoderConfig
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import Sizes

GIGAPATH = SlideEncoderConfig()
CONFIGURATIONS = {
    "A": Configuration(32768, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(16384, (512, 1024), (1, 2)),
    "C": Configuration(131072, (2048, 8192, 32768, 131072), (1, 4, 16, 64)),
    "D": Configuration(65536, (1024, 4096, 16384, 65536), (1, 4, 16, 64)),
    "G": Configuration(
        10001,
        GIGAPATH.segment_lengths,
        GIGAPATH.dilation_rates,
        heads=GIGAPATH.num_heads,
        offset="block",
        tail=GIGAPATH.tail,
    ),
    "million": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}
"""By name; G is GigaPath's slide encoder on a slide of 10,000 tiles and the class token."""


@dataclass(frozen=True)
class CpuSizes(Sizes):
    """One head of `long` tokens, so many that the rate is the inner loops', and of `short` ones, so few that fixed costs show.

    `passes` over long ones: head_dim, and whether with the backward pass. `configurations`, by name, have `head_dim`, but for
    those that have another in `head_dims`. `threads`: of what is not measured on one.
    """

    long: int = 4096
    short: tuple[int, ...] = (256, 512, 1024)
    passes: tuple[tuple[int, bool], ...] = ((48, False), (64, False), (128, False), (48, True), (64, True))
    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    head_dim: int = 64
    head_dims: Mapping[str, int] = field(default_factory=lambda: {"G": 48})
    threads: int = 4
