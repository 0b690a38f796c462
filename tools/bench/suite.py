"""A suite: a fixed set of measurements that is run as a whole, by `dilkit bench --suite NAME`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.target import Target
from dilkit.tools.results.rows import Row, RowsResult

NO_OPTION = {"option": False}
"""Metadata of a field of a suite that no option of `dilkit bench` sets."""


@dataclass(frozen=True)
class SuiteStep:
    """One measurement.

    Attributes:
        table: table that its rows are of.
        what: words that the progress bar and `--rows` show.
        measure: function that measures and returns the rows.
        weight: time that it takes beside the other steps, in any unit.
    """

    table: str
    what: str
    measure: Callable[[], Iterable[Row]]
    weight: float = 1.0


@dataclass(frozen=True)
class SuiteSizes:
    """Sizes of the cases of a suite: by default, those of published results.

    --quick divides lengths by `divisor`. A suite of a CPU computes on at most so many `threads`.
    """

    divisor: int = 32
    threads: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Suite(ABC):
    """The measurements of a suite, of cases of these `sizes`. `quick`: at lengths divided by `sizes.divisor`; `repeats`: samples,
    fewer where calls are long; `budget`: seconds that one call may be expected to take.

    A field besides these is an option of `dilkit bench` that goes with this suite alone, unless its metadata are `NO_OPTION`.
    """

    NAME: ClassVar[str]
    SUMMARY: ClassVar[str]
    TARGETS: ClassVar[tuple[Target, ...]] = ()
    MAY_FAIL: ClassVar[tuple[str, ...]] = ()
    """Implementations whose failure is no error: others' that need more memory, or a compiler."""
    PEERS: ClassVar[tuple[str, ...]] = ()
    """Implementations of others: what they do wrong is reported, and is no error."""

    quick: bool = False
    repeats: int = 5
    budget: float = 45.0
    sizes: SuiteSizes = field(default_factory=SuiteSizes, metadata=NO_OPTION)

    @property
    def divisor(self) -> int:
        """The number that lengths are divided by."""
        return self.sizes.divisor if self.quick else 1

    @abstractmethod
    def steps(self) -> Iterator[SuiteStep]:
        """The measurements, in the order in which they are taken."""

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        """Within this context the suite can run. It yields facts for the result."""
        return nullcontext({}) if self.sizes.threads is None else _on_threads(self.sizes.threads)

    def figures(self, result: RowsResult) -> tuple[Any, ...]:
        """The figures of `result`, which are part of it."""
        return tuple(target.judge(result) for target in self.TARGETS)

    @classmethod
    def kind(cls) -> str:
        """The kind of its results."""
        return f"suite-{cls.NAME}"

    def where(self) -> str:
        """The device that is measured, such as "cpu" or "cuda:1"."""
        return "cpu"

    def wrong(self, result: RowsResult) -> bool:
        """True if a check failed, so that the command ends with exit code 1."""
        ours = [row for row in result.rows if row.who not in self.PEERS]
        if any(row.verdict == "wrong" or (row.verdict == "failed" and row.who not in self.MAY_FAIL) for row in ours):
            return True
        return any(figure.exact and figure.verdict == "short" for figure in result.figures)


@contextmanager
def _on_threads(most: int) -> Iterator[dict[str, Any]]:
    """Compute on at most so many threads within this context; it yields their number and the instruction set."""
    from dilkit.backends.native.backend import instruction_set

    with torch_threads(min(most, usable_cores())) as count:
        yield dict(isa=instruction_set(), thread_count=count)
