"""How the kernels in numba.cuda divide their work, by head_dim."""

from __future__ import annotations

from dilkit.backends.numba.arguments import Tiling

MAX_HEAD_DIM = 128

FORWARD = (
    Tiling(head_dim=16, rows=64, columns=32, down=32, across=4),
    Tiling(head_dim=32, rows=64, columns=32, down=16, across=8),
    Tiling(head_dim=64, rows=64, columns=32, down=8, across=16),
    Tiling(head_dim=96, rows=32, columns=32, down=8, across=8),
    Tiling(head_dim=128, rows=32, columns=32, down=8, across=16),
)
BACKWARD = (
    Tiling(head_dim=16, rows=64, columns=32, down=32, across=4),
    Tiling(head_dim=32, rows=64, columns=32, down=16, across=8),
    Tiling(head_dim=64, rows=32, columns=32, down=8, across=16),
    Tiling(head_dim=128, rows=32, columns=16, down=8, across=16),
)
"""Static shared memory is at most 48 KB a block, which holds fewer rows where two tensors of a tile stay in it. All sizes are
guesses until they are measured on a GPU."""

TABLE = {"forward": FORWARD, "dots": FORWARD, "dquery": BACKWARD, "dkeyvalue": BACKWARD}


def tiling_for(role: str, head_dim: int) -> Tiling:
    """The first tiling that holds `head_dim`. Raises ValueError where none does."""
    for tiling in TABLE[role]:
        if head_dim <= tiling.head_dim:
            return tiling
    raise ValueError(f"head_dim={head_dim}: kernels are made for at most {MAX_HEAD_DIM}; use another backend")
