"""What the figures of the suite of patterns must be, and how they are read out of its result."""

from __future__ import annotations

from collections.abc import Iterable

from dilkit.tools.bench.patterns.record import FLEX, MASKED, OURS, RENEWED, SEGMENTS, THREE, WINDOW, PatternCase, PatternsResult
from dilkit.tools.bench.target import GIB, Target, Values


def _slower(cases: Iterable[PatternCase], other: str) -> Values:
    """Time of the other over that of one pass of the kernel."""
    return {case.what: case.ratio(other, OURS) for case in cases if case.timed(other, OURS)}


def _rate(result: PatternsResult) -> Values:
    return {case.what: case.gflops(WINDOW) / case.gflops(SEGMENTS) for case in result.rates if case.timed(WINDOW, SEGMENTS)}


def _memory(cases: Iterable[PatternCase]) -> Values:
    peaks = {case.what: (case.entries[MASKED].peak_bytes, case.entries[OURS].peak_bytes) for case in cases}
    return {what: theirs / ours for what, (theirs, ours) in peaks.items() if theirs and ours}


def _held(result: PatternsResult) -> Values:
    """Of the longest sequence; an earlier entry is of a short one."""
    longest = [list(case.entries.items())[-1] for case in result.lengths]
    return {what: entry.memory_bytes / GIB for what, entry in longest if entry.memory_bytes}


def _linear(result: PatternsResult) -> Values:
    exponents = {}
    for case in result.lengths:
        short, long = case.entries
        if case.timed(short, long):
            exponents[f"{long} and {short}"] = case.gflops(long) / case.gflops(short)
    return exponents


TARGETS: tuple[Target[PatternsResult], ...] = (
    Target("a window: time of FlexAttention, compiled, over dilkit's", 2.0, 4.0, lambda r: _slower(r.windows, FLEX)),
    Target(
        "window, global tokens and segments: time of three calls, merged, over one pass",
        1.2,
        1.5,
        lambda r: _slower(r.mixes, THREE),
    ),
    Target("rate of a window over that of whole segments of the same work", 0.7, 0.9, _rate),
    Target("BigBird: time of torch's attention with a mask over dilkit's", 10.0, 20.0, lambda r: _slower(r.blocks, MASKED)),
    Target("BigBird: memory of torch's attention with a mask over dilkit's", 20.0, 50.0, lambda r: _memory(r.blocks)),
    Target(
        "blocks of each call, forward and backward: time of torch's attention with a mask over dilkit's",
        8.0,
        14.0,
        lambda r: _slower(r.layouts, MASKED),
    ),
    Target(
        "blocks of each call, forward and backward: memory of torch's attention with a mask over dilkit's",
        20.0,
        100.0,
        lambda r: _memory(r.layouts),
    ),
    Target(
        "blocks of each call: time with a new layout over time with the same",
        1.05,
        1.01,
        lambda r: _slower(r.layouts, RENEWED),
        lower=True,
    ),
    Target("a window and global tokens: memory of a million tokens", 4.0, None, _held, unit=" GiB", lower=True),
    Target("a window and global tokens: rate of a million tokens over that of 65,536", 0.9, None, _linear),
)
