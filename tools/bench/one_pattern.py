"""`dilkit bench` on a problem of one's own: implementations over lengths, as rows and in words."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis, Plot, Point, Table
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import grouped, interval, plain, series_by_name, speed_up
from dilkit.tools.report.roofline import moved_bytes, rows_roofline
from dilkit.tools.results.file import new_result
from dilkit.tools.results.problem import problem_text
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, Row, RowsResult, rows_of
from dilkit.tools.results.statistics import exponent

if TYPE_CHECKING:
    from dilkit.tools.measure.implementation import Implementation

KIND, TABLE = "bench", "call"
METHOD = (
    "Medians of {repeats} samples of at least {min_time_s:g} s, taken in interleaved rounds; each implementation was checked "
    "against fp64 arithmetic just before. GFLOP/s count the nominal FLOPs of what an implementation computes, and are compared "
    "with a square matmul timed in the same rounds. Extra memory is the peak over what was held before the call, its result "
    "included; one output is batch x tokens x heads x head_dim."
)


def measure(
    longest: Problem, lengths: Sequence[int], implementations: Sequence[Implementation], repeats: int, budget: float
) -> RowsResult:
    """Measure all lengths, shortest first; after Ctrl-C the result has those before it."""
    from tqdm import tqdm

    from dilkit.tools.measure.case import CaseRunner

    rows: list[Row] = []
    with tqdm(lengths, unit="length", file=sys.stderr, disable=None) as bar:
        runner = CaseRunner(implementations, repeats, budget=budget, say=bar.set_description)
        with contextlib.suppress(KeyboardInterrupt):
            for seq in bar:
                problem = replace(longest, seq=seq)
                rows += call_rows(problem, runner.run(problem))
    facts = facts_of(longest) | dict(min_time_s=runner.min_time, budget_s=budget)
    interrupted = len({row.case["length"] for row in rows}) < len(lengths)
    fields: dict[str, Any] = dict(repeats=repeats, facts=facts, rows=tuple(rows), interrupted=interrupted)
    return new_result(RowsResult, longest.device, kind=KIND, **fields)


def facts_of(problem: Problem) -> dict[str, Any]:
    """Facts of the result: the problem in words, but for its length."""
    segments = json.loads(problem.pattern.to_json()).get("segment_lengths", ())
    return dict(
        problem=problem_text(problem), pattern=str(problem.pattern), scale=problem.scale, batch=problem.batch,
        backward=problem.requires_grad, longest_segment=max(segments, default=0),
    )  # fmt: skip


def call_rows(problem: Problem, measured: Mapping[str, Any]) -> list[Row]:
    """Rows of one length: the fields of a case as they were measured."""
    from dilkit.tools.measure.case import output_bytes

    values: dict[str, dict[str, Any]] = {}
    for who, entry in measured["entries"].items():
        values[who] = dict(tokens=problem.seq, output_bytes=output_bytes(problem)) | (vars(entry.ranks) if entry.ranks else {})
        if entry.differs:
            values[who]["differs"] = {name: value for name, value in vars(entry.differs).items() if value is not None}
    return rows_of(TABLE, dict(length=f"{problem.seq:,} tokens"), measured, values)


def times(result: RowsResult, more: tuple[views.Column, ...] = ()) -> Iterator[Table]:
    """A row for every measured implementation; with the forward pass's memory where a call is more than that."""

    def who(row: Row, case: CaseRows) -> str:
        return f"{row.who} (differs)" if row.values.get("differs") else row.who

    def tokens_per_s(row: Row, case: CaseRows) -> str:
        return f"{result.facts['batch'] * row.values['tokens'] / row.median_s:,.0f}"

    def kb_per_token(row: Row, case: CaseRows) -> str:
        known = _kb_per_token(result, row)
        return "-" if known is None else f"{known:.2f}"

    forward = (views.value("forward_peak_bytes", "of forward", "bytes"), _in_outputs("forward_peak_bytes"))
    columns = (
        *(views.fact("tokens", template="{:,}"), views.Column("who", who), views.TIME, views.QUARTILES),
        *(views.Column("GFLOP/s", lambda row, case: f"{row.gflops:,.1f}"), views.OF_MATMUL),
        *(views.Column("tokens/s", tokens_per_s), views.Column("kB/token", kb_per_token)),
        *(views.value("peak_bytes", "extra memory", "bytes"), _in_outputs("peak_bytes")),
        *(forward if result.facts["backward"] else ()),
        *more,
    )
    yield views.TableView("Time and memory", TABLE, columns).made(result)


def _in_outputs(name: str) -> views.Column:
    """Memory in units of one tensor shaped like the output."""

    def cell(row: Row, case: CaseRows) -> str:
        known = row.values.get(name)
        return "-" if known is None else f"{known / row.values['output_bytes']:.1f}"

    return views.Column("x output", cell)


def _kb_per_token(result: RowsResult, row: Row) -> float | None:
    """Extra memory for each token of a rank."""
    known, batch = row.values.get("peak_bytes"), result.facts["batch"] / result.facts.get("world_size", 1)
    return None if known is None else known / 1000 / (batch * row.values["tokens"])


def speed_ups(result: RowsResult) -> Iterator[Table]:
    """Speed-ups of the first implementation over each other one, by length."""
    header = ("length", "who", "over", "speed-up", "95% interval")
    rows = tuple((str(p.x), first, other, f"{p.y:.2f}x", interval(p)) for first, other, p in _versus_first(result))
    yield Table("Speed-ups", header, rows, "Ratios of medians; intervals by resampling each side's samples.")


