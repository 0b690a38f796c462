"""How the kernels in numba.cuda cut their work, by head_dim: facts that need no numba."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows`, which meet `keys` at a time, in blocks of `down x across` threads.

    `head_dim` is padded: a multiple of `4 * across`. `down` divides `rows` and `keys`; `across` and 4 divide `keys`.
    """

    head_dim: int
    rows: int
    keys: int
    down: int
    across: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.down * self.across

    @property
    def window(self) -> int:
        """Keys that a block looks up at once: about one for each thread."""
        return -(-self.threads // self.keys) * self.keys

    @property
    def quads(self) -> tuple[int, int]:
        """Quads of a row in shared memory, of `head_dim` numbers and of `keys` numbers: one more than are used."""
        return self.head_dim // 4 + 1, self.keys // 4 + 1

    @property
    def shares(self) -> tuple[int, int, int]:
        """Rows, keys and columns that a thread has."""
        return self.rows // self.down, self.keys // self.across, self.head_dim // self.across


FORWARD = (
    Tiling(head_dim=16, rows=64, keys=32, down=32, across=4),
    Tiling(head_dim=32, rows=64, keys=32, down=16, across=8),
    Tiling(head_dim=64, rows=64, keys=32, down=8, across=16),
    Tiling(head_dim=96, rows=32, keys=32, down=8, across=8),
    Tiling(head_dim=128, rows=32, keys=32, down=8, across=16),
)
BACKWARD = (
    Tiling(head_dim=16, rows=64, keys=32, down=32, across=4),
    Tiling(head_dim=32, rows=64, keys=32, down=16, across=8),
    Tiling(head_dim=64, rows=32, keys=32, down=8, across=16),
    Tiling(head_dim=96, rows=32, keys=16, down=8, across=8),
    Tiling(head_dim=128, rows=32, keys=16, down=8, across=16),
)
"""Static shared memory is at most 48 KB a block, which holds fewer rows where two tensors of a tile stay in it."""

TABLE = {"forward": FORWARD, "dots": FORWARD, "dquery": BACKWARD, "dkeyvalue": BACKWARD}


def tiling_for(role: str, head_dim: int) -> Tiling:
    """The first tiling that holds `head_dim`. Raises ValueError where none does."""
    for tiling in TABLE[role]:
        if head_dim <= tiling.head_dim:
            return tiling
    raise ValueError(f"head_dim={head_dim}: kernels are made for at most {MAX_HEAD_DIM}; use another backend")
