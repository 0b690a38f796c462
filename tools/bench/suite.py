"""A suite: a fixed set of measurements that is run as a whole, by `dilkit bench --suite NAME`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.target import Target
from dilkit.tools.results.rows import ResultRow, RowsResult

NO_OPTION = {"option": False}
"""Metadata of a field of a suite that no option of `dilkit bench` sets."""


@dataclass(frozen=True)
class SuiteStep:
    """One measurement: `measure` returns rows of `table`; `what` is shown by the progress bar; `weight`: time, in any unit."""

    table: str
    what: str
    measure: Callable[[], Iterable[ResultRow]]
    weight: float = 1.0


@dataclass(frozen=True)
class SuiteSizes:
    """Sizes of a suite, by default those of published results; --quick divides by `divisor`; `threads`: at most, on a CPU."""

    divisor: int = 32
    threads: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Suite(ABC):
    """The measurements of a suite; a field without `NO_OPTION` is an option of `dilkit bench`.

    Faults of `PEERS`, and failures of `MAY_FAIL`, are no errors. A suite with a `budget`, in seconds, skips calls beyond it.
    """

    NAME: ClassVar[str]
    SUMMARY: ClassVar[str]
    TARGETS: ClassVar[tuple[Target, ...]] = ()
    MAY_FAIL: ClassVar[tuple[str, ...]] = ()
    PEERS: ClassVar[tuple[str, ...]] = ()

    quick: bool = False
    repeats: int = 5
    sizes: SuiteSizes = field(default_factory=SuiteSizes, metadata=NO_OPTION)

    @property
    def divisor(self) -> int:
        return self.sizes.divisor if self.quick else 1

    @abstractmethod
    def steps(self) -> Iterator[SuiteStep]:
        """Yield the measurements, in the order in which they are taken."""

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        """Let the suite run in this context, on at most `sizes.threads`; it yields facts for the result."""
        if self.sizes.threads is None:
            yield {}
            return
        from dilkit.backends.native.backend import instruction_set

        with torch_threads(min(self.sizes.threads, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count)

    def figures(self, result: RowsResult) -> tuple[Any, ...]:
        return tuple(target.judge(result) for target in self.TARGETS)

    @classmethod
    def kind(cls) -> str:
        return f"suite-{cls.NAME}"

    def where(self) -> str:
        """Return the device that is measured, such as "cpu" or "cuda:1"."""
        return "cpu"

    def wrong(self, result: RowsResult) -> bool:
        """True if a check failed, so that the command ends with exit code 1."""
        ours = [row for row in result.rows if row.who not in self.PEERS]
        if any(row.verdict == "wrong" or (row.verdict == "failed" and row.who not in self.MAY_FAIL) for row in ours):
            return True
        return any(figure.exact and figure.verdict == "short" for figure in result.figures)