def _versus_first(result: RowsResult) -> Iterator[tuple[str, str, Point]]:
    """(the first, another, a bar labelled with the tokens: how many times faster the first is) of each length."""
    for _, timed in timed_lengths(result):
        for other in timed[1:]:
            yield timed[0].who, other.who, speed_up(other.case["length"], other.samples, timed[0].samples)


def timed_lengths(result: RowsResult) -> list[tuple[CaseRows, list[Row]]]:
    """The lengths at which implementations were timed, with the rows of these."""
    cases = [(case, [row for row in case.rows.values() if row.samples and row.who not in YARDSTICKS]) for case in result.cases()]
    return [(case, rows) for case, rows in cases if rows]


def drawn(result: RowsResult) -> Iterator[Plot]:
    """Time, memory and speed-ups over lengths, of one length as bars; then the roofline."""

    def extra_memory(row: Row, case: CaseRows) -> Point | None:
        return plain("", row.values["peak_bytes"]) if row.values.get("peak_bytes") else None

    def memory_of_a_token(row: Row, case: CaseRows) -> Point | None:
        known = _kb_per_token(result, row)
        return plain("", known) if known else None

    single = len(result.cases()) == 1
    for title, measure, axis in (
        ("Time of a call", views.time, views.SECONDS),
        ("Peak extra memory of a call", extra_memory, Axis("memory", "bytes")),
        ("Memory a token", memory_of_a_token, Axis("memory a token", "kb")),
    ):
        x = "{length}" if single else "tokens"
        yield from views.PlotView(title, TABLE, x, measure, (views.TOKENS, axis), "bars" if single else "lines").each(result)
    bars = ((f"{first} over {other}", point) for first, other, point in _versus_first(result))
    axes = Axis("", "tokens"), views.TIMES
    yield Plot("Speed-up, with 95% intervals", "bars", series_by_name(bars), axes, mark=1.0)
    work = [(case, moved_bytes(rows[0].values["output_bytes"], result.facts["backward"])) for case, rows in timed_lengths(result)]
    yield rows_roofline("Roofline: speed beside the measured matmul", work)


def notes(result: RowsResult) -> Iterator[str]:
    """Notes on implementations that compute another function, and on the growth of time with length."""
    differing = [row for row in result.rows if row.values.get("differs")]
    differences = ((note, f"{row.values['tokens']:,}") for row in differing for note in _difference(row))
    yield from grouped(differences, "(at {} tokens)")
    for who, (time, flops, lengths) in scaling(result).items():
        nominal = f"its nominal FLOPs ~ tokens^{flops:.2f}"
        yield f"{who}: time ~ tokens^{time:.2f}, {nominal}, fitted over {lengths} lengths"
    timed = timed_lengths(result)
    if any(row.gflops > case.rows["matmul"].values["gflops"] for case, rows in timed for row in rows if "matmul" in case.rows):
        yield "faster than the matmul beside it: other programs disturbed this run; measure again on a quiet machine"
    tokens = {row.values["tokens"] for row in result.rows if "tokens" in row.values}
    if len(tokens) > 1 and result.facts["longest_segment"] > min(tokens):
        yield "a segment longer than the sequence is the sequence: once all segments are shorter, FLOPs ~ tokens^1"


def scaling(result: RowsResult) -> dict[str, tuple[float, float, int]]:
    """Exponents of time and of FLOPs over tokens, and the number of lengths, of each implementation that has two or more."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    for _, timed in timed_lengths(result):
        for row in timed:
            points.setdefault(row.who, []).append((row.values["tokens"], row.median_s, row.values["flops"]))
    fits = {}
    for who, of_who in points.items():
        tokens, seconds, flops = zip(*of_who, strict=True)
        if len(set(tokens)) > 1:
            fits[who] = exponent(tokens, seconds), exponent(tokens, flops), len(tokens)
    return fits


def _difference(row: Row) -> Iterator[str]:
    """The function computed in place of the pattern's attention, and how far apart the two are."""
    differs = row.values["differs"]
    yield f"{row.who} computes another function: {differs['computes']}"
    far = [
        f"{what} by {differs[f'{what}_max_abs']:.2g} at most, {differs[f'{what}_relative']:.2g} of the largest value"
        for what in ("out", "dquery")
        if f"{what}_max_abs" in differs and f"{what}_relative" in differs
    ]
    if far:
        yield f"{row.who} differs from the pattern: {'; '.join(far)}"


def sentence(result: RowsResult) -> str:
    """The sentence on docs/measurements.md: the longest length at which anything was measured."""
    if not (timed := timed_lengths(result)):
        return placed(result, "nothing was measured")
    case, rows = timed[-1]
    costs = [
        f"{row.who} {in_seconds(row.median_s)} and {in_bytes(row.values.get('peak_bytes'))}"
        + " (another function)" * bool(row.values.get("differs"))
        for row in rows
    ]
    return placed(result, f"{result.facts['problem']}, {result.facts['pattern']}, {case.case['length']}: {'; '.join(costs)}")


REPORT = views.Report(
    subject=("{problem}", "{pattern}"),
    place="{device_name}, {threads} of {cores} cores in use",
    tables=(times, speed_ups),
    plots=(drawn,),
    summary=sentence,
    notes=notes,
    method=METHOD,
)
