"""`dilkit bench` on a problem of one's own: implementations over lengths, as rows and in words."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report import views
from dilkit.tools.report.document import Plot, Table
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import grouped, speed_up
from dilkit.tools.results.file import new_result
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, Row, RowsResult, rows_of
from dilkit.tools.results.statistics import exponent

if TYPE_CHECKING:
    from dilkit.tools.measure.implementation import Implementation

KIND, TABLE = "bench", "call"


def measure(
    longest: Problem, lengths: Sequence[int], implementations: Sequence[Implementation], repeats: int, budget: float
) -> RowsResult:
    """Measure all lengths, shortest first; after Ctrl-C the result has those before it."""
    from tqdm import tqdm

    from dilkit.tools.measure.case import CaseRunner

    rows: list[Row] = []
    runner, done = CaseRunner(implementations, repeats, budget=budget), 0
    with tqdm(lengths, unit="length", file=sys.stderr, disable=None) as bar, contextlib.suppress(KeyboardInterrupt):
        for seq in bar:
            problem = replace(longest, seq=seq)
            rows += call_rows(problem, runner.run(problem))
            done += 1
    facts = facts_of(longest) | dict(min_time_s=runner.min_time, budget_s=budget)
    fields: dict[str, Any] = dict(repeats=repeats, facts=facts, rows=tuple(rows), interrupted=done < len(lengths))
    return new_result(RowsResult, longest.device, kind=KIND, **fields)


def facts_of(problem: Problem) -> dict[str, Any]:
    """Return facts of the result: the problem in words, but for its length."""
    return dict(
        problem=problem_text(problem), pattern=str(problem.pattern), scale=problem.scale, batch=problem.batch,
        backward=problem.requires_grad,
    )  # fmt: skip


def problem_text(problem: Problem, tokens: str = "tokens") -> str:
    """Return the passes and the sizes without the pattern, such as "forward, 1 x tokens x 8 heads x 64, float32, causal"."""
    heads = f"{problem.heads} heads" + (f" over {problem.kv_heads}" if problem.kv_heads != problem.heads else "")
    flags = f"{', causal' * problem.is_causal}{', masked' * problem.key_padding_mask}"
    passes = "forward + backward" if problem.requires_grad else "forward"
    return f"{passes}, {problem.batch} x {tokens} x {heads} x {problem.head_dim}, {problem.dtype}{flags}"


def call_rows(problem: Problem, measured: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one length: the fields of a case as they were measured."""
    from dilkit.tools.measure.case import output_bytes

    values: dict[str, dict[str, Any]] = {}
    for who, entry in measured["entries"].items():
        values[who] = dict(tokens=problem.seq, output_bytes=output_bytes(problem)) | (entry.ranks or {})
        if entry.differs:
            values[who]["differs"] = entry.differs
    return rows_of(TABLE, dict(length=f"{problem.seq:,} tokens"), measured, values)


def times(result: RowsResult, more: tuple[views.Column, ...] = ()) -> Iterator[Table]:
    """Make a row for every measured implementation; with the forward pass's memory where a call is more than that."""
    batch, world_size = result.facts["batch"], result.facts.get("world_size", 1)

    def who(row: Row, case: CaseRows) -> str:
        return f"{row.who} (differs)" if row.values.get("differs") else row.who

    def tokens_per_s(row: Row, case: CaseRows) -> str:
        return f"{batch * row.values['tokens'] / row.median_s:,.0f}"

    def kb_per_token(row: Row, case: CaseRows) -> str:
        known = row.values.get("peak_bytes")
        return "-" if known is None else f"{known / 1000 / (batch / world_size * row.values['tokens']):.2f}"

    def memory(name: str, header: str) -> tuple[views.Column, views.Column]:
        def in_outputs(row: Row, case: CaseRows) -> str:
            known = row.values.get(name)
            return "-" if known is None else f"{known / row.values['output_bytes']:.1f}"

        return views.value(name, header, "bytes"), views.Column("x output", in_outputs)

    columns = (
        *(views.fact("tokens", template="{:,}"), views.Column("who", who), views.TIME, views.QUARTILES),
        *(views.Column("GFLOP/s", lambda row, case: f"{row.gflops:,.1f}"), views.OF_MATMUL),
        *(views.Column("tokens/s", tokens_per_s), views.Column("kB/token", kb_per_token)),
        *memory("peak_bytes", "extra memory"),
        *(memory("forward_peak_bytes", "of forward") if result.facts["backward"] else ()),
        *more,
    )
    yield views.TableView("Time and memory", TABLE, columns).made(result)


