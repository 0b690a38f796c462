"""What token orders are measured at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilkit.tools.bench.orders.record import Locality
from dilkit.tools.bench.suite import Sizes

GRIDS = {"square": (1024, 1024), "large": (4096, 4096), "cube": (128, 128, 128), "frame": (1080, 1920), "video": (33, 45, 80)}
POINTS = {2: (1 << 20, (10, 16)), 3: (1 << 21, (7, 10))}
NEAR = Locality(shape=(256, 256), segment_length=4096, dilation_rates=(4, 8, 16), nearest_kept={})


@dataclass(frozen=True)
class OrdersSizes(Sizes):
    """`grids` by name. Random `points` by the number of axes: how many, and of how many bits; so many of them are `sorted`.

    `near`: where the distance to the nearest kept key is measured. It does not depend on the machine; --quick leaves it alone.
    """

    divisor: int = 16
    grids: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: GRIDS)
    points: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=lambda: POINTS)
    sorted: int = 1_000_000
    near: Locality = NEAR
