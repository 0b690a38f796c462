"""What the figures of the suite of serving must be, and how they are read out of its result."""

from __future__ import annotations

from dilkit.tools.bench.serving.record import ALONE, CACHE, DENSE, FULL, MASKED, OURS, PACKED, PADDED, ServingResult
from dilkit.tools.bench.target import Target, Values


def _packed(result: ServingResult) -> Values:
    return {case.spread: case.ratio(PACKED, ALONE) for case in result.packed if case.timed(PACKED, ALONE)}


def _padded(result: ServingResult) -> Values:
    pairs = [(case, way) for case in result.packed for way in (MASKED, PADDED) if case.timed(PACKED, way)]
    return {f"{case.spread}, {way}": case.ratio(way, PACKED) for case, way in pairs}


def _growth(result: ServingResult) -> Values:
    """The step after the most tokens over that after the fewest."""
    growth = {}
    for decoding in result.decoding:
        steps = [(point.seen, point.step_s) for point in decoding.after() if point.step_s]
        if len(steps) > 1:
            (few, first), *_, (many, last) = steps
            growth[f"{many:,} and {few:,} tokens"] = last / first
    return growth


def _faster(result: ServingResult) -> Values:
    """Where segments are full, so that a `DilatedCache` has the most to look at."""
    points = [point for decoding in result.decoding for point in decoding.after(filled=True)]
    return {f"{point.seen:,} tokens": point.ratio(FULL, CACHE) for point in points if point.timed(CACHE, FULL)}


def _allocated(result: ServingResult) -> Values:
    points = [point for decoding in result.decoding for point in decoding.points]
    return {point.title: point.allocated_bytes / point.bound_bytes for point in points}


def _prefill(result: ServingResult) -> Values:
    return {case.title: case.ratio(DENSE, OURS) for case in result.prefill if case.timed(DENSE, OURS)}


TARGETS: tuple[Target[ServingResult], ...] = (
    Target("packed sequences, forward + backward: time over one by one", 1.0, 0.8, _packed, lower=True),
    Target("the same, padded to the longest: time over packed", 2.0, 3.0, _padded),
    Target("a step of DilatedCache: time after a million tokens over that after a thousand", 1.5, 1.1, _growth, lower=True),
    Target("a step over a full cache by torch: time over that of DilatedCache", 20.0, 50.0, _faster),
    Target("memory of DilatedCache over its bound", 1.0, None, _allocated, unit="", lower=True, exact=True),
    Target("prefill of a Llama-shaped model: time of torch's dense attention over dilkit's", 3.0, 6.0, _prefill),
)
