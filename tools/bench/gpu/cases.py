"""What the CUDA kernels are measured at: patterns, and the sizes of the suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import Sizes

CONFIGURATIONS = {
    "A": Configuration(131072, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "B": Configuration(32768, (512, 1024), (1, 2)),
    "C": Configuration(1 << 20, (2048, 8192, 32768, 131072, 524288), (1, 4, 16, 64, 256)),
}


@dataclass(frozen=True)
class GpuSizes(Sizes):
    """`configurations` by name, in each of `dtypes` and `head_dims`.

    With the pattern of B: `seeds`, the lengths of the tables that users of earlier implementations know, and one length that is
    `launch_bound`. With that of C, a `long` sequence.
    """

    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    head_dims: tuple[int, ...] = (64, 128)
    seeds: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    launch_bound: int = 8192
    long: int = 1 << 24
