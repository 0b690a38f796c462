"""`Neighborhood`: the cells around each cell of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.checks import boolean, one_of
from dilkit.pattern.checks import PatternError, positive
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import CutGrid, Grid, WindowAxis

if TYPE_CHECKING:
    from torch import Tensor

Sizes = int | Sequence[int]
Flags = bool | Sequence[bool]

BORDERS = ("move", "cut")

MOST_CUT = 2**20
"""Cells of a window that edges cut off, at most: the sum over the branches of a pattern fits into 32 bits."""


@dataclass(frozen=True)
class Neighborhood(Branch):
    """Every token of a row-major grid sees those around it: in each dimension the `kernel_size` nearest ones.

        i sees j  if  in every dimension  i = r (mod d), j = r (mod d)  and  start <= j // d < start + k

    Here i and j are coordinates, `d = dilation`, `k = kernel_size`, r is a residue, n the number of coordinates with it, and
    `start = min(max(i // d - k // 2, 0), n - k)`: a window moves back from an edge, so that every token sees equally many
    (NATTEN: arXiv 2204.07143, and 2209.15001 for dilation). Of an even window one cell more lies before the token.

    - `shape`: the grid, of one, two or three dimensions; a sequence has as many tokens as it has cells.
    - `kernel_size`, `dilation`: an integer for all dimensions or one for each; with the border "move" `kernel_size * dilation` is
      at most the size of the grid.
    - `stride`: an integer for all dimensions or one for each, at most `kernel_size`. So many cells of a residue share the window
      of the one in their middle: `min(i // d // stride * stride + stride // 2, n - 1)` in place of `i // d` (arXiv
      2504.16922).
    - `causal`: a bool for all dimensions or one for each. On a causal one a token sees no later coordinate: its window ends at
      it, and begins `k - 1` before the last of the `stride` cells that share it.
    - `border`: "move", as above, or "cut": windows are not moved, and tokens near an edge see fewer. With `tail="zeros"` of the
      pattern they see a zero key, of score 0 and value 0, for each cell that is missing, as DilateFormer's windows do (arXiv
      2302.01791). A window that is cut has at most 2**20 cells.
    - `heads`: the query heads (start, stop) that it serves; None means all.

    With `is_causal` of a call a query sees those of its neighbours that do not come after it in the sequence; windows stay where
    they are. Raises `PatternError` or TypeError.

        >>> from dilkit import Neighborhood, Pattern
        >>> Pattern.of(Neighborhood(6, kernel_size=3)).count(6, 1)[0].tolist()[:2]
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
        >>> Pattern.of(Neighborhood((3, 4), kernel_size=(3, 1))).count(12, 1)[0, 5].view(3, 4).tolist()
        [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
        >>> Pattern.of(Neighborhood(6, kernel_size=3, causal=True)).count(6, 1)[0].tolist()[3:]
        [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
        >>> pattern = Pattern.of(Neighborhood(6, kernel_size=3, border="cut"), tail="zeros")
        >>> pattern.count(6, 1)[0, 0].tolist(), pattern.zero_keys(6, 1)[0].tolist()
        ([1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1])
    """

    kind: ClassVar[str] = "neighborhood"

    shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    causal: tuple[bool, ...] = (False,)
    border: str = "move"
    heads: tuple[int, int] | None = None

    def __init__(
        self,
        shape: Sizes,
        kernel_size: Sizes,
        dilation: Sizes = 1,
        heads: range | tuple[int, int] | None = None,
        *,
        stride: Sizes = 1,
        causal: Flags = False,
        border: str = "move",
    ) -> None:
        one_of("border", border, BORDERS, PatternError)
        grid = _by_axis("shape", shape, None)
        sizes = dict(kernel_size=kernel_size, dilation=dilation, stride=stride)
        kernel, steps, shared = (_by_axis(name, values, len(grid)) for name, values in sizes.items())
        for size, width, step, cells in zip(grid, kernel, steps, shared, strict=True):
            if cells > width:
                raise PatternError(
                    f"stride={shared} is more than kernel_size={kernel}, which leaves cells uncovered; at most {width}"
                )
            if width * step > size and border == "move":
                spans = f"{width * step} of a grid of shape {grid}"
                raise PatternError(f"kernel_size={kernel} with dilation={steps} spans {spans}; at most {size}")
        if border == "cut" and math.prod(kernel) > MOST_CUT:
            raise PatternError(f"kernel_size={kernel} with border='cut' has {math.prod(kernel):,} cells; at most {MOST_CUT:,}")
        later = _by_axis("causal", causal, len(grid), boolean)
        self._set(shape=grid, kernel_size=kernel, dilation=steps, stride=shared, causal=later, border=border, heads=heads)
        self._settle()

    def call(self) -> str:
        call = super().call()
        for name, default in dict(dilation=1, stride=1, causal=False).items():
            call = call.replace(f", {name}={(default,) * len(self.shape)!r}", "")
        return call

    def to_fields(self) -> dict[str, Any]:
        values = super().to_fields()
        axes = len(self.shape)
        for name, default in dict(stride=(1,) * axes, causal=(False,) * axes, border="move").items():
            if values[name] == default:  # the only one that there once was: the text of such a pattern stays what it was
                del values[name]
        return values

    @property
    def axes(self) -> list[WindowAxis]:
        """The dimensions, the first one first."""
        cut = (self.border == "cut",) * len(self.shape)
        return list(map(WindowAxis, self.shape, self.kernel_size, self.dilation, self.stride, self.causal, cut))

    @property
    def tokens(self) -> int:
        """The cells of the grid."""
        return math.prod(self.shape)

    @property
    def max_seq(self) -> int:
        return self.tokens

    @property
    def is_of_whole_sequences(self) -> bool:
        return True

    @property
    def goes_by_cells(self) -> bool:
        return len(self.shape) > 1  # in one dimension it is a window, and the cells are any places

    def check_seq(self, seq: int) -> None:
        if seq != self.tokens:
            shape = " x ".join(map(str, self.shape))
            raise PatternError(f"seq={seq}: the neighborhood is of a grid of {shape}, {self.tokens} tokens; as many are needed")

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        seen, cells = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device), self.tokens
        for axis in self.axes:
            cells //= axis.size
            seen &= axis.sees((rows // cells % axis.size)[:, None], keys // cells % axis.size)
        return seen[None]

    def zero_keys(self, rows: Tensor, seq: Tensor, heads: Heads) -> Tensor | int:
        """Count the cells of each row's window beyond an edge that cuts it off: `(1, m)`."""
        if self.border == "move":
            return 0
        whole, there, cells = 1, rows.new_ones(len(rows)), self.tokens
        for axis in self.axes:
            cells //= axis.size
            place = rows // cells % axis.size
            start, stop = axis.window(place)
            whole = whole * (stop - start)
            there = there * (stop.minimum((axis.size - 1 - place % axis.dilation) // axis.dilation + 1) - start.clamp(min=0))
        return (whole - there)[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        earlier, cells, all_pairs = 0, 1, 1  # pairs whose key comes before the query, is it, and all: from the last dimension on
        for axis in reversed(self.axes):
            before, along = _pairs_along(axis)
            earlier = before * all_pairs + axis.size * earlier
            cells, all_pairs = cells * axis.size, all_pairs * along
        return len(self.served(heads)) * (earlier + cells if is_causal else all_pairs)

    def forms(self, heads: Heads, seq: int) -> Iterable[Grid]:
        steps = tuple(map(min, self.dilation, self.shape))  # beyond, each cell is alone as well
        form = Grid if self.border == "move" else CutGrid
        sizes: dict[str, Any] = dict(kernel=self.kernel_size, dilation=steps, stride=self.stride, causal=self.causal)
        return [form(heads=self.range_served(heads), shape=self.shape, **sizes)]

    def __str__(self) -> str:
        grid, kernel = (" x ".join(map(str, sizes)) for sizes in (self.shape, self.kernel_size))
        steps = "" if set(self.dilation) == {1} else f", 1 in {' x '.join(map(str, self.dilation))}"
        shared = "" if set(self.stride) == {1} else f", one for {' x '.join(map(str, self.stride))} cells"
        axes = [str(axis) for axis, is_causal in enumerate(self.causal) if is_causal]
        causal = f", causal along axis {' and '.join(axes)}" if axes else ""
        border = "" if self.border == "move" else ", cut off at edges"
        return f"neighborhoods of {kernel} in a grid of {grid}{steps}{shared}{causal}{border}{self.heads_text()}"


def _pairs_along(axis: WindowAxis) -> tuple[int, int]:
    """Count the pairs along a dimension whose key comes before the query, and all of them, residue by residue."""
    cells, more = divmod(axis.size, axis.dilation)  # of a residue; so many have one more
    before = pairs = 0
    for count, length in ((more, cells + 1), (axis.dilation - more, cells)):
        inner = 0 if axis.cut else axis.kernel  # cells that no edge takes from a window
        starts = _leader_sum(axis, length, -axis.back, 0, length if axis.causal else length - inner)
        stops = _leader_sum(axis, length, axis.kernel - axis.back, inner, length)
        earlier = length * (length - 1) // 2 - starts
        before += count * earlier
        pairs += count * (earlier + length if axis.causal else stops - starts)
    return before, pairs


def _leader_sum(axis: WindowAxis, cells: int, shift: int, least: int, most: int) -> int:
    """Sum up `leader + shift`, at least `least` and at most `most`, over the cells of a residue."""
    whole, rest = divmod(cells, axis.stride)  # groups of cells that share a leader; the cells of a shorter last one
    first, last = axis.leader + shift, min(whole * axis.stride + axis.leader, cells - 1) + shift
    below = min(max(-(-(least - first) // axis.stride), 0), whole)
    inside = min(max((most - first) // axis.stride + 1, below), whole)
    between = (inside - below) * (2 * first + (below + inside - 1) * axis.stride) // 2
    return axis.stride * (below * least + between + (whole - inside) * most) + rest * min(max(last, least), most)


def _by_axis(name: str, values: Any, count: int | None, check: Callable[[str, Any], Any] = positive) -> tuple[Any, ...]:
    """Return `values` as a tuple, one for each dimension; a single one holds for all `count`, which None leaves open."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        checked: tuple[Any, ...] = (check(name, values),) * (count or 1)
    else:
        checked = tuple(check(f"{name}[{i}]", value) for i, value in enumerate(values))
    if not 1 <= len(checked) <= 3 or count not in (None, len(checked)):
        wanted = "1 to 3" if count is None else str(count)
        raise PatternError(f"{name}={checked} has {len(checked)} dimensions; {wanted} are needed")
    return checked
