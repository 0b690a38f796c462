"""A target: what a figure must be, what is aimed at, and how it is read out of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from dilkit.tools.results.record import Figure, Result

MIB, GIB = 2**20, 2**30
R = TypeVar("R", bound=Result)
Values = Mapping[str, float]
"""The values of a figure by what they are of, such as a head_dim; the worst one decides on the verdict."""


def _always(result: Result) -> str | None:
    return None


@dataclass(frozen=True)
class Target(Generic[R]):
    """A figure with the least that it must be and what is aimed at; the most, where `lower`.

    `missing(result)` is why this machine cannot show it, or None. `exact`: the figure does not depend on the machine, so
    that falling short is an error.
    """

    name: str
    must: float | None
    aim: float | None
    read: Callable[[R], Values]
    unit: str = "x"
    lower: bool = False
    exact: bool = False
    missing: Callable[[R], str | None] = _always

    def judge(self, result: R) -> Figure:
        """The figure of `result`."""
        values = dict(self.read(result))
        figure = Figure(
            name=self.name, must=self.must, aim=self.aim, unit=self.unit, lower=self.lower, exact=self.exact, values=values
        )
        return _with_verdict(figure, self.missing(result))


def least(pairs: Iterable[tuple[str, float]]) -> Values:
    """The least of the values that have the same name."""
    lowest: dict[str, float] = {}
    for name, value in pairs:
        lowest[name] = min(value, lowest.get(name, value))
    return lowest


def _with_verdict(figure: Figure, missing: str | None) -> Figure:
    if missing:
        return replace(figure, verdict=f"not measurable here: {missing}")
    if figure.worst is None:
        return replace(figure, verdict="not measured")
    return replace(figure, verdict=verdict(figure.worst, figure))


def verdict(worst: float, figure: Figure) -> str:
    """ "aim met", "met" or "short"."""

    def reached(limit: float | None) -> bool:
        return limit is not None and (worst <= limit if figure.lower else worst >= limit)

    return "aim met" if reached(figure.aim) else "met" if reached(figure.must) else "short"
