"""What the figures of the suite of serving must be, and how they are read out of its result."""

from __future__ import annotations

from collections.abc import Callable

from dilkit.tools.bench.serving.record import (
    ALONE,
    CACHE,
    DENSE,
    DILATED,
    DYNAMIC,
    FULL,
    KVCACHE,
    MASKED,
    OURS,
    PACKED,
    PADDED,
    PAGED,
    READ,
    SINGLE,
    ServingResult,
)
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


def _bandwidth(result: ServingResult) -> Values:
    """Time of reading over that of a step, which reads as much."""
    points = [point for decoding in result.single for point in decoding.points if point.timed(READ, CACHE)]
    return {f"{point.kept_bytes / 1e6:,.1f} MB": point.ratio(READ, CACHE) for point in points}


def _overhead(result: ServingResult) -> Values:
    steps = [(point, point.step_s) for decoding in result.single for point in decoding.points[:1]]
    return {f"{point.seen:,} tokens": 1e6 * taken for point, taken in steps if taken}


def _single(place: int) -> Callable[[ServingResult], Values]:
    """Of the point of that place."""

    def faster(result: ServingResult) -> Values:
        points = [decoding.points[place] for decoding in result.single]
        return {f"{point.seen:,} tokens": point.ratio(FULL, CACHE) for point in points if point.timed(CACHE, FULL)}

    return faster


def _kvcache(result: ServingResult) -> Values:
    points = [point for decoding in result.single for point in decoding.points if point.timed(KVCACHE, CACHE)]
    return {f"{point.seen:,} tokens": point.ratio(KVCACHE, CACHE) for point in points}


TARGETS: tuple[Target[ServingResult], ...] = (
    Target("packed sequences, forward + backward: time over one by one", 1.0, 0.8, _packed, lower=True),
    Target("the same, padded to the longest: time over packed", 2.0, 3.0, _padded),
    Target("a step of DilatedCache: time after a million tokens over that after a thousand", 1.5, 1.1, _growth, lower=True),
    Target("a step over a full cache by torch: time over that of DilatedCache", 20.0, 50.0, _faster),
    Target("memory of DilatedCache over its bound", 1.0, None, _allocated, unit="", lower=True, exact=True),
    Target("a step on one thread: share of the bandwidth at which memory is read", 0.5, 0.8, _bandwidth, unit=""),
    Target("a step on one thread after a few tokens", 60.0, 30.0, _overhead, unit=" us", lower=True),
    Target("torch over a full cache of a thousand tokens: time over that of DilatedCache, one thread", 1.0, 2.0, _single(1)),
    Target("torch over a full cache of 131,007 tokens: time over that of DilatedCache, one thread", 150.0, 500.0, _single(-1)),
    Target("dilated_attention_with_kvcache: time over that of DilatedCache, one thread", 1.3, 1.1, _kvcache, lower=True),
    Target(
        "a step of 32 sequences in one call: time over steps of one each",
        0.7,
        0.4,
        lambda r: {case.label: case.ratio(PAGED, SINGLE) for case in r.many if case.timed(PAGED, SINGLE)},
        lower=True,
    ),
    Target(
        "tokens of a model of transformers after 16K: time with its own cache over that with dilated_cache()",
        3.0,
        8.0,
        lambda r: {case.label: case.ratio(DYNAMIC, DILATED) for case in r.generated if case.timed(DYNAMIC, DILATED)},
    ),
    Target(
        "rows kept as int8: memory over float32's",
        0.27,
        None,
        lambda r: {rows.stored: rows.kept_bytes / rows.plain_bytes for rows in r.stored},
        unit="",
        lower=True,
    ),
    Target(
        "rows kept as int8: error of a step, relative",
        0.01,
        None,
        lambda r: {rows.stored: rows.error for rows in r.stored},
        unit="",
        lower=True,
    ),
    Target("prefill of a Llama-shaped model: time of torch's dense attention over dilkit's", 3.0, 6.0, _prefill),
)
