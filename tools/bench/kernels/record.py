"""What the compiler made of every CUDA kernel: the result of `python -m dilkit.tools.bench.kernels.cases`."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import ClassVar

from dilkit.tools.results.record import Result

Key = tuple[str, str, str, int, str, int]
"""Name, architecture, dtype, head_dim, form and tile_rows of a kernel."""


@dataclass(frozen=True)
class KernelUse:
    """What a kernel, compiled for one architecture, dtype and head_dim, needs: one row of the file.

    `form`: "elements" where rows are read by the element, else 16 bytes at a time: of "plain" calls, or "packed", "dropout" or
    "packed-dropout". `dynamic` and `shared` are bytes of shared memory, asked for at launch
    and declared; `registers` are those of a thread, `spills` and `stack` bytes of it. `source`: a digest of what it was compiled
    from, or "-" where that is not known.
    """

    name: str
    architecture: str
    dtype: str
    head_dim: int
    form: str
    source: str
    threads: int
    blocks: int
    tile_rows: int
    dynamic: int
    shared: int
    registers: int
    spills: int
    stack: int

    @classmethod
    def read(cls, row: str) -> KernelUse:
        """The row of a file. Raises ValueError."""
        words = row.split()
        if len(words) != len(FIELDS) or not all(word.isdecimal() for word in (words[3], *words[6:])):
            raise ValueError(f"rows: {row[:40]!r} where {', '.join(FIELDS)} are needed")
        name, architecture, dtype, head_dim, form, source, *numbers = words
        return cls(name, architecture, dtype, int(head_dim), form, source, *map(int, numbers))

    def row(self) -> str:
        """As files hold it."""
        return " ".join(map(str, astuple(self)))

    @property
    def key(self) -> Key:
        """What it is, whatever the compiler makes of it."""
        return self.name, self.architecture, self.dtype, self.head_dim, self.form, self.tile_rows

    @property
    def spilled(self) -> bool:
        """Whether registers are kept in memory."""
        return bool(self.spills or self.stack)


FIELDS = tuple(field.name for field in fields(KernelUse))


@dataclass(frozen=True, kw_only=True)
class KernelsResult(Result):
    """Every kernel for every kind of GPU; `fields` names the words of a row. `older`: rows of sources that have changed since."""

    KIND: ClassVar[str] = "kernels"

    nvrtc: str
    quick: bool
    older: int = 0
    fields: tuple[str, ...] = FIELDS
    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.fields != FIELDS:
            raise ValueError(f"fields: {', '.join(self.fields)[:80]} where {', '.join(FIELDS)} are needed")
        self.kernels()

    def kernels(self) -> list[KernelUse]:
        """The rows."""
        return [KernelUse.read(row) for row in self.rows]
