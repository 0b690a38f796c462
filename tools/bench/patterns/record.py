"""The result of `dilkit bench --suite patterns`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Case, Measurement, SuiteResult, of_case

OURS, THREE = "dilkit", "three calls, merged"
FLEX, MASKED, RENEWED = "FlexAttention", "torch, masked", "dilkit, a new layout each call"
WINDOW, SEGMENTS = "window", "segments"


@dataclass(frozen=True, kw_only=True)
class PatternCase(Case):
    """Ways to compute one problem, or one way on several. `what`: the case among those of its kind."""

    what: str
    problems: tuple[str, ...]

    def gflops(self, name: str) -> float:
        """The nominal rate of an entry, of the median time. Raises ValueError where it was not timed."""
        return (self.entries[name].flops or 0.0) / self.seconds(name) / 1e9


@dataclass(frozen=True, kw_only=True)
class PatternsResult(SuiteResult):
    """Kinds of branches on a CPU: `OURS` beside `FLEX`, `THREE`, `MASKED` or `RENEWED`; `WINDOW` and `SEGMENTS`; two lengths."""

    KIND: ClassVar[str] = "suite-patterns"

    isa: str
    thread_count: int
    rates: tuple[PatternCase, ...] = ()
    mixes: tuple[PatternCase, ...] = ()
    windows: tuple[PatternCase, ...] = ()
    blocks: tuple[PatternCase, ...] = ()
    layouts: tuple[PatternCase, ...] = ()
    lengths: tuple[PatternCase, ...] = ()

    def titled(self) -> Iterator[tuple[str, PatternCase]]:
        """Every case, and what it is of."""
        kinds = {
            "rate": self.rates,
            "a mix": self.mixes,
            "a window": self.windows,
            "BigBird": self.blocks,
            "chosen blocks": self.layouts,
            "two lengths": self.lengths,
        }
        yield from ((f"{kind}: {case.what}", case) for kind, cases in kinds.items() for case in cases)

    def cases(self) -> list[PatternCase]:
        """Every case."""
        return [case for _, case in self.titled()]

    def measurements(self) -> Iterator[Measurement]:
        for title, case in self.titled():
            yield from of_case(title, case)
