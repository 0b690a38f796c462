"""What a launch issues: a record of the machine's counts. A gradient through lse is a launch of its own, in float16 two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Of one launch or several, over all their blocks. The order is that of `machine/counts.h`.

    By warps: `products_k8` and `products_k16`, of (16, 8) sums and so deep; `matrices` that are loaded for them, and the
    wavefronts that takes, one each without conflicts of banks; `shared_instructions`, loads and stores of shared memory, the
    wavefronts they take, and how many at least, if no bank gives a word twice; `shuffles`, votes and reductions; `warp_barriers`.
    By blocks: `barriers`. By threads: `fma`; `fp32`, other sums and products in fp32; `special`, powers of 2, reciprocals and
    quotients; `atomics`. In bytes: `global_loaded`, `global_stored`, and `copied` to shared memory asynchronously.
    """

    products_k8: int = 0
    products_k16: int = 0
    matrices: int = 0
    matrix_wavefronts: int = 0
    shared_instructions: int = 0
    shared_wavefronts: int = 0
    shared_least_wavefronts: int = 0
    global_loaded: int = 0
    global_stored: int = 0
    copied: int = 0
    fma: int = 0
    fp32: int = 0
    special: int = 0
    shuffles: int = 0
    warp_barriers: int = 0
    barriers: int = 0
    atomics: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in FIELDS))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in FIELDS))

    def times(self, many: int) -> Counts:
        """Of as many equal parts."""
        return Counts(*(getattr(self, name) * many for name in FIELDS))


FIELDS = tuple(Counts.__dataclass_fields__)
