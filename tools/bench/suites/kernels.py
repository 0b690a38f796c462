"""Resources of every compiled CUDA kernel: registers, spills, stack and shared memory, for every kind of GPU."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar

from dilkit.tools.report.document import Document, Table, tables
from dilkit.tools.report.headline import place
from dilkit.tools.results.environment import Result

SHARED_KIB = dict(sm_70=96, sm_75=64, sm_80=163, sm_86=99, sm_89=99, sm_90=227, sm_100=227, sm_120=99)
"""Shared memory that a block may have, where that is more than the `STATIC_KIB` that a kernel may declare anywhere."""
STATIC_KIB = 48
DTYPES = ("float32", "float16", "bfloat16")
Key = tuple[str, str, str, int, str, int]
"""Name, architecture, dtype, head_dim, form and tile_rows of a kernel."""


@dataclass(frozen=True)
class KernelUse:
    """Resources of a kernel, compiled for one architecture, dtype and head_dim: a line of the file, a word for each field.

    `form`: "plain", "packed", "dropout", "packed-dropout", or "elements" where rows are not read 16 bytes at a time.
    `dynamic` and `shared` are bytes of shared memory, asked for at launch and declared; `registers`, `spills` and `stack` are
    those of a thread. `source`: a digest of what it was compiled from.
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
        """Return the kernel of a line. Raises ValueError."""
        pairs = zip(fields(cls), row.split(), strict=True)
        values: list[Any] = [int(word) if field.type == "int" else word for field, word in pairs]
        return cls(*values)

    def row(self) -> str:
        return " ".join(map(str, astuple(self)))

    @property
    def key(self) -> Key:
        """Facts that tell kernels apart, whatever the compiler makes of them."""
        return self.name, self.architecture, self.dtype, self.head_dim, self.form, self.tile_rows

    @property
    def complaints(self) -> list[str]:
        """Faults: spills, a stack, too much shared memory."""
        limit = SHARED_KIB.get(self.architecture, STATIC_KIB)
        sizes = [f"{size} bytes of {name}" for name, size in (("spills", self.spills), ("stack", self.stack)) if size]
        if self.shared > STATIC_KIB * 1024 or self.shared + self.dynamic > limit * 1024:
            sizes.append(f"{self.shared} + {self.dynamic} bytes of shared memory, at most {limit} KiB")
        return [f"{' '.join(self.row().split()[:5])}: {text}" for text in sizes]


FIELDS = tuple(field.name for field in fields(KernelUse))


@dataclass(frozen=True, kw_only=True)
class KernelsResult(Result):
    """Every kernel for every kind of GPU. `fields`: the words of a row; `older`: rows of sources that have changed since."""

    KIND: ClassVar[str] = "kernels"

    nvrtc: str
    fields: tuple[str, ...] = FIELDS
    rows: tuple[str, ...]
    older: int = 0

    def kernels(self) -> list[KernelUse]:
        """Return the rows. Raises ValueError for rows of other fields."""
        if self.fields != FIELDS:
            raise ValueError(f"fields: {', '.join(self.fields)[:80]} where {', '.join(FIELDS)} are needed")
        return [KernelUse.read(row) for row in self.rows]


RECORD = KernelsResult


def sentence(result: KernelsResult) -> str:
    kernels = result.kernels()
    spilled = sum(bool(kernel.spills or kernel.stack) for kernel in kernels)
    verdict = f"{spilled} SPILL registers or have a stack" if spilled else "none spills a register or has a stack"
    counted = f"{len(kernels):,} CUDA kernels for {len({kernel.architecture for kernel in kernels})} architectures"
    older = f", {result.older:,} of them from sources that have changed since" * bool(result.older)
    return f"{counted}, compiled by NVRTC {result.nvrtc}{older}: {verdict}."


def document(result: KernelsResult) -> Document:
    """Return a table of the registers of plain calls: a row for each kernel, dtype, head_dim and height of tiles."""
    groups: dict[tuple[str, int, int, int], dict[str, KernelUse]] = {}
    for one in (one for one in result.kernels() if one.form == "plain"):
        groups.setdefault((one.name, DTYPES.index(one.dtype), one.head_dim, one.tile_rows), {})[one.architecture] = one
    architectures = tuple(dict.fromkeys(kernel.architecture for kernel in result.kernels()))
    rows = []
    for (name, dtype, head_dim, tile), uses in sorted(groups.items(), key=lambda group: group[0]):
        registers = (str(uses[architecture].registers) if architecture in uses else "" for architecture in architectures)
        rows.append((name, DTYPES[dtype], str(head_dim), str(tile), *registers))
    columns = ("kernel", "dtype", "head_dim", "tile", *architectures)
    table = Table("Registers of a thread in plain calls, by architecture", columns, tuple(rows))
    return Document(headline=(sentence(result), place(result)), tables=tables(table))
