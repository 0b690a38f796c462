"""Forms: the pairs of branches, in the few shapes that kernels, ranks and caches compute.

    Segments   i and j are kept by the head, and lie in one segment
    Band       first <= |i - j|,  i - back <= j <= i + ahead,  and (i - j) mod rate == 0
    Global     i is among the rows that see all, or j among the columns that all see
    Runs       the run of rows that i lies in sees a run of columns that j lies in
    Grid       cell j of a row-major grid lies in the neighborhood of cell i, which moves back from edges
    CutGrid    the same with neighborhoods that edges cut off
    GivenBlocks    the block of i sees that of j, as each call says
    GivenIntervals j lies in an interval of i, as each call says

Causality is not among them: the problem says whether keys after a query are seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from dilkit.pattern.lowering.tables import RunTable
    from dilkit.pattern.runs import Positions


@dataclass(frozen=True, eq=False, kw_only=True)
class Form:
    """Pairs that query heads `heads[0] .. heads[1] - 1` see, without those of other forms that `overlap="once"` leaves out.

    Two forms of one branch have no pair in common. Numbers beyond `UNBOUNDED` are `UNBOUNDED`.
    """

    name: ClassVar[str]

    heads: tuple[int, int]
    branch: int = 0
    """The place of the branch in the pattern."""
    without_rows: Positions | None = None
    """Queries that take no part, as runs `(n, 2)`; None, as both are then: all do."""
    without_columns: Positions | None = None
    """Keys that take no part."""
    without: tuple[int, ...] = ()
    """The places of forms, among those of the pattern, whose pairs are left out one by one."""

    def serves(self, head: int) -> bool:
        return self.heads[0] <= head < self.heads[1]

    def offset_of(self, head: int) -> int:
        """Return the place of the first row that the head keeps in a segment; 0 for other forms."""
        return 0

    @property
    def nbytes(self) -> int:
        values = (part for value in vars(self).values() for part in (value if isinstance(value, tuple) else (value,)))
        return sum(getattr(value, "nbytes", 8) for value in values)

    def of_heads(self, start: int, stop: int) -> Form:
        """Return the form for the query heads `start .. stop - 1`, all of which it serves."""
        return replace(self, heads=(start, stop))


@dataclass(frozen=True, eq=False, kw_only=True)
class Segments(Form):
    """Segments of `length` tokens, of which a head keeps those at its offset and every `rate`-th after it.

    i // length == j // length  and  (i mod length) mod rate == (j mod length) mod rate == offsets[head - heads[0]]
    """

    name = "segments"

    length: int
    rate: int
    offsets: tuple[int, ...]

    def offset_of(self, head: int) -> int:
        return self.offsets[head - self.heads[0]]

    def of_heads(self, start: int, stop: int) -> Segments:
        first = self.heads[0]
        return replace(self, heads=(start, stop), offsets=self.offsets[start - first : stop - first])

    def shares_offsets(self, group: int) -> bool:
        """True if the `group` query heads of each key/value head have one offset."""
        offsets = {(head // group, offset) for head, offset in enumerate(self.offsets, self.heads[0])}
        return len(offsets) == len({kv_head for kv_head, _ in offsets})


@dataclass(frozen=True, eq=False, kw_only=True)
class Band(Form):
    """Keys at distances that are multiples of `rate`, from `first` on, up to `back` before a query and `ahead` after it."""

    name = "band"

    back: int = UNBOUNDED
    ahead: int = UNBOUNDED
    rate: int = 1
    begin: int = 0
    """The least distance that the branch shows."""
    beyond: int = 0
    """The least distance that other forms have not shown."""

    @property
    def first(self) -> int:
        """The least distance that is left."""
        return max(self.begin, self.beyond)


@dataclass(frozen=True, eq=False, kw_only=True)
class Global(Form):
    """Rows that see every key, and columns that every query sees, as runs `(n, 2)`: a pair of both counts once."""

    name = "global"

    rows: Positions
    columns: Positions


@dataclass(frozen=True, eq=False, kw_only=True)
class Runs(Form):
    """Runs of rows, and the runs of columns that each of them sees: queries as rows, and the same with keys as rows."""

    name = "runs"

    queries: RunTable
    keys: RunTable
    block: int = UNBOUNDED
    """The length of the runs of rows, where they have one."""


class WindowAxis(NamedTuple):
    """One dimension of a grid, and the window of each of its coordinates: an interval of the cells of its residue class.

        coordinate i = d * cell + r        cells = number of coordinates with residue r
        leader = min(cell // s * s + s // 2, cells - 1)        start = leader - k // 2        stop = start + k

    Here `d = dilation`, `s = stride`, `k = kernel`. Edges move `start` back into `0 .. cells - k`, unless they `cut`. On a causal
    axis `leader = min(cell // s * s + s - 1, cells - 1)`, `start = leader - k + 1` and `stop = cell + 1`.
    """

    size: int
    kernel: int
    dilation: int = 1
    stride: int = 1
    causal: bool = False
    cut: bool = False

    @property
    def leader(self) -> int:
        """The place in each group of `stride` cells of the one whose window the whole group uses."""
        return self.stride - 1 if self.causal else self.stride // 2

    @property
    def back(self) -> int:
        """The number of cells in a window before its leader."""
        return self.kernel - 1 if self.causal else self.kernel // 2

    def window(self, i: Any) -> tuple[Any, Any]:
        """Return start and stop of the windows of coordinates; those of windows that are cut may lie beyond the edges."""
        cell, cells = i // self.dilation, (self.size - 1 - i % self.dilation) // self.dilation + 1
        leader = cell if self.stride == 1 else (cell // self.stride * self.stride + self.leader).minimum(cells - 1)
        start = leader - self.back
        if self.causal:
            return start, cell + 1
        if not self.cut:
            start = start.clamp(min=0).minimum(cells - self.kernel)
        return start, start + self.kernel

    def sees(self, i: Any, j: Any) -> Any:
        """Return a mask, bool: the window of coordinate i holds coordinate j."""
        (start, stop), cell = self.window(i), j // self.dilation
        return (i % self.dilation == j % self.dilation) & (cell >= start) & (cell < stop)


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid(Form):
    """A row-major grid of `shape`, in which a cell sees `kernel` cells a side around it, `dilation` apart.

    `stride` cells share a window; on `causal` axes it ends at the cell. Without them all are 1 and none is causal. Exactly so
    many tokens as it has cells are needed (`WindowAxis` defines the windows).
    """

    name = "grid of windows"

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()

    @property
    def axes(self) -> list[WindowAxis]:
        shared, causal = self.stride or (1,) * len(self.shape), self.causal or (False,) * len(self.shape)
        cut = (isinstance(self, CutGrid),) * len(self.shape)
        return list(map(WindowAxis, self.shape, self.kernel, self.dilation, shared, causal, cut))


@dataclass(frozen=True, eq=False, kw_only=True)
class CutGrid(Grid):
    """A `Grid` whose neighborhoods stay around their cell: what would lie beyond an edge is not there."""

    name = "grid of cut windows"


@dataclass(frozen=True, eq=False, kw_only=True)
class Given(Form):
    """Pairs that a tensor of each call says."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenBlocks(Given):
    """Blocks of `block` tokens, of which each call says which see which (`Inputs.block_layout`)."""

    name = "given blocks"

    block: int


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenIntervals(Given):
    """Up to `most` intervals of keys for each query, which each call says (`Inputs.intervals`)."""

    name = "given intervals"

    most: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Unlowered(Form):
    """Pairs that no form can describe, and `why`: computing them is refused."""

    name = "unlowered"

    why: str


FORMS = frozenset(form.name for form in (Segments, Band, Global, Runs, Grid, CutGrid))
"""The names of the forms that patterns say by themselves, as `Limits.forms` has them."""
GIVEN_FORMS = frozenset(form.name for form in (GivenBlocks, GivenIntervals))
"""Names of the forms that a tensor of each call fills."""
