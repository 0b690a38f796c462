"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools import bench_report, results

SHORT = ("tokens", "who", "time", "tokens/s", "extra memory", "x output")
NOTHING = "Nothing has been measured for this version yet."
NEEDS = ("problem", "method", "lengths", "interrupted")


def summary(folder: Path) -> str:
    """The runs in `folder` in short: where each was measured, and a table of times and memory."""
    parts = [_short(result) for path, result in bench_results(folder)]
    legend = "Medians; each contestant was checked against fp64 just before it was timed. *x output*: in output-sized tensors."
    return "\n\n".join([*parts, f"{legend} Whole tables: [docs/measurements.md](docs/measurements.md)."]) if parts else NOTHING


def measurements(folder: Path) -> str:
    """Every run in `folder` as a whole, with a link to its file, in which all samples are."""
    parts = []
    for path, result in bench_results(folder):
        body = bench_report.markdown(result).removeprefix("# dilkit bench").strip()
        parts.append(f"## {path.stem}\n\n{body}\n\nAll samples: [{path.name}](results/{path.name})")
    return "\n\n".join(parts) or NOTHING


def bench_results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The results that `dilkit bench` wrote into `folder`. Raises `results.ResultError` for any other JSON file."""
    return [(path, results.load(path, kind="bench", needs=NEEDS)) for path in sorted(folder.glob("*.json"))]


def _short(result: dict[str, Any]) -> str:
    what, pattern, where = bench_report.headline(result)
    table = bench_report.table(result)
    columns = [table[0].index(name) for name in SHORT]
    lines = ["| " + " | ".join(row[i] for i in columns) + " |" for row in table]
    return "\n".join([f"{what}; {pattern}.  ", f"{where}.", "", lines[0], "|" + "---:|" * len(columns), *lines[1:]])
