"""The patterns that attention on CPUs is measured by, alone and over ranks."""

from __future__ import annotations

from dilkit.integrations.gigapath.config import SlideEncoderConfig
from dilkit.tools.bench.configuration import Configuration

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
