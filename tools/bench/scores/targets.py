"""What the figures of the suite of scores must be, and how they are read out of its result."""

from __future__ import annotations

from collections.abc import Sequence

from dilkit.tools.bench.scores.record import ALIBI, COORDINATES, EAGER, MATRIX, OURS, PLAIN, TABLE, ScoresCase, ScoresResult
from dilkit.tools.bench.target import Target, Values


def _cost(result: ScoresResult, kind: str, what: str) -> Values:
    """Time with a bias of this kind over time without."""
    return {case.what: case.ratio(kind, PLAIN) for case in result.kinds if case.what == what and case.timed(kind, PLAIN)}


def _slower(cases: Sequence[ScoresCase], other: str) -> Values:
    """Time of the other over dilkit's."""
    return {case.what: case.ratio(other, OURS) for case in cases if case.timed(other, OURS)}


def _larger(cases: Sequence[ScoresCase], other: str) -> Values:
    """Memory of the other over dilkit's."""
    peaks = {case.what: (case.entries[other].peak_bytes, case.entries[OURS].peak_bytes) for case in cases}
    return {what: theirs / ours for what, (theirs, ours) in peaks.items() if theirs and ours}


def _costs(what: str, limits: dict[str, tuple[float, float]]) -> tuple[Target[ScoresResult], ...]:
    return tuple(
        Target(f"{what}, {kind}: time over that without a bias", must, aim, lambda r, k=kind: _cost(r, k, what), lower=True)  # type: ignore[misc]
        for kind, (must, aim) in limits.items()
    )


TARGETS: tuple[Target[ScoresResult], ...] = (
    *_costs("forward", {ALIBI: (1.08, 1.03), COORDINATES: (1.35, 1.2), TABLE: (1.25, 1.1)}),
    *_costs("forward and backward", {ALIBI: (1.1, 1.05), COORDINATES: (1.4, 1.25), TABLE: (1.4, 1.2)}),
    Target(
        "a slide, dense with 2-D ALiBi: time of torch with a matrix over dilkit's", 1.5, 2.5, lambda r: _slower(r.tiles, MATRIX)
    ),
    Target(
        "a slide, dense with 2-D ALiBi: memory of torch with a matrix over dilkit's", 50, 500, lambda r: _larger(r.tiles, MATRIX)
    ),
    Target("a layer with a softcap: time of eager torch over dilkit's", 4.0, 8.0, lambda r: _slower(r.layers, EAGER)),
    Target("a layer with a softcap: memory of eager torch over dilkit's", 20, 100, lambda r: _larger(r.layers, EAGER)),
)