def speed_ups(result: RowsResult) -> Iterator[Table]:
    """Make a table of speed-ups of the first implementation over each other one, by length."""
    rows = []
    for case, (first, *others) in timed_lengths(result):
        for other in others:
            ratio = speed_up("", other.samples, first.samples)
            interval = f"{ratio.low:.2f}x - {ratio.high:.2f}x"
            rows.append((case.case["length"], first.who, other.who, f"{ratio.y:.2f}x", interval))
    header = ("length", "who", "over", "speed-up", "95% interval")
    yield Table("Speed-ups", header, tuple(rows), "Ratios of medians; intervals by resampling each side's samples.")


def timed_lengths(result: RowsResult) -> list[tuple[CaseRows, list[Row]]]:
    """Return the lengths at which implementations were timed, with the rows of these."""
    cases = []
    for case in result.cases():
        if rows := [row for row in case.rows.values() if row.samples and row.who not in YARDSTICKS]:
            cases.append((case, rows))
    return cases


def drawn(result: RowsResult) -> Iterator[Plot]:
    """Draw time and memory over lengths, of one length as bars."""
    single = len(result.cases()) == 1
    for title, measure, axis in (
        ("Time of a call", views.time, views.SECONDS),
        ("Peak extra memory of a call", views.stored("peak_bytes"), views.BYTES),
    ):
        x = "{length}" if single else "tokens"
        yield from views.PlotView(title, TABLE, x, measure, (views.TOKENS, axis), "bars" if single else "lines").each(result)


def notes(result: RowsResult) -> Iterator[str]:
    """Yield notes on implementations that compute another function, and on the growth of time with length."""
    differing = [row for row in result.rows if row.values.get("differs")]
    differences = ((note, f"{row.values['tokens']:,}") for row in differing for note in _difference(row))
    yield from grouped(differences, "(at {} tokens)")
    for who, (time, flops, lengths) in scaling(result).items():
        nominal = f"its nominal FLOPs ~ tokens^{flops:.2f}"
        yield f"{who}: time ~ tokens^{time:.2f}, {nominal}, fitted over {lengths} lengths"
    timed = timed_lengths(result)
    if any(row.gflops > case.rows["matmul"].values["gflops"] for case, rows in timed for row in rows if "matmul" in case.rows):
        yield "faster than the matmul beside it: other programs disturbed this run; measure again on a quiet machine"


def scaling(result: RowsResult) -> dict[str, tuple[float, float, int]]:
    """Return exponents of time and FLOPs over tokens, and the number of lengths, of each that was timed at two or more."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    for _, timed in timed_lengths(result):
        for row in timed:
            points.setdefault(row.who, []).append((row.values["tokens"], row.median_s, row.values["flops"]))
    fits = {}
    for who, of_who in points.items():
        tokens, seconds, flops = zip(*of_who, strict=True)
        if len(tokens) > 1:
            fits[who] = exponent(tokens, seconds), exponent(tokens, flops), len(tokens)
    return fits


def _difference(row: Row) -> Iterator[str]:
    """Yield the function computed in place of the pattern's attention, and how far apart the two are."""
    differs = row.values["differs"]
    yield f"{row.who} computes another function: {differs['computes']}"
    far = [
        f"{what} by {differs[f'{what}_max_abs']:.2g} at most, {differs[f'{what}_relative']:.2g} of the largest value"
        for what in ("out", "dquery")
        if f"{what}_max_abs" in differs
    ]
    yield f"{row.who} differs from the pattern: {'; '.join(far)}"


def sentence(result: RowsResult) -> str:
    """Return the sentence on docs/measurements.md: the longest length at which anything was measured."""
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
    method="Medians of {repeats} samples of at least {min_time_s:g} s, taken in interleaved rounds; each implementation was "
    "checked against fp64 arithmetic just before. GFLOP/s count the nominal FLOPs of what an implementation computes, and are "
    "compared with a square matmul timed in the same rounds. Extra memory is the peak over what was held before the call, its "
    "result included; one output is batch x tokens x heads x head_dim.",
)
