"""The figures of the suites by version: the table and the picture of docs/results/history.md.

    python -m dilkit.tools.site.history VERSION

writes docs/results/history/VERSION.json, of what docs/results has and no version before; a release begins with it.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.tools.bench.suites import SUITES
from dilkit.tools.report import registry
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import COLORS, FAINT, INK, MARKERS, new_figure, save
from dilkit.tools.report.targets import number
from dilkit.tools.results.history import PastFigure, Version, read_versions, runs_of, unpublished, write_version
from dilkit.tools.results.rows import RowsResult

NEXT = "next"
"""What is measured and not yet published with a version."""
COLUMNS, SIZE, LETTERS = 3, (2.3, 1.5), 32
"""Of the picture: panels in a row, inches of a panel, letters of a line of its title."""


@dataclass(frozen=True)
class Line:
    """A figure of a suite on one machine, by version."""

    suite: str
    machine: str
    figure: PastFigure
    values: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file of the version that is named."""
    (name,) = sys.argv[1:] if argv is None else argv
    results = Path("docs", "results")
    found = _versions(results)
    if found[-1].version == NEXT:
        write_version(Version(version=name, runs=found[-1].runs), results / "history")
    return 0


def history(root: Path) -> str:
    """The main figures of all suites, a row for each machine, a column for each version."""
    versions = _versions(root / "docs" / "results")
    names = [version.version for version in versions]
    rows: list[tuple[str, ...]] = [("suite", "figure", "better", "machine", *names)]
    for line in _lines(versions):
        values = (f"{number(line.values[name])}{line.figure.unit}" if name in line.values else "-" for name in names)
        rows.append((line.suite, line.figure.name, "less" if line.figure.lower else "more", line.machine, *values))
    return rows_markdown(rows)


def draw(root: Path, path: Path) -> None:
    """Draw a panel for each main figure: versions from left to right, the points of one machine joined."""
    versions = _versions(root / "docs" / "results")
    lines = list(_lines(versions))
    machines = list(dict.fromkeys(line.machine for line in lines))
    panels = list(dict.fromkeys((line.suite, line.figure.name) for line in lines))
    rows = math.ceil(len(panels) / COLUMNS)
    with new_figure(COLUMNS * SIZE[0], rows * SIZE[1] + 0.6) as figure:
        grid = figure.subplots(rows, COLUMNS, squeeze=False).flat
        for axes, panel in zip(grid, panels, strict=False):
            _panel(axes, [line for line in lines if (line.suite, line.figure.name) == panel], versions, machines)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        marks = [_mark(grid[0], machines.index(machine), [], []) for machine in machines]
        figure.legend(marks, machines, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        save(figure, path, dpi=130)


def _panel(axes: Any, lines: Sequence[Line], versions: Sequence[Version], machines: Sequence[str]) -> None:
    names = [version.version for version in versions]
    for line in lines:
        places = [place for place, name in enumerate(names) if name in line.values]
        _mark(axes, machines.index(line.machine), places, [line.values[names[place]] for place in places])
    figure = lines[0].figure
    axes.set_title(textwrap.fill(f"{lines[0].suite}: {figure.name}", LETTERS), loc="left", fontsize=7, color=INK)
    axes.set_ylabel(f"{figure.unit.strip()} ({'less' if figure.lower else 'more'} is better)".lstrip(), fontsize=6, color=INK)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(0, 1.2 * max(max(line.values.values()) for line in lines))
    axes.tick_params(length=0, labelsize=7, labelcolor=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[:].set_visible(False)


def _mark(axes: Any, machine: int, x: Sequence[int], y: Sequence[float]) -> Any:
    marker = MARKERS[machine % len(MARKERS)]
    return axes.plot(x, y, color=COLORS[machine % len(COLORS)], marker=marker, markersize=4, linewidth=1.2)[0]


def _versions(results: Path) -> list[Version]:
    """The versions that are out, and what docs/results has beyond them as the next one."""
    past = read_versions(results / "history")
    found = (registry.read(path) for path in sorted(results.glob("*.json")))
    suites = [result for result in found if isinstance(result, RowsResult) and result.suite in SUITES]
    runs = unpublished((run for result in suites for run in runs_of(result)), past)
    return [*past, Version(version=NEXT, runs=runs)] if runs else past


def _lines(versions: Sequence[Version]) -> Iterator[Line]:
    """The main figures of each suite, those that its sentence on docs/measurements.md is made of, on each machine."""
    words = [registry.kind(name).words for name in registry.KINDS]
    main_ones = {name for one in words for name in getattr(one, "sentences", getattr(one, "SENTENCES", ()))}
    values: dict[tuple[str, str, str], dict[str, float]] = {}
    figures: dict[tuple[str, str, str], PastFigure] = {}
    for version in versions:
        for run in version.runs:
            for figure in (figure for figure in run.figures if figure.name in main_ones):
                key = (run.suite, figure.name, run.machine)
                values.setdefault(key, {})[version.version], figures[key] = figure.value, figure
    for key in sorted(values):
        yield Line(key[0], key[2], figures[key], values[key])


if __name__ == "__main__":
    sys.exit(main())
