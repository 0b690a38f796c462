"""Sets of positions as runs, against Python's sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, strategies as st

from dilkit.pattern import runs

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

SEQ = 24
POSITIONS = st.frozensets(st.integers(0, SEQ - 1))


def runs_of(positions: Iterable[int]) -> Positions:
    """The normal form: ascending runs, none touching the next."""
    edges = np.diff(np.isin(np.arange(-1, SEQ + 1), list(positions)).astype(np.int8))
    return np.stack((np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)), axis=1)


@given(a=POSITIONS, b=POSITIONS)
def test_sets_of_runs(a: frozenset[int], b: frozenset[int]) -> None:
    np.testing.assert_array_equal(runs.union(runs_of(a), runs_of(b)), runs_of(a | b))
    np.testing.assert_array_equal(runs.complement(runs_of(a), SEQ), runs_of({*range(SEQ)} - a))
    np.testing.assert_array_equal(runs.difference(runs_of(a), runs_of(b), SEQ), runs_of(a - b))


@given(positions=POSITIONS, rate=st.integers(1, 5))
def test_progressions_hold_each_position_once(positions: frozenset[int], rate: int) -> None:
    for found, step in ((runs.progressions(runs_of(positions)), None), (runs.classes(runs_of(positions), rate), rate)):
        held = [first + at * step for first, step, count in found.tolist() for at in range(count)]
        assert sorted(held) == sorted(positions)
        assert step in (None, 1) or all(distance == step for distance in found[:, 1])
