"""What a launch of each CUDA kernel issues, counted: the result of `tests/ptx/costs.py`."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import ClassVar

from dilkit.tools.results.record import Result


@dataclass(frozen=True)
class KernelCost:
    """What one launch issues, over all its blocks and all heads: one row of the file.

    `configuration`: "A", "B" or "C", of head_dim `head_dim`; `launch`: which of the launches of `role` it is, one for each group
    of branches. `tiles`, of which `run` were run.

    By warps: `products` of (16, 16) by (16, 8) matrices; `matrices`, the wavefronts of shared memory that take what products are
    given; `shared`, those of other loads and stores, at least; `conflicts`, what these take beyond that if lanes of 8 and 16
    bytes are served by halves and quarters of a warp; `shuffles`, votes and reductions. By blocks: `barriers`. By threads:
    `fma`; `fp32`, other sums and products; `special`, powers of 2, reciprocals and quotients; `atomics`. In bytes: `loaded` and
    `copied` from global memory, `stored` to it; `memory`, what of it is there once, so that no cache saves it.
    """

    configuration: str
    head_dim: int
    dtype: str
    architecture: str
    role: str
    name: str
    launch: int
    tiles: int
    run: int
    products: int
    matrices: int
    shared: int
    conflicts: int
    shuffles: int
    barriers: int
    fma: int
    fp32: int
    special: int
    atomics: int
    loaded: int
    copied: int
    stored: int
    memory: int

    @classmethod
    def read(cls, row: str) -> KernelCost:
        """The row of a file. Raises ValueError."""
        words = row.split()
        if len(words) != len(FIELDS) or not all(word.isdecimal() for word in (words[1], *words[6:])):
            raise ValueError(f"rows: {row[:40]!r} where {', '.join(FIELDS)} are needed")
        configuration, head_dim, dtype, architecture, role, name, *numbers = words
        return cls(configuration, int(head_dim), dtype, architecture, role, name, *map(int, numbers))

    def row(self) -> str:
        """As files hold it."""
        return " ".join(map(str, astuple(self)))


FIELDS = tuple(field.name for field in fields(KernelCost))


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A launch of which all tiles were run, as on a GPU, and which was counted from a few of them, too: the count of which the
    two differ most, and both of it."""

    problem: str
    name: str
    tiles: int
    run: int
    count: str
    whole: int
    from_few: int

    @property
    def apart(self) -> float:
        """How far the count from a few tiles is off, of the whole."""
        return abs(self.from_few - self.whole) / max(self.whole, 1)


@dataclass(frozen=True, kw_only=True)
class CostsResult(Result):
    """Every launch of A, B and C, forward and backward, for each kind of GPU; `fields` names the words of a row."""

    KIND: ClassVar[str] = "costs"

    nvrtc: str
    fields: tuple[str, ...] = FIELDS
    rows: tuple[str, ...]
    wholes: tuple[Whole, ...] = ()

    def __post_init__(self) -> None:
        if self.fields != FIELDS:
            raise ValueError(f"fields: {', '.join(self.fields)[:80]} where {', '.join(FIELDS)} are needed")
        self.costs()

    def costs(self) -> list[KernelCost]:
        """The rows."""
        return [KernelCost.read(row) for row in self.rows]
