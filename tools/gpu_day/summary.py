"""The figures of a GPU day, beside what they must be."""

from __future__ import annotations

from dataclasses import replace

from dilkit.tools.bench.gpu import GpuSuite
from dilkit.tools.bench.target import Target, Values
from dilkit.tools.gpu_day.record import GpuDayResult
from dilkit.tools.results.decode import decode, encode
from dilkit.tools.results.rows import RowsResult


def summed(result: GpuDayResult) -> GpuDayResult:
    """`result` with the suite as a whole, and with its figures."""
    parts = [step.found.suite for step in result.steps if step.found.suite is not None]
    own = tuple(target.judge(result) for target in TARGETS)
    if not parts:
        return replace(result, figures=own)
    wholes = [decode(RowsResult, part) for part in parts]
    suite = replace(wholes[-1], rows=tuple(row for whole in wholes for row in whole.rows))
    return replace(result, suite=encode(suite), figures=(*own, *GpuSuite().figures(suite)))


def _numbers(result: GpuDayResult, step: str, number: str) -> dict[str, float]:
    """A number of all findings of the steps whose names begin so, by what was looked at."""
    steps = [one for one in result.of("correctness") if one.name.startswith(step)]
    return {f.what: f.numbers[number] for one in steps for f in one.found.findings if number in f.numbers}


def _wrong(result: GpuDayResult) -> Values:
    return {**_numbers(result, "verify", "wrong"), **_numbers(result, "torch", "wrong")}


def _ratios(result: GpuDayResult) -> Values:
    return {choice.problem: choice.ratio for choice in result.choices if choice.ratio is not None}


def _first_call(result: GpuDayResult) -> Values:
    return {what: seconds for what, seconds in _numbers(result, "first call", "seconds").items() if "proof" not in what}


def _no_gpu(result: GpuDayResult) -> str | None:
    return "a rehearsal" if result.rehearsal else None


TARGETS: tuple[Target[GpuDayResult], ...] = (
    Target("verify: wrong results", 0, 0, _wrong, "", lower=True, exact=True, missing=_no_gpu),
    Target(
        "the automatic choice over the fastest that is able, worst of the sweep", 1.15, 1.05, _ratios, lower=True, missing=_no_gpu
    ),
    Target("first call, its kernels compiled", 10, 3, _first_call, " s", lower=True, missing=_no_gpu),
)
