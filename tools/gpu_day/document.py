"""What a GPU day says, on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dilkit.tools.console.text import in_seconds
from dilkit.tools.gpu_day.record import STAGES, TITLES, Choice, GpuDayResult, StepRecord
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.report.targets import figure_table

WRONG_FROM = 1.15
"""How many times as long as the fastest the picked backend may take before a row of the preference table is wrong."""
SHOWN = 12
"""Problems of the sweep that a table shows, the worst first."""
REHEARSAL = "REHEARSAL on the CPU, at small sizes: nothing of it is a GPU's figure"
METHOD = (
    "Each step is a process with a deadline, and what it found is written down at once. What the first stage found wrong is not "
    "timed; whatever is timed is checked against fp64 arithmetic just before. Times of the sweep are medians of calls in turns, "
    "by CUDA events. Its ratio: the time of the backend that the preference table picks, over that of the fastest that is able; "
    "numba_cuda, reference and flex are not among them, nor is triton in float32."
)


def sentence(result: GpuDayResult) -> str:
    """For docs/measurements.md."""
    wrong, ratios = sum(step.wrong for step in result.steps), [c.ratio for c in result.choices if c.ratio]
    sweep = f"; at worst the automatic choice takes {max(ratios):.2f} times as long as the fastest" if ratios else ""
    text = f"{len(result.steps)} of {len(result.plan)} steps of a GPU day, {wrong} WRONG{sweep}"
    return placed(result, text, REHEARSAL if result.rehearsal else "")


def document(result: GpuDayResult) -> Document:
    """The verdict first: what is wrong, the figures, rows of the preference table, then every step."""
    return Document(
        headline=(*_headline(result), place(result)),
        tables=tables(
            _wrong(result),
            figure_table(result.figures),
            _rows(result.choices),
            _worst(result.choices),
            *(_steps(stage, result.of(stage)) for stage in STAGES),
        ),
        plots=plots(_ratios(result.choices), _times(result)),
        notes=(*_noted(result), *_left(result)),
        method=METHOD,
    )


def _headline(result: GpuDayResult) -> Iterator[str]:
    if result.rehearsal:
        yield REHEARSAL
    wrong = [step for step in result.steps if step.wrong]
    verdict = f"{len(wrong)} of {len(result.steps)} steps found something WRONG" if wrong else "nothing was found wrong"
    yield f"{verdict}; {len(result.left)} of {len(result.plan)} steps are left"


def _wrong(result: GpuDayResult) -> Table:
    rows = []
    for step in result.steps:
        rows += [(step.name, one.what, one.found) for one in step.found.findings if one.verdict == "wrong"]
        rows += [(step.name, step.ended, reason) for reason in step.reasons if step.ended in ("failed", "late")]
    return Table("WRONG", ("step", "what", "found"), tuple(rows))


def _rows(choices: Sequence[Choice]) -> Table:
    """Each row of the preference table that problems of the sweep fell under."""
    rows = []
    for name in dict.fromkeys(choice.row for choice in choices):
        mine = [choice for choice in choices if choice.row == name]
        ratios = [choice.ratio for choice in mine if choice.ratio is not None]
        over = [choice for choice in mine if choice.ratio is not None and choice.ratio > WRONG_FROM]
        best = ", ".join(sorted({next(iter(choice.seconds)) for choice in over}))
        missing = len(mine) - len(ratios)
        verdict = f"WRONG in {len(over)}: {best}" if over else "right" if ratios else "not measured"
        picked, worst = ", ".join(sorted({c.picked for c in mine})), f"{max(ratios):.2f}" if ratios else "-"
        rows.append((name, picked, str(len(mine)), worst, verdict + f"; {missing} not measured" * bool(missing and ratios)))
    header = ("row", "it says", "problems", "worst ratio", "measured")
    return Table(f"Rows of the preference table: wrong from {WRONG_FROM} on", header, tuple(rows))


def _worst(choices: Sequence[Choice]) -> Table:
    measured = sorted((c for c in choices if c.ratio is not None), key=lambda c: -(c.ratio or 0))
    rows = []
    for choice in measured[:SHOWN]:
        times = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in choice.seconds.items())
        rows.append((choice.problem, choice.picked, next(iter(choice.seconds)), f"{choice.ratio:.2f}", times))
    header = ("problem", "the table says", "the fastest", "ratio", "times")
    return Table(f"The sweep: {len(measured)} problems, the worst first", header, tuple(rows))


def _steps(stage: str, steps: Sequence[StepRecord]) -> Table:
    rows = [(step.what, "WRONG" if step.wrong else step.ended, in_seconds(step.seconds), _summary(step)) for step in steps]
    return Table(TITLES[stage], ("step", "", "took", "found"), tuple(rows))


def _summary(step: StepRecord) -> str:
    """A step in short: its only finding, or how many there are of each verdict."""
    findings, suite = step.found.findings, step.found.suite
    if len(findings) == 1:
        return f"{findings[0].what}: {findings[0].found}"
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in ("wrong", "right", "noted", "absent")}
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    parts += [f"{len(step.found.choices)} problems"] * bool(step.found.choices)
    parts += [f"{suite['done']} of {len(suite['steps'])} measurements"] if suite else []
    return ", ".join((*parts, *step.reasons)) or "nothing"


def _noted(result: GpuDayResult) -> Iterator[str]:
    """What was looked at in numbers or words, and what was not there."""
    for step in result.steps:
        shown = [one for one in step.found.findings if one.verdict in ("noted", "absent")]
        if len(step.found.findings) > 1:
            yield from (f"{step.name}: {one.what}: {one.found}" for one in shown)


def _left(result: GpuDayResult) -> Iterator[str]:
    if result.left:
        names = ", ".join(name for _, name in result.left)
        yield f"left, for which there was no time: {names}. The same command goes on from here"


def _ratios(choices: Sequence[Choice]) -> Plot:
    """Each problem's ratio, by the row of the preference table."""
    points_by_name: dict[str, list[Point]] = {}
    for number, choice in enumerate(choices, 1):
        if choice.ratio is not None:
            points_by_name.setdefault(choice.row, []).append(Point(number, choice.ratio, choice.ratio, choice.ratio))
    axes = Axis("problem of the sweep", "number", log=False), Axis("the table's choice / the fastest", "times")
    line = Series(f"wrong from {WRONG_FROM} on", (_flat(1), _flat(max(len(choices), 2))), dashed=True)
    return Plot(
        "The automatic choice over the fastest", "points", (*(Series(n, tuple(p)) for n, p in points_by_name.items()), line), axes
    )


def _flat(x: int) -> Point:
    return Point(x, WRONG_FROM, WRONG_FROM, WRONG_FROM)


def _times(result: GpuDayResult) -> Plot:
    """What the steps took."""
    bars = tuple(Point(step.what, *[step.seconds] * 3) for step in result.steps)
    axes = Axis("", "number"), Axis("time of the step", "seconds")
    return Plot("Where the time went", "bars", (Series("steps", bars),), axes)
