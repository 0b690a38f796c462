"""Rooflines: GFLOP/s over the FLOPs a byte of the call's tensors, beside yardsticks that were timed in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dilkit.tools.report.document import Axis, Plot, Point, Series
from dilkit.tools.report.points import plain, rate, series_of
from dilkit.tools.results.record import Case
from dilkit.tools.results.statistics import middle

FORWARD_TENSORS, BACKWARD_TENSORS = 4, 8
"""The tensors of a call, each moved once: query, key, value, out; with a backward pass also their gradients."""
ROOFS = {"matmul": "torch's matmul, same rounds", "fma": "fused multiply-adds, same rounds"}


@dataclass(frozen=True)
class Work:
    """A case, and the bytes of one tensor of its call."""

    case: Case
    tensor_bytes: int
    backward: bool

    @property
    def bytes(self) -> int:
        """Of all tensors, each moved once."""
        return self.tensor_bytes * (BACKWARD_TENSORS if self.backward else FORWARD_TENSORS)


def roofline(title: str, work: Iterable[Work]) -> Plot:
    """All implementations of all cases."""
    lines: dict[str, list[Point]] = {}
    ceilings: dict[str, list[float]] = {name: [] for name in ROOFS}
    slope: list[Point] = []
    for one in work:
        case = one.case
        for name, entry in case.entries.items():
            if entry.time and entry.flops:
                x = entry.flops / one.bytes
                lines.setdefault(name, []).append(rate(x, entry.flops / 1e9, entry.seconds))
                slope += [plain(x, x * case.copy.gb_per_s)] if case.copy else []
        for name, yardstick in (("matmul", case.matmul), ("fma", case.fma)):
            ceilings[name] += [yardstick.gflops] if yardstick else []
    along = sorted(float(point.x) for points in lines.values() for point in points)
    ends = {name: [plain(x, middle(found)) for x in (*along[:1], *along[-1:])] for name, found in ceilings.items() if found}
    roofs = [Series(ROOFS[name], tuple(found), dashed=True) for name, found in ends.items()]
    copies = Series("bytes at the speed of a copy", tuple(sorted(slope, key=lambda p: p.x)), dashed=True)
    axes = Axis("nominal FLOPs a byte of the call's tensors", "number"), Axis("speed", "gflops")
    return Plot(title, "points", (*series_of(lines), *roofs, copies), axes)
