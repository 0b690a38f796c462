"""The result of `dilkit bench --suite cpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from dilkit.environment import BF16_SETS
from dilkit.tools.bench.cpu.measured import (
    CpuCase,
    DimCase,
    FewCase,
    GridCase,
    HeadCase,
    Idle,
    InnerLoops,
    Memory,
    Million,
    SlideCase,
    title_of,
)
from dilkit.tools.bench.slides import listed
from dilkit.tools.results.record import Case, Measurement, SuiteResult, of_case

SHARED = 1.32
"""A's nominal FLOPs over those that are left where a key of several branches is scored once."""


@dataclass(frozen=True, kw_only=True)
class CpuResult(SuiteResult):
    """The CPU kernel beside torch's own kernels, multiply-adds, dense attention and LongNet's published procedure.

    `isa` is the kernel's instruction set, `torch_isa` the one that torch names as its own. `beside`: the results of other
    machines (another CPU, or another instruction set of the same), which reports show as further columns. A file of one run
    has none; `dilkit bench --suite cpu --merge` puts them there. So one file holds all of a table, each machine's result in it
    is whole, and a file with one machine is read as ever.
    """

    KIND: ClassVar[str] = "suite"

    isa: str
    torch_isa: str = ""
    thread_count: int
    one_head: tuple[HeadCase, ...] = ()
    cases: tuple[CpuCase, ...] = ()
    dense: tuple[DimCase, ...] = ()
    dtypes: tuple[DimCase, ...] = ()
    threads: tuple[DimCase, ...] = ()
    memory: tuple[Memory, ...] = ()
    inner_loops: tuple[InnerLoops, ...] = ()
    million: tuple[Million, ...] = ()
    few: tuple[FewCase, ...] = ()
    grids: tuple[GridCase, ...] = ()
    masked: tuple[GridCase, ...] = ()
    encoder: tuple[SlideCase, ...] = ()
    idle: tuple[Idle, ...] = ()
    beside: tuple[CpuResult, ...] = ()

    @property
    def code(self) -> str:
        """The instruction sets that run, such as "avx2"; "avx512 + amx" where bf16 alone has the other."""
        return f"avx512 + {self.isa}" if self.isa in BF16_SETS else self.isa

    @property
    def machine(self) -> str:
        """The CPU and the instruction sets, such as "AMD EPYC, avx2"."""
        return f"{super().machine}, {self.code}"

    def of_machines(self) -> tuple[CpuResult, ...]:
        return tuple(replace(one, beside=()) for one in (self, *self.beside))

    def machines(self) -> dict[str, CpuResult]:
        """The results of all machines, each by a name of its own."""
        by_name: dict[str, CpuResult] = {}
        for result in (self, *self.beside):
            alike = sum(one.machine == result.machine for one in by_name.values())
            by_name[f"{result.machine} ({alike + 1})" if alike else result.machine] = result
        return by_name

    def titled(self) -> Iterator[tuple[str, Case]]:
        """Every case of implementations, and what it is of."""
        yield from ((case.title, case) for case in self.one_head)
        yield from ((case.title, case) for case in self.cases)
        yield from ((f"A beside dense attention, d={step.head_dim}, all threads", step) for step in self.dense)
        yield from ((case.title, case) for case in self.few)
        yield from ((f"{case.title}, beside a window", case) for case in self.grids)
        yield from ((f"{case.title}, with a mask", case) for case in self.masked)
        yield from ((f"{listed(*case.tiles)}, {case.depth} layers, bf16, backward, all threads", case) for case in self.encoder)

    def on_threads(self, count: int | None = None) -> str:
        """Such as ", 4 threads", empty for one; those of the result where a case does not say."""
        threads = count or self.thread_count
        return f", {threads} threads" if threads > 1 else ""

    def peak_fractions(self) -> dict[str, float]:
        """What the kernel reaches on one thread of the multiply-adds timed beside it, by what it computes: dense attention by
        its FLOPs, A's by those that are left where each key is scored once (`SHARED`)."""
        alone = [case for case in self.cases if case.threads == 1 and case.config == "A" and not case.backward]
        cases: list[tuple[str, Case, float]] = [(f"A, d={c.head_dim}{', causal' * c.is_causal}", c, SHARED) for c in alone]
        longest = max((case.seq for case in self.one_head), default=0)
        heads = [case for case in self.one_head if case.seq == longest]
        cases += [(title_of("dense", case.head_dim, False, case.backward), case, 1.0) for case in heads]
        fractions = {f"dense, d={loops.head_dim}": loops.tile_gflops / loops.fma_gflops for loops in self.inner_loops}
        for what, case, share in cases:
            if (fraction := of_peak(case, "native")) is not None:
                fractions[what] = fraction / share
        return fractions

    def measurements(self) -> Iterator[Measurement]:
        yield from self._own_measurements()
        for name, result in list(self.machines().items())[1:]:
            yield from (Measurement(f"{name}: {one.what}", one.samples, one.yardstick) for one in result._own_measurements())

    def _own_measurements(self) -> Iterator[Measurement]:
        for title, case in self.titled():
            threads = self.on_threads(case.threads) if isinstance(case, CpuCase) else ""
            yield from of_case(f"{title}{threads}", case)
        for name in ("dtypes", "threads"):
            for step in getattr(self, name):
                yield from of_case(f"{name}, d={step.head_dim}{', backward' * step.backward}", step)
        for loops in self.inner_loops:
            for what, samples in loops.entries.items():
                yield Measurement(f"inner loops, d={loops.head_dim}: {what}", samples.samples_s)
        for million in self.million:
            for what, time in (("native", million.time), ("A", million.a.time if million.a else None)):
                if time:
                    yield Measurement(f"{million.seq:,} tokens: {what}", time.samples_s)


def of_peak(case: Case, name: str) -> float | None:
    """An implementation's nominal rate over that of the fastest multiply-adds timed beside it; None where one was not timed."""
    entry = case.entries.get(name)
    return entry.gflops / case.fma.peak_gflops if entry and entry.gflops and case.fma else None
