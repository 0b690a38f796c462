"""`Neighborhood`: the cells around each cell of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.checks import one_of
from dilkit.pattern.checks import PatternError, positive
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import CutGrid, Grid

if TYPE_CHECKING:
    from torch import Tensor

Sizes = int | Sequence[int]

BORDERS = ("move", "cut")

MOST_CUT = 2**20
"""Cells of a window that edges cut off, at most: the sum over the branches of a pattern fits into 32 bits."""


@dataclass(frozen=True)
class Neighborhood(Branch):
    """Every token of a row-major grid sees those around it: in each dimension the `kernel_size` nearest ones.

        i sees j  if  in every dimension  i = r (mod d), j = r (mod d)  and  start <= j // d < start + k

    Here i and j are coordinates, `d = dilation`, `k = kernel_size`, r is a residue, n the number of coordinates with it, and
    `start = min(max(i // d - k // 2, 0), n - k)`: a window moves back from an edge, so that every token sees equally many
    (NATTEN: arXiv 2204.07143, and 2209.15001 for dilation).

    - `shape`: the grid, of one, two or three dimensions; a sequence has as many tokens as it has cells.
    - `kernel_size`, `dilation`: an integer for all dimensions or one for each; kernel sizes are odd, and with the border "move"
      `kernel_size * dilation` is at most the size of the grid.
    - `border`: "move", as above, or "cut": `start = i // d - k // 2`, and tokens near an edge see fewer. With `tail="zeros"` of
      the pattern they see a zero key, of score 0 and value 0, for each cell that is missing, as DilateFormer's windows do (arXiv
      2302.01791). A window that is cut has at most 2**20 cells.
    - `heads`: the query heads (start, stop) that it serves; None means all.

    Under causality a query sees those of its neighbours that do not come after it in the sequence, and windows move back from
    edges all the same. Raises `PatternError` or TypeError.

        >>> from dilkit import Neighborhood, Pattern
        >>> Pattern.of(Neighborhood(6, kernel_size=3)).count(6, 1)[0].tolist()[:2]
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
        >>> Pattern.of(Neighborhood((3, 4), kernel_size=(3, 1))).count(12, 1)[0, 5].view(3, 4).tolist()
        [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
        >>> pattern = Pattern.of(Neighborhood(6, kernel_size=3, border="cut"), tail="zeros")
        >>> pattern.count(6, 1)[0, 0].tolist(), pattern.zero_keys(6, 1)[0].tolist()
        ([1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1])
    """

    kind: ClassVar[str] = "neighborhood"

    shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    border: str = "move"
    heads: tuple[int, int] | None = None

    def __init__(
        self,
        shape: Sizes,
        kernel_size: Sizes,
        dilation: Sizes = 1,
        heads: range | tuple[int, int] | None = None,
        *,
        border: str = "move",
    ) -> None:
        one_of("border", border, BORDERS, PatternError)
        grid = _sizes("shape", shape, None)
        kernel, steps = _sizes("kernel_size", kernel_size, len(grid)), _sizes("dilation", dilation, len(grid))
        for size, width, step in zip(grid, kernel, steps, strict=True):
            if width % 2 == 0:
                raise PatternError(f"kernel_size={kernel}: {width} is even, and cannot lie evenly around a token; give odd sizes")
            if width * step > size and border == "move":
                spans = f"{width * step} of a grid of shape {grid}"
                raise PatternError(f"kernel_size={kernel} with dilation={steps} spans {spans}; at most {size}")
        if border == "cut" and math.prod(kernel) > MOST_CUT:
            raise PatternError(f"kernel_size={kernel} with border='cut' has {math.prod(kernel):,} cells; at most {MOST_CUT:,}")
        for name, value in dict(shape=grid, kernel_size=kernel, dilation=steps, border=border, heads=heads).items():
            object.__setattr__(self, name, value)
        self._settle()

    def call(self) -> str:
        return super().call().replace(f", dilation={(1,) * len(self.shape)!r}", "")

    def to_fields(self) -> dict[str, Any]:
        values = super().to_fields()
        if self.border == "move":  # the only one that there once was: the text of such a pattern stays what it was
            del values["border"]
        return values

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
        for size, width, step in zip(self.shape, self.kernel_size, self.dilation, strict=True):
            cells //= size
            i, j = rows // cells % size, keys // cells % size
            start = i // step - width // 2
            if self.border == "move":
                start = torch.minimum(start.clamp(min=0), (size - i % step - 1) // step + 1 - width)
            near = (start[:, None] <= j // step) & (j // step < start[:, None] + width)
            seen &= near & (i[:, None] % step == j % step)
        return seen[None]

    def zero_keys(self, rows: Tensor, seq: Tensor, heads: Heads) -> Tensor | int:
        """Count the cells of each row's window beyond an edge that cuts it off: `(1, m)`."""
        if self.border == "move":
            return 0
        there, cells = rows.new_ones(len(rows)), self.tokens
        for size, width, step in zip(self.shape, self.kernel_size, self.dilation, strict=True):
            cells //= size
            place = rows // cells % size
            before, after = place // step, (size - 1 - place) // step
            there = there * (before.clamp(max=width // 2) + after.clamp(max=width // 2) + 1)
        return (math.prod(self.kernel_size) - there)[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        earlier, cells, all_pairs = 0, 1, 1  # pairs whose key comes before the query, is it, and all: from the last dimension on
        for size, width, step in zip(*map(reversed, (self.shape, self.kernel_size, self.dilation)), strict=True):
            before = size * (width // 2) if self.border == "move" else _cut_before(size, width, step)
            earlier = before * all_pairs + size * earlier
            cells, all_pairs = cells * size, all_pairs * (size + 2 * before)
        return len(self.served(heads)) * (earlier + cells if is_causal else all_pairs)

    def forms(self, heads: Heads, seq: int) -> Iterable[Grid]:
        steps = tuple(map(min, self.dilation, self.shape))  # beyond, each cell is alone as well
        form = Grid if self.border == "move" else CutGrid
        return [form(heads=self.range_served(heads), shape=self.shape, kernel=self.kernel_size, dilation=steps)]

    def __str__(self) -> str:
        grid, kernel = (" x ".join(map(str, sizes)) for sizes in (self.shape, self.kernel_size))
        steps = "" if set(self.dilation) == {1} else f", 1 in {' x '.join(map(str, self.dilation))}"
        border = "" if self.border == "move" else ", cut off at edges"
        return f"neighborhoods of {kernel} in a grid of {grid}{steps}{border}{self.heads_text()}"


def _cut_before(size: int, width: int, step: int) -> int:
    """Count the pairs along a dimension whose key comes before the query, in windows that edges cut off, by residue."""
    cells, more = divmod(size, step)  # of a residue; so many have one more
    pairs = 0
    for count, length in ((more, cells + 1), (step - more, cells)):
        reach = min(width // 2, max(length - 1, 0))
        pairs += count * (reach * length - reach * (reach + 1) // 2)
    return pairs


def _sizes(name: str, sizes: Any, count: int | None) -> tuple[int, ...]:
    """Return `sizes` as a tuple, one for each dimension; a single integer holds for all `count`, which None leaves open."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        checked: tuple[int, ...] = (positive(name, sizes),) * (count or 1)
    else:
        checked = tuple(positive(f"{name}[{i}]", size) for i, size in enumerate(sizes))
    if not 1 <= len(checked) <= 3 or count not in (None, len(checked)):
        wanted = "1 to 3" if count is None else str(count)
        raise PatternError(f"{name}={checked} has {len(checked)} dimensions; {wanted} are needed")
    return checked
