"""The picture of the suite of token orders: time a point of dilkit, a store loop and the packages, in every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools.bench.orders.targets import OURS, STORE_LOOP, contests
from dilkit.tools.report.kinds.bench_plot import COLORS, FAINT, INK

Result = dict[str, Any]


def draw(result: Result, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    rows = [(title, row) for title, row in contests(result) if any("time" in entry for entry in row["entries"].values())]
    figure = Figure(figsize=(10, 1.6 + 0.33 * max(len(rows), 1)), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots()
    packages = [package["name"] for package in result["packages"]]
    for who in dict.fromkeys((OURS, *(who for _, row in rows for who in row["entries"]))):
        taken = [
            (row["entries"][who]["ns_per_point"], y) for y, (_, row) in enumerate(rows) if "time" in row["entries"].get(who, {})
        ]
        if taken:
            axes.scatter(*zip(*taken, strict=True), label=who, zorder=3, **_look(who, packages))
    axes.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"nanoseconds a point, one thread ({result['environment']['device_name']})", fontsize=9.5, color=INK)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.grid(color=FAINT, linewidth=0.8)
    axes.spines[:].set_visible(False)
    figure.legend(frameon=False, fontsize=8.5, loc="outside upper center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _look(who: str, packages: list[str]) -> dict[str, Any]:
    """dilkit as discs, its other ways as rings, packages as discs in colours of their own, and what else there is as crosses."""
    if who.startswith(OURS):
        return dict(s=70, edgecolors=COLORS[0], facecolors=COLORS[0] if who == OURS else "none")
    if who in packages:
        return dict(s=40, color=COLORS[1 + packages.index(who)])
    return dict(s=45, color=INK, marker="x" if who == STORE_LOOP else "+")
