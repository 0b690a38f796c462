"""What the suite of patterns measures them at."""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.tools.bench.suite import Sizes


@dataclass(frozen=True)
class PatternsSizes(Sizes):
    """Most cases are of `tokens`, `heads`, `head_dim` and a `window` of so many tokens; `long` and `short` sequences of one head.

    `mixes`: lengths, in windows, and dilation rates of the segments that are mixed with a window and `mixed_globals` global
    tokens. `block`: tokens of a block of BigBird; `masked_heads`: so many fit in memory with a mask of all pairs.
    `chosen_heads`: heads where each call gives the blocks, one in `chosen_share`.
    """

    tokens: int = 32_768
    heads: int = 8
    head_dim: int = 64
    window: int = 1024
    mixes: tuple[tuple[int, int], ...] = ((2, 1), (8, 8))
    mixed_globals: int = 16
    block: int = 64
    masked_heads: int = 2
    chosen_heads: int = 4
    chosen_share: int = 16
    long: int = 1_000_000
    short: int = 65_536
    long_globals: int = 64
    threads: int = 4
