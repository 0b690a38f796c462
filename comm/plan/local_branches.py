"""Local branches: what a branch shows of the rows that one rank holds to one another, as a branch of a sequence of its own."""

from __future__ import annotations

from typing import NamedTuple

from dilkit.pattern import Branch


class LocalBranch(NamedTuple):
    """`branch`, applied to the rows `start .. stop - 1` of the sequence as if they were all."""

    start: int
    stop: int
    branch: Branch
