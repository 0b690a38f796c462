"""The result of `dilkit bench --suite cpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Case, Entry, Measurement, Samples, SuiteResult, of_case


@dataclass(frozen=True, kw_only=True)
class CpuCase(Case):
    """Implementations on one of the configurations A to D."""

    config: str
    seq: int
    head_dim: int
    is_causal: bool
    backward: bool

    @property
    def title(self) -> str:
        """Such as "A, d=64, causal, backward"."""
        flags = ("causal" if self.is_causal else "", "backward" if self.backward else "")
        return ", ".join(filter(None, (self.config, f"d={self.head_dim}", *flags)))


@dataclass(frozen=True, kw_only=True)
class DimCase(Case):
    """Implementations, dtypes or numbers of threads, by name, on configuration A."""

    head_dim: int
    threads: int | None = None
    isa: str | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a forward pass on configuration A holds beyond out and lse; None where `why` they cannot be measured."""

    head_dim: int
    scratch_bytes: int | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class InnerLoops:
    """One thread: dense attention of the kernel beside multiply-adds in registers."""

    head_dim: int
    isa: str
    fma_gflops: float
    tile_gflops: float
    entries: dict[str, Samples]


@dataclass(frozen=True, kw_only=True)
class Million:
    """One forward pass of a million tokens, and the bytes of inputs, results and scratch."""

    seq: int
    entry: Entry
    time: Samples
    gflops: float
    held_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class CpuResult(SuiteResult):
    """The CPU kernel beside torch's own kernels, matmul, dense attention and LongNet's published procedure."""

    KIND: ClassVar[str] = "suite"

    isa: str
    thread_count: int
    cases: tuple[CpuCase, ...] = ()
    dense: tuple[DimCase, ...] = ()
    dtypes: tuple[DimCase, ...] = ()
    threads: tuple[DimCase, ...] = ()
    memory: tuple[Memory, ...] = ()
    inner_loops: tuple[InnerLoops, ...] = ()
    million: tuple[Million, ...] = ()

    def measurements(self) -> Iterator[Measurement]:
        for case in self.cases:
            yield from of_case(case.title, case)
        for name in ("dense", "dtypes", "threads"):
            for step in getattr(self, name):
                yield from of_case(f"{name}, d={step.head_dim}", step)
        for loops in self.inner_loops:
            for what, samples in loops.entries.items():
                yield Measurement(f"inner loops, d={loops.head_dim}: {what}", samples.samples_s)
        for million in self.million:
            yield Measurement(f"{million.seq:,} tokens: native", million.time.samples_s)
