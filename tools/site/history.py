"""The figures of the suites by version: the table of docs/results/history.md.

    python -m dilkit.tools.site.history VERSION

writes docs/results/history/VERSION.json: figures of runs in docs/results that no earlier version has. A release begins with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilkit.tools.bench.suites import SUITES
from dilkit.tools.report import registry
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.targets import number
from dilkit.tools.results.file import write_text
from dilkit.tools.results.rows import RowsResult

NEXT = "next"
"""The name of figures that no version has published."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file of the version that is named."""
    (name,) = sys.argv[1:] if argv is None else argv
    results = Path("docs", "results")
    if runs := runs_by_version(results).get(NEXT):
        text = json.dumps(dict(schema=1, kind="history", version=name, runs=runs), indent=1, allow_nan=False)
        write_text(results / "history" / f"{name}.json", f"{text}\n")
    return 0


def history(root: Path) -> str:
    """Return the main figures of all suites: a row for each machine, a column for each version."""
    versions = runs_by_version(root / "docs" / "results")
    words = map(registry.words, registry.KINDS)
    main_figures = {name for one in words for name in getattr(one, "sentences", ())}
    lines: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for version, runs in versions.items():
        for run in runs:
            for figure in run["figures"]:
                if figure["name"] in main_figures:
                    lines.setdefault((run["suite"], figure["name"], run["machine"]), {})[version] = figure
    rows: list[tuple[str, ...]] = [("suite", "figure", "better", "machine", *versions)]
    for (suite, name, machine), figures in sorted(lines.items()):
        texts = {version: f"{number(figure['value'])}{figure['unit']}" for version, figure in figures.items()}
        better = "less" if next(iter(figures.values()))["lower"] else "more"
        rows.append((suite, name, better, machine, *(texts.get(version, "-") for version in versions)))
    return rows_markdown(rows)


def runs_by_version(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of published versions, the oldest first, and those in docs/results that none of them has as `NEXT`."""
    files = sorted((results / "history").glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
    versions: dict[str, list[dict[str, Any]]] = {path.stem: json.loads(path.read_text())["runs"] for path in files}
    published = {(run["suite"], run["machine"], run["date"]) for runs in versions.values() for run in runs}
    results_now = map(registry.read, sorted(results.glob("*.json")))
    runs = [run_of(result) for result in results_now if isinstance(result, RowsResult) and result.suite in SUITES]
    new = [run for run in runs if run["figures"] and (run["suite"], run["machine"], run["date"]) not in published]
    return versions | ({NEXT: new} if new else {})


def run_of(result: RowsResult) -> dict[str, Any]:
    """Return a run and those of its figures that have a value; `lower` figures are better when they are less."""
    place = result.environment
    return dict(
        suite=result.suite,
        machine=f"{result.machine}, {place.cores} cores",
        date=result.date,
        torch=place.torch,
        git_revision=place.git_revision,
        figures=[
            dict(name=figure.name, value=figure.worst, unit=figure.unit, lower=figure.lower)
            for figure in result.figures
            if figure.worst is not None
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
