"""The result of a run as flat rows: one row for each implementation in each case.

{"table": "windows", "case": {"what": "causal"}, "who": "dilkit", "samples": [0.31, 0.30], "values": {"flops": 6.8e10}}
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dilkit.testing.check import Check
from dilkit.tools.results.environment import Result

NOTHING: Mapping[str, Any] = {}
YARDSTICKS = ("matmul", "copy", "fma")


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One implementation, or one of `YARDSTICKS`, in one case.

    Attributes:
        table: group of cases with the same facts, such as "windows"; `rows_of` fills it, `case` and `who` in.
        case: facts that identify the case within its table, such as `{"what": "causal", "seq": 32768}`.
        verdict: "measured", "absent" (not installed), "refused", "skipped" (over the budget), "wrong" (a check failed) or
            "failed" (raised), with its `reasons`. Only a measured one has samples.
        samples: seconds a call, in the order taken; a sample is the mean over `calls` calls.
        values: all other facts by name. `flops`: the nominal ones of what is computed; `peak_bytes`: beyond the inputs, while
            `memory_bytes` count them too, or a `memory_note`; `differs`: another function that is computed, and how far it is
            from the pattern's attention; texts such as `problem`.
    """

    table: str = ""
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

    def timed(self, time: ResultRow) -> ResultRow:
        return replace(self, samples=time.samples, calls=time.calls)

    def knowing(self, **values: Any) -> ResultRow:
        """Return the row with more values, but for those that are None."""
        return replace(self, values=self.values | {name: value for name, value in values.items() if value is not None})

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


Entries = dict[str, ResultRow]


@dataclass(frozen=True)
class CaseRows:
    """The rows of one case by implementation, those of yardsticks among them."""

    table: str
    case: Mapping[str, Any]
    rows: dict[str, ResultRow]

    def timed(self, *names: str) -> bool:
        """Return True if all of these implementations were right, and timed."""
        return all(name in self.rows and self.rows[name].samples for name in names)

    def ratio(self, slow: str, fast: str) -> float:
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
    rows: tuple[ResultRow, ...] = ()

    def cases(self, *tables: str, **facts: Any) -> list[CaseRows]:
        """Return the cases of these tables, or of all, that have these facts; in the order measured."""
        return cases_of(self.rows, *tables, **facts)


def cases_of(rows: Iterable[ResultRow], *tables: str, **facts: Any) -> list[CaseRows]:
    """Group rows by case: those of these tables, or of all, that have these facts.

    >>> rows = [ResultRow(table="t", case={"seq": 8}, who=who, samples=(time,)) for who, time in (("a", 3.0), ("b", 2.0))]
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
) -> list[ResultRow]:
    """Return the rows of one case as it was measured (`CaseFields`), with more `values` of each implementation, by name."""
    rows = {name: measured[name] for name in YARDSTICKS if measured.get(name)} | measured["entries"]
    return [row_of(table, case, who, row, **values.get(who, {})) for who, row in rows.items()]


def row_of(table: str, case: Mapping[str, Any], who: str, row: ResultRow, **values: Any) -> ResultRow:
    return replace(row, table=table, case=dict(case), who=who, values=row.values | values)
