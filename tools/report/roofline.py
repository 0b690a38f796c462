"""Rooflines: GFLOP/s over the FLOPs a byte of the call's tensors, beside yardsticks that were timed in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dilkit.tools.report.document import Axis, Plot, Point, Series
from dilkit.tools.report.points import plain, rate, series_of
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, RowsResult
from dilkit.tools.results.statistics import middle

FORWARD_TENSORS, BACKWARD_TENSORS = 4, 8
"""The tensors of a call, each moved once: query, key, value, out; with a backward pass also their gradients."""
ROOFS = {"matmul": "torch's matmul, same rounds", "fma": "fused multiply-adds, same rounds"}


def moved_bytes(tensor_bytes: int, backward: bool) -> int:
    """Return the bytes of all tensors of a call, each moved once."""
    return tensor_bytes * (BACKWARD_TENSORS if backward else FORWARD_TENSORS)


def rows_roofline(title: str, cases: Iterable[tuple[CaseRows, float]]) -> Plot:
    """Draw all implementations of all cases, each case with the bytes that its call moves."""
    lines: dict[str, list[Point]] = {}
    ceilings: dict[str, list[float]] = {name: [] for name in ROOFS}
    slope: list[Point] = []
    for case, moved in cases:
        for who, row in case.rows.items():
            if who not in YARDSTICKS and row.samples and row.values.get("flops"):
                x = row.values["flops"] / moved
                lines.setdefault(who, []).append(rate(x, row.values["flops"] / 1e9, row.samples))
                slope += [plain(x, x * case.rows["copy"].values["gb_per_s"])] if "copy" in case.rows else []
        for name in ROOFS:
            ceilings[name] += [case.rows[name].values["gflops"]] if name in case.rows else []
    along = sorted(float(point.x) for points in lines.values() for point in points)
    ends = {name: [plain(x, middle(rates)) for x in (*along[:1], *along[-1:])] for name, rates in ceilings.items() if rates}
    roofs = [Series(ROOFS[name], tuple(points), dashed=True) for name, points in ends.items()]
    copies = Series("bytes at the speed of a copy", tuple(sorted(slope, key=lambda p: p.x)), dashed=True)
    axes = Axis("nominal FLOPs a byte of the call's tensors", "number"), Axis("speed", "gflops")
    return Plot(title, "points", (*series_of(lines), *roofs, copies), axes)


def rooflines(title: str, table: str) -> Callable[[RowsResult], list[Plot]]:
    """Return a function that draws a table, a plot for each title: a template filled in with the facts of a case.

    Rows of the table have the value `bytes`, those that their call moves.
    """

    def made(result: RowsResult) -> list[Plot]:
        titled: dict[str, list[tuple[CaseRows, float]]] = {}
        for case in result.cases(table):
            moved = max(row.values.get("bytes", 0) for row in case.rows.values())
            titled.setdefault(case.label(title), []).append((case, moved))
        return [rows_roofline(name, cases) for name, cases in titled.items()]

    return made
