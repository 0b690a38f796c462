"""`dilkit bench` on a custom problem: implementations over lengths, as rows and in words."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report import views
from dilkit.tools.report.document import Plot, Table
from dilkit.tools.report.headline import placed
from dilkit.tools.results.file import new_result
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, ResultRow, RowsResult, rows_of

if TYPE_CHECKING:
    from dilkit.tools.measure.implementation import Implementation

KIND, TABLE = "bench", "call"


def measure(
    longest: Problem, lengths: Sequence[int], implementations: Sequence[Implementation], repeats: int, budget: float
) -> RowsResult:
    """Measure all lengths, shortest first; after Ctrl-C the result has those before it."""
    from tqdm import tqdm

    from dilkit.tools.measure.case import CaseRunner, output_bytes

    rows: list[ResultRow] = []
    runner, done = CaseRunner(implementations, repeats, budget=budget), 0
    with tqdm(lengths, unit="length", file=sys.stderr, disable=None) as bar, contextlib.suppress(KeyboardInterrupt):
        for seq in bar:
            problem = replace(longest, seq=seq)
            measured, values = runner.run(problem), dict(tokens=seq, output_bytes=output_bytes(problem))
            length = dict(length=f"{seq:,} tokens")
            rows += rows_of(TABLE, length, measured, dict.fromkeys(measured["entries"], values))
            done += 1
    facts = dict(problem=problem_text(longest), pattern=str(longest.pattern), scale=longest.scale, batch=longest.batch)
    facts |= dict(backward=longest.requires_grad, min_time_s=runner.min_time, budget_s=budget)
    fields: dict[str, Any] = dict(repeats=repeats, facts=facts, rows=tuple(rows), interrupted=done < len(lengths))
    return new_result(RowsResult, longest.device, kind=KIND, **fields)


def problem_text(problem: Problem, tokens: str = "tokens") -> str:
    """Return the passes and the sizes without the pattern, such as "forward, 1 x tokens x 8 heads x 64, float32, causal"."""
    heads = f"{problem.heads} heads" + (f" over {problem.kv_heads}" if problem.kv_heads != problem.heads else "")
    flags = f"{', causal' * problem.is_causal}{', masked' * problem.key_padding_mask}"
    passes = "forward + backward" if problem.requires_grad else "forward"
    return f"{passes}, {problem.batch} x {tokens} x {heads} x {problem.head_dim}, {problem.dtype}{flags}"


def times(result: RowsResult) -> Iterator[Table]:
    """Make a row for every measured implementation, with the speed-up of the first one over it."""
    first = next((rows[0].who for _, rows in timed_lengths(result)), "")

    def who(row: ResultRow, case: CaseRows) -> str:
        return f"{row.who} (differs)" if row.values.get("differs") else row.who

    batch = result.facts["batch"]
    columns = (
        *(views.fact("tokens", template="{:,}"), views.Column("who", who), views.TIME, views.QUARTILES),
        views.times_faster(first, f"speed-up of {first}"),
        views.Column("tokens/s", lambda row, case: f"{batch * row.values['tokens'] / row.median_s:,.0f}"),
        *(views.Column("GFLOP/s", lambda row, case: f"{row.gflops:,.1f}"), views.OF_MATMUL),
        views.value("peak_bytes", "extra memory", "bytes"),
    )
    yield views.ResultTable("Time and memory", TABLE, columns).made(result)


def timed_lengths(result: RowsResult) -> list[tuple[CaseRows, list[ResultRow]]]:
    """Return the lengths at which implementations were timed, with the rows of these."""
    timed = [(case, [one for one in case.rows.values() if one.samples and one.who not in YARDSTICKS]) for case in result.cases()]
    return [(case, rows) for case, rows in timed if rows]


def drawn(result: RowsResult) -> Iterator[Plot]:
    single = len(result.cases()) == 1
    for title, measure, axis in (
        ("Time of a call", views.time, views.SECONDS),
        ("Peak extra memory of a call", views.stored("peak_bytes"), views.BYTES),
    ):
        x = "{length}" if single else "tokens"
        yield from views.PlotView(title, TABLE, x, measure, (views.TOKENS, axis), "bars" if single else "lines").each(result)


def notes(result: RowsResult) -> Iterator[str]:
    """Yield notes on implementations that compute another function, and on a run that was disturbed."""
    differing = {row.who: row.values["differs"]["computes"] for row in result.rows if row.values.get("differs")}
    yield from (f"{who} computes another function: {computes}" for who, computes in differing.items())
    timed = timed_lengths(result)
    if any(row.gflops > case.rows["matmul"].values["gflops"] for case, rows in timed for row in rows if "matmul" in case.rows):
        yield "faster than the matmul beside it: other programs disturbed this run; measure again on a quiet machine"


def sentence(result: RowsResult) -> str:
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
    tables=(times,),
    plots=(drawn,),
    summary=sentence,
    notes=notes,
    method="Medians of {repeats} samples of at least {min_time_s:g} s, taken in interleaved rounds; each implementation was "
    "checked against fp64 arithmetic just before. GFLOP/s count the nominal FLOPs of what an implementation computes, and are "
    "compared with a square matmul timed in the same rounds. Extra memory is the peak over what was held before the call, its "
    "result included. Speed-ups are ratios of medians, with 95% intervals by resampling each side's samples.",
)
