"""The results of `pytest -m gpu --gpu-day FILE`: a row for each test, and what tests noted."""

from collections import Counter
from collections.abc import Callable, Iterator

from dilkit.tools.bench.suites.preferences import CHOICE, METHOD, no_gpu, preference_rows, ratios
from dilkit.tools.bench.target import Target, Values
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Table
from dilkit.tools.report.headline import placed
from dilkit.tools.report.views import Report
from dilkit.tools.results.rows import ResultRow, RowsResult

CORRECTNESS, SPEED, PREFERENCES = "Is it right", "How fast", "Which rows of the preference table are wrong"
STEPS = (CORRECTNESS, SPEED, PREFERENCES)
"""Tables of steps. Tests go into the first; earlier GPU days had steps of all three."""
NOTED = "noted"
"""The table of what steps noted."""


def _steps(result: RowsResult, verdict: str = "") -> list[ResultRow]:
    """Return the steps that have ended, or those with this verdict."""
    return [row for row in result.rows if row.table in STEPS and verdict in ("", row.verdict)]


def _left(result: RowsResult) -> list[str]:
    ended = {row.case["name"] for row in _steps(result) if row.verdict != "skipped"}
    return [name for _, name in result.steps if name not in ended]


def _summary(result: RowsResult) -> str:
    worst = max(ratios(result).values(), default=None)
    sweep = f"; at worst the automatic choice takes {worst:.2f} times as long as the fastest" if worst else ""
    bad = f"{len(_steps(result, 'failed'))} of {len(_steps(result))} steps of a GPU day found something WRONG"
    return placed(result, f"{bad}, {len(_left(result))} of {len(result.steps)} steps are left{sweep}")


def _wrong(result: RowsResult) -> Iterator[Table]:
    rows = ((row.case["name"], row.values["ended"], "; ".join(row.reasons)) for row in _steps(result, "failed"))
    yield Table("WRONG", ("step", "what", "found"), tuple(rows))


def _function(name: str) -> str:
    return name.rpartition("/")[2].partition("[")[0]


def _ended(result: RowsResult) -> Iterator[Table]:
    groups: dict[str, list[ResultRow]] = {}
    for row in _steps(result):
        groups.setdefault(row.values.get("what", _function(row.case["name"])), []).append(row)
    rows = []
    for what, steps in groups.items():
        ended = ", ".join(f"{count} {name}" for name, count in Counter(step.values["ended"] for step in steps).items())
        text = str(steps[0].values["found"]) if len(steps) == 1 else ""
        rows.append((what, ended, in_seconds(sum(step.values["seconds"] for step in steps)), text))
    yield Table("Steps", ("step", "ended", "took", "found"), tuple(rows))


def _notes(result: RowsResult) -> Iterator[str]:
    """Yield what steps noted, but for counts of right results, then the steps for which there was no time."""
    for row in result.rows:
        if row.table == NOTED and "wrong" not in row.values:
            yield f"{_function(row.case['name'])}: {row.case['what']}: {row.values['found']}"
    if left := dict.fromkeys(map(_function, _left(result))):
        yield f"left, for which there was no time: {', '.join(left)}. The same command goes on from here"


def _noted(value: str, end: str = "") -> Callable[[RowsResult], Values]:
    return lambda result: {
        row.case["what"]: float(row.values[value])
        for row in result.rows
        if row.table == NOTED and value in row.values and row.case["what"].endswith(end)
    }


TARGETS = (
    Target("verify: wrong results", 0, 0, _noted("wrong"), "", lower=True, exact=True, missing=no_gpu),
    CHOICE,
    Target("the longest sequence, bf16 forward on one GPU", 2**23, 2**24, _noted("tokens"), " tokens", missing=no_gpu),
    Target("first call, its kernels compiled", 10, 3, _noted("seconds", "first call"), " s", lower=True, missing=no_gpu),
)
REPORT = Report(
    summary=_summary,
    summary_first=True,
    place="{device_name}, {threads} threads",
    tables=(_wrong, preference_rows, _ended),
    notes=_notes,
    method=f"What a test finds wrong is not timed; w{METHOD[1:]}",
)
