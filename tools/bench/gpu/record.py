"""The result of `dilkit bench --suite gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Case, Measurement, Samples, SuiteResult, of_case

OURS = ("cupy_raw", "numba_cuda", "triton")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class GpuCase(Case):
    """Implementations on one of the configurations A to C: the forward pass, or the backward pass alone."""

    config: str
    seq: int
    dtype: str
    head_dim: int
    is_causal: bool
    backward: bool

    @property
    def title(self) -> str:
        """Such as "A, bf16, d=64, causal, backward"."""
        flags = ("causal" if self.is_causal else "", "backward" if self.backward else "")
        return ", ".join(filter(None, (self.config, SHORT.get(self.dtype, self.dtype), f"d={self.head_dim}", *flags)))


@dataclass(frozen=True, kw_only=True)
class SeqCase(Case):
    """A forward pass with the pattern of B in fp32."""

    seq: int


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Bytes that a forward pass on A holds beyond out and lse, by implementation; None where that could not be measured."""

    dtype: str
    results_bytes: int
    scratch_bytes: dict[str, int | None]


@dataclass(frozen=True, kw_only=True)
class Longest:
    """One forward pass over the longest sequence, and the bytes of its inputs and results."""

    seq: int
    verdict: str
    reasons: tuple[str, ...]
    time: Samples | None = None
    gflops: float | None = None
    held_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuResult(SuiteResult):
    """The CUDA kernels beside each of torch's own, a matmul and a copy."""

    KIND: ClassVar[str] = "suite-gpu"

    backends: tuple[str, ...]
    cases: tuple[GpuCase, ...] = ()
    launch_bound: tuple[SeqCase, ...] = ()
    memory: tuple[Scratch, ...] = ()
    seeds: tuple[SeqCase, ...] = ()
    long: tuple[Longest, ...] = ()

    def titled(self) -> Iterator[tuple[str, Case]]:
        """Every case, and what it is of."""
        yield from ((case.title, case) for case in self.cases)
        yield from ((f"B, {case.seq:,} tokens, launches too", case) for case in self.launch_bound)
        yield from ((f"B, {case.seq:,} tokens", case) for case in self.seeds)

    def measurements(self) -> Iterator[Measurement]:
        for title, case in self.titled():
            yield from of_case(title, case)
        for long in self.long:
            if long.time:
                yield Measurement(f"{long.seq:,} tokens: cupy_raw", long.time.samples_s)
