"""The figures of the suites by version: the table and the picture of docs/results/history.md.

    python -m dilkit.tools.site.history VERSION

writes docs/results/history/VERSION.json: figures of runs in docs/results that no earlier version has. A release begins with it.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.tools.bench.suites import SUITES
from dilkit.tools.report import registry
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import COLORS, FAINT, INK, MARKERS, new_figure, save
from dilkit.tools.report.targets import number
from dilkit.tools.results.decode import DecodeError, decode, encode
from dilkit.tools.results.file import ResultError, read_json, write_text
from dilkit.tools.results.rows import RowsResult

KIND, NEXT = "history", "next"
"""The kind of a version's file; the name of figures that no version has published."""
COLUMNS, SIZE, LETTERS = 3, (2.3, 1.5), 32
"""Panels in a row of the picture, inches of a panel, letters in a line of its title."""


@dataclass(frozen=True, kw_only=True)
class PastFigure:
    """The worst value of a figure in a version. `lower`: less is better."""

    name: str
    value: float
    unit: str = ""
    lower: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one run of a suite on one machine."""

    suite: str
    machine: str
    date: str
    torch: str
    git_revision: str | None = None
    figures: tuple[PastFigure, ...]


@dataclass(frozen=True, kw_only=True)
class Version:
    """The runs that a version published and none before it had."""

    schema: int = 1
    kind: str = KIND
    version: str
    runs: tuple[Run, ...]


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
    last = _versions(results)[-1]
    if last.version == NEXT:
        text = json.dumps(encode(Version(version=name, runs=last.runs)), indent=1, allow_nan=False)
        write_text(results / "history" / f"{name}.json", f"{text}\n")
    return 0


def history(root: Path) -> str:
    """Return the main figures of all suites: a row for each machine, a column for each version."""
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
    lines, names = _lines(versions), [version.version for version in versions]
    machines = list(dict.fromkeys(line.machine for line in lines))
    panels: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        panels.setdefault((line.suite, line.figure.name), []).append(line)
    rows = math.ceil(len(panels) / COLUMNS)

    def mark(axes: Any, machine: str, values: dict[str, float]) -> Any:
        style = dict(color=COLORS[machines.index(machine) % len(COLORS)], marker=MARKERS[machines.index(machine) % len(MARKERS)])
        points = [(place, values[name]) for place, name in enumerate(names) if name in values]
        return axes.plot([x for x, _ in points], [y for _, y in points], markersize=4, linewidth=1.2, **style)[0]

    with new_figure(COLUMNS * SIZE[0], rows * SIZE[1] + 0.6) as figure:
        grid = figure.subplots(rows, COLUMNS, squeeze=False).flat
        for axes, of_panel in zip(grid, panels.values(), strict=False):
            for line in of_panel:
                mark(axes, line.machine, line.values)
            _dress(axes, of_panel, names)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        marks = [mark(grid[0], machine, {}) for machine in machines]
        figure.legend(marks, machines, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        save(figure, path, dpi=130)


def _dress(axes: Any, lines: Sequence[Line], names: Sequence[str]) -> None:
    figure = lines[0].figure
    axes.set_title(textwrap.fill(f"{lines[0].suite}: {figure.name}", LETTERS), loc="left", fontsize=7, color=INK)
    axes.set_ylabel(f"{figure.unit.strip()} ({'less' if figure.lower else 'more'} is better)".lstrip(), fontsize=6, color=INK)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(0, 1.2 * max(max(line.values.values()) for line in lines))
    axes.tick_params(length=0, labelsize=7, labelcolor=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[:].set_visible(False)


def _versions(results: Path) -> list[Version]:
    """Return published versions, and runs of docs/results that none of them has as the next one."""
    past = read_versions(results / "history")
    published = {(run.suite, run.machine, run.date) for version in past for run in version.runs}
    runs = []
    for result in map(registry.read, sorted(results.glob("*.json"))):
        if isinstance(result, RowsResult) and result.suite in SUITES and (run := run_of(result)).figures:
            runs += [run] if (run.suite, run.machine, run.date) not in published else []
    return [*past, Version(version=NEXT, runs=tuple(runs))] if runs else past


def run_of(result: RowsResult) -> Run:
    """Return the figures of a result that have a value."""
    place = result.environment
    figures = (
        PastFigure(name=figure.name, value=figure.worst, unit=figure.unit, lower=figure.lower)
        for figure in result.figures
        if figure.worst is not None
    )
    return Run(
        suite=result.suite,
        machine=f"{result.machine}, {place.cores} cores",
        date=result.date,
        torch=place.torch,
        git_revision=place.git_revision,
        figures=tuple(figures),
    )


def read_versions(folder: Path) -> list[Version]:
    """Return the versions of the files in `folder`, the oldest first. Raises `ResultError` for a file of anything else."""
    versions = []
    for path in folder.glob("*.json"):
        try:
            one = decode(Version, read_json(path))
        except DecodeError as error:
            raise ResultError(path, f"{error}: not a version's figures") from None
        if one.kind != KIND or one.version != path.stem or not one.version.replace(".", "").isdecimal():
            named = f"the {one.kind[:40]} of version {one.version[:40]!r}"
            raise ResultError(path, f"{named}; the file is named after its version")
        versions.append(one)
    return sorted(versions, key=lambda version: tuple(map(int, version.version.split("."))))


def _lines(versions: Sequence[Version]) -> list[Line]:
    """Return the main figures of each suite on each machine: those in its sentence on docs/measurements.md."""
    reports = [registry.words(kind) for kind in registry.KINDS]
    main_ones = {name for one in reports for name in getattr(one, "sentences", ())}
    lines: dict[tuple[str, str, str], Line] = {}
    for version in versions:
        for run in version.runs:
            for figure in (figure for figure in run.figures if figure.name in main_ones):
                key = (run.suite, figure.name, run.machine)
                values = lines[key].values if key in lines else {}
                lines[key] = Line(run.suite, run.machine, figure, values | {version.version: figure.value})
    return [lines[key] for key in sorted(lines)]


if __name__ == "__main__":
    sys.exit(main())
