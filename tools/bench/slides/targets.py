"""What the figures of the suite of slides must be, and how they are read out of its result."""

from __future__ import annotations

from functools import partial

from dilkit.tools.bench.slides.record import ALONE, BATCH, OURS, PUBLISHED, SlidesResult, listed, what
from dilkit.tools.bench.target import GIB, Target, Values


def _times(result: SlidesResult) -> Values:
    return {listed(case.tiles): case.ratio(PUBLISHED, OURS) for case in result.encoder if case.timed(PUBLISHED, OURS)}


def _peaks(result: SlidesResult) -> Values:
    peaks: dict[str, float] = {}
    for case in result.encoder:
        theirs, ours = (case.entries[name].peak_bytes if case.timed(name) else None for name in (PUBLISHED, OURS))
        if theirs and ours:
            peaks[listed(case.tiles)] = theirs / ours
    return peaks


def _held(gradients: bool, result: SlidesResult) -> Values:
    rows = [row for row in result.long if row.gradients == gradients and row.peak_bytes is not None]
    return {f"{what(row)}, {listed([row.tiles])}": (row.held_bytes + (row.peak_bytes or 0)) / GIB for row in rows}


def _batch(result: SlidesResult) -> Values:
    return {listed(case.tiles): case.ratio(BATCH, ALONE) for case in result.several if case.timed(BATCH, ALONE)}


def _mass(result: SlidesResult) -> Values:
    return {listed([row.tiles]): row.peak_bytes / row.output_bytes for row in result.mass if row.peak_bytes is not None}


def _no_gradients(result: SlidesResult) -> str | None:
    return None if any(row.gradients for row in result.long) else "it takes long, and goes with --full"


TARGETS: tuple[Target[SlidesResult], ...] = (
    Target("one slide, forward: time of the published procedure over dilkit's", 1.5, 2.5, _times),
    Target("one slide, forward: peak memory of the published procedure over dilkit's", 1.5, 3.0, _peaks),
    Target("a long slide: memory in all", 24.0, None, partial(_held, False), unit=" GiB", lower=True),
    Target(
        "the same, with gradients and activation checkpointing", None, 24.0, partial(_held, True), " GiB", True,
        missing=_no_gradients,
    ),
    Target("several slides: time of one batch over that of one by one", 1.1, 1.0, _batch, lower=True),
    Target("attention_mass: extra memory, in tensors as large as the queries", 4.0, 2.0, _mass, unit="", lower=True),
)  # fmt: skip
