"""The result of a run as flat rows: one row for each implementation in each case.

    {"table": "windows", "case": {"what": "causal"}, "who": "dilkit", "samples": [0.31, 0.30], "values": {"flops": 6.8e10}}

`rows_of` makes rows of what was measured, `cases_of` groups rows by their case again.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dilkit.testing.accuracy import Check
from dilkit.tools.results.record import Entry, Measurement, Result

NOTHING: Mapping[str, Any] = {}
YARDSTICKS = ("matmul", "copy", "fma")
VALUES = ("flops", "peak_bytes", "memory_bytes", "forward_peak_bytes", "memory_note")
"""Fields of an entry that a row keeps among its values, where they are known."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation, or one of `YARDSTICKS`, in one case.

    Attributes:
        table: group of cases with the same facts, such as "windows".
        case: facts that identify the case within its table, such as `{"what": "causal", "seq": 32768}`.
        verdict: "measured", "absent", "refused", "skipped", "wrong" or "failed", with its `reasons`.
        samples: seconds a call, in the order taken; a sample is the mean over `calls` calls.
        values: all other facts by name: numbers such as `flops` and `peak_bytes`, texts such as `problem`.
    """

    table: str
    case: dict[str, Any] = field(default_factory=dict)
    who: str = ""
    verdict: str = "measured"
    reasons: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    samples: tuple[float, ...] = ()
    calls: int = 1
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.samples and min(self.samples) <= 0:
            raise ValueError(f"samples: {min(self.samples)} s; all must be positive")

    @property
    def median_s(self) -> float:
        """Median of the samples, in seconds. Raises ValueError where there are none."""
        return statistics.median(self.samples)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile of the samples; both the sample where there is one."""
        if len(self.samples) < 2:
            return self.median_s, self.median_s
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def gflops(self) -> float:
        """Nominal rate: `flops` over the median, in GFLOP/s."""
        return float(self.values.get("flops") or 0.0) / self.median_s / 1e9


@dataclass(frozen=True)
class CaseRows:
    """The rows of one case by implementation, those of yardsticks among them."""

    table: str
    case: Mapping[str, Any]
    rows: dict[str, Row]

    def timed(self, *names: str) -> bool:
        """Return True if all of these implementations were right, and timed."""
        return all(name in self.rows and self.rows[name].samples for name in names)

    def ratio(self, slow: str, fast: str) -> float:
        """Return the median time of `slow` over that of `fast`."""
        return self.rows[slow].median_s / self.rows[fast].median_s

    def label(self, template: str) -> str:
        """Return `template` filled in with the facts of the case, such as "{seq:,} tokens"."""
        return template.format(**self.case)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure beside its target: the values found, and the verdict that the worst of them leads to."""

    name: str
    must: float | None
    aim: float | None = None
    unit: str = ""
    lower: bool = False
    exact: bool = False
    values: dict[str, float] = field(default_factory=dict)
    verdict: str = ""

    @property
    def worst(self) -> float | None:
        """The value that decides on the verdict."""
        return (max if self.lower else min)(self.values.values(), default=None)


@dataclass(frozen=True, kw_only=True)
class RowsResult(Result):
    """The result of a suite, or of another command that measures: one flat row for each implementation in each case.

    `quick`: number that lengths were divided by, 0 where they were not; `chosen`: options of the run; `steps`: table and words
    of every step, of which so many were `done`; `earlier`: date and revision of runs that a resumed one went on from.
    """

    KIND: ClassVar[str] = ""
    SCHEMA: ClassVar[int] = 2

    schema: int = SCHEMA
    suite: str = ""
    repeats: int = 0
    quick: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)
    steps: tuple[tuple[str, str], ...] = ()
    done: int = 0
    earlier: tuple[dict[str, Any], ...] = ()
    interrupted: bool = False
    figures: tuple[Figure, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()

    @property
    def machine(self) -> str:
        """Device, and the instruction sets if the fact `code` names them, such as "AMD EPYC, avx2"."""
        device = re.sub(r"\((R|TM)\)| CPU| Processor", "", self.environment.device_name)
        return ", ".join(filter(None, (device, self.facts.get("code"))))

    def cases(self, *tables: str, **facts: Any) -> list[CaseRows]:
        """Return the cases of these tables, or of all, that have these facts; in the order measured."""
        return cases_of(self.rows, *tables, **facts)

    def problem_facts(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.facts.items() if isinstance(value, str | int | float)}

    def measurements(self) -> Iterator[Measurement]:
        for row in self.rows:
            if row.samples:
                place = ", ".join(f"{name} {value}" for name, value in row.case.items())
                yield Measurement(f"{row.table}, {place}: {row.who}", row.samples, yardstick=row.who in YARDSTICKS)


def cases_of(rows: Iterable[Row], *tables: str, **facts: Any) -> list[CaseRows]:
    """Group rows by case: those of these tables, or of all, that have these facts.

    >>> rows = [Row(table="t", case={"seq": 8}, who=who, samples=(time,)) for who, time in (("a", 3.0), ("b", 2.0))]
    >>> [case.ratio("a", "b") for case in cases_of(rows, "t", seq=8)]
    [1.5]
    """
    groups: dict[str, CaseRows] = {}
    for row in rows:
        if (not tables or row.table in tables) and all(row.case.get(name) == value for name, value in facts.items()):
            group = groups.setdefault(f"{row.table} {row.case}", CaseRows(row.table, row.case, {}))
            group.rows[row.who] = row
    return list(groups.values())


def rows_of(
    table: str, case: Mapping[str, Any], measured: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]] = NOTHING
) -> list[Row]:
    """Return the rows of one case as it was measured (`CaseFields`), with more `values` of each implementation, by name."""
    rows = []
    for name in YARDSTICKS:
        if one := measured.get(name):
            samples = dict(samples=one.time.samples_s, calls=one.time.calls_per_sample)
            rows.append(Row(table=table, case=dict(case), who=name, values=one.values, **samples))
    return rows + [row_of(table, case, who, entry, **values.get(who, {})) for who, entry in measured["entries"].items()]


def row_of(table: str, case: Mapping[str, Any], who: str, entry: Entry, **values: Any) -> Row:
    """Return the row of one implementation, with more `values`."""
    known = {name: value for name in VALUES if (value := getattr(entry, name)) is not None}
    return Row(
        table=table, case=dict(case), who=who, verdict=entry.verdict, reasons=entry.reasons, checks=entry.check,
        samples=entry.seconds, calls=entry.time.calls_per_sample if entry.time else 1, values=known | values,
    )  # fmt: skip
