"""The result of `dilkit bench --suite scores`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Case, Measurement, SuiteResult, of_case

PLAIN, ALIBI, COORDINATES, TABLE = "no bias", "ALiBi", "2-D ALiBi", "table"
OURS, MATRIX, GIVEN, EAGER = "dilkit", "torch, full matrix", "torch, matrix made before", "torch, eager"


@dataclass(frozen=True, kw_only=True)
class ScoresCase(Case):
    """Ways to compute one problem, or one way with biases of several kinds. `what`: the case among those of its kind."""

    what: str
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScoresResult(SuiteResult):
    """Biases on a CPU: of each kind beside `PLAIN`; `OURS` beside `MATRIX` and `GIVEN`, or `EAGER`."""

    KIND: ClassVar[str] = "suite-scores"

    isa: str
    thread_count: int
    kinds: tuple[ScoresCase, ...] = ()
    tiles: tuple[ScoresCase, ...] = ()
    layers: tuple[ScoresCase, ...] = ()

    def titled(self) -> Iterator[tuple[str, ScoresCase]]:
        """Every case, and what it is of."""
        kinds = {"biases": self.kinds, "a slide": self.tiles, "a layer": self.layers}
        yield from ((f"{kind}: {case.what}", case) for kind, cases in kinds.items() for case in cases)

    def cases(self) -> list[ScoresCase]:
        """Every case."""
        return [case for _, case in self.titled()]

    def measurements(self) -> Iterator[Measurement]:
        for title, case in self.titled():
            yield from of_case(title, case)
