"""A target: what a figure must be, what is aimed at, and how it is read out of a result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dilkit.tools.results.rows import CaseRows, Figure, RowsResult

MIB, GIB = 2**20, 2**30
Values = Mapping[str, float]
"""The values of a figure by what they are of, such as a head_dim; the worst one decides on the verdict."""


@dataclass(frozen=True)
class Target:
    """A figure with the least that it must be and what is aimed at; the most, where `lower`.

    `missing(result)` is why this machine cannot show it, or None. Falling short of an `exact` one is an error on any machine.
    """

    name: str
    must: float | None
    aim: float | None
    read: Callable[[RowsResult], Values]
    unit: str = "x"
    lower: bool = False
    exact: bool = False
    missing: Callable[[RowsResult], str | None] = lambda result: None

    def judge(self, result: RowsResult) -> Figure:
        """Return the figure of this target for `result`."""
        limits: dict[str, Any] = {name: getattr(self, name) for name in ("name", "must", "aim", "unit", "lower", "exact")}
        figure = Figure(**limits, values=dict(self.read(result)))
        worst = figure.worst

        def reached(limit: float | None) -> bool:
            return limit is not None and worst is not None and (worst <= limit if self.lower else worst >= limit)

        if missing := self.missing(result):
            verdict = f"not measurable here: {missing}"
        elif worst is None:
            verdict = "not measured"
        else:
            verdict = "aim met" if reached(self.aim) else "met" if reached(self.must) else "short"
        return replace(figure, verdict=verdict)


def each(
    tables: str | tuple[str, ...],
    measure: Callable[[CaseRows], float | None],
    name: str = "{what}",
    combine: Callable[[list[float]], float] | None = None,
    **facts: Any,
) -> Callable[[RowsResult], Values]:
    """Read `measure` of the cases of tables that have these facts; None is left out.

    Each is named by the template `name`. Of values that have the same name, the last counts, or what `combine` makes of all.
    """

    def read(result: RowsResult) -> Values:
        values: dict[str, list[float]] = {}
        for case in result.cases(*([tables] if isinstance(tables, str) else tables), **facts):
            if (value := measure(case)) is not None:
                values.setdefault(case.label(name), []).append(value)
        return {label: combine(of_label) if combine else of_label[-1] for label, of_label in values.items()}

    return read


def stored(who: str, names: tuple[str, ...], figure: Callable[..., float]) -> Callable[[CaseRows], float | None]:
    """Measure a case by a figure of these values of an implementation; None where one is unknown."""

    def measure(case: CaseRows) -> float | None:
        values = [_value(case, who, name) for name in names]
        return None if None in values else figure(*values)

    return measure


def time_ratio(table: str, slow: str, fast: str, name: str = "{what}", **facts: Any) -> Callable[[RowsResult], Values]:
    """Read the median time of `slow` over that of `fast`, by case, where both were timed."""
    return each(table, lambda case: case.ratio(slow, fast) if case.timed(slow, fast) else None, name, **facts)


def rate_ratio(table: str, above: str, below: str, name: str = "{what}", **facts: Any) -> Callable[[RowsResult], Values]:
    """Read the nominal rate of `above` over that of `below`, by case, where both were timed."""

    def ratio(case: CaseRows) -> float | None:
        return case.rows[above].gflops / case.rows[below].gflops if case.timed(above, below) else None

    return each(table, ratio, name, **facts)


def memory_ratio(table: str, large: str, small: str, name: str = "{what}", **facts: Any) -> Callable[[RowsResult], Values]:
    """Read the peak memory of `large` over that of `small`, by case, where both are known."""

    def ratio(case: CaseRows) -> float | None:
        above, below = _value(case, large, "peak_bytes"), _value(case, small, "peak_bytes")
        return above / below if above and below else None

    return each(table, ratio, name, **facts)


def _value(case: CaseRows, who: str, name: str) -> Any:
    return case.rows[who].values.get(name) if who in case.rows else None
