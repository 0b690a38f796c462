"""Sets of positions as runs of consecutive ones: int64 `(runs, 2)`, the start and the stop of each, ascending, none touching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.pattern import GlobalTokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Runs = NDArray[np.int64]

UNBOUNDED = 2**62
"""No tensor has as many rows: lengths, rates and positions beyond it are the same."""


def runs_of(branch: GlobalTokens) -> Runs:
    """The global tokens."""
    import numpy as np

    if isinstance(branch.tokens, int):
        return np.array([[0, min(branch.tokens, UNBOUNDED - 1)]])
    tokens = np.array(branch.tokens, np.int64)
    gaps = np.flatnonzero(np.diff(tokens) > 1)
    return np.stack((tokens[np.append(0, gaps + 1)], tokens[np.append(gaps, len(tokens) - 1)] + 1), axis=1)


def union(*sets: Runs) -> Runs:
    """The positions that are in any of the sets."""
    import numpy as np

    found: list[list[int]] = []
    for start, stop in sorted(run for runs in sets for run in runs.tolist()):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return np.array(found, np.int64).reshape(-1, 2)
