"""`Neighborhood`: the cells around each cell of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.checks import integer
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Grid

if TYPE_CHECKING:
    from torch import Tensor

Sizes = int | Sequence[int]


@dataclass(frozen=True)
class Neighborhood(Branch):
    """Every token of a row-major grid sees those around it: in each dimension the `kernel_size` nearest ones.

        i sees j  if  in every dimension  i = r (mod d), j = r (mod d)  and  start <= j // d < start + k

    Here i and j are coordinates, `d = dilation`, `k = kernel_size`, r is a residue, n the number of coordinates with it, and
    `start = min(max(i // d - k // 2, 0), n - k)`: a window does not reach beyond an edge but moves back from it, so that every
    token sees equally many (NATTEN: arXiv 2204.07143, and 2209.15001 for dilation).

    - `shape`: the grid, of one, two or three dimensions; a sequence has as many tokens as it has cells.
    - `kernel_size`, `dilation`: an integer for all dimensions or one for each; kernel sizes are odd, and
      `kernel_size * dilation` is at most the size of the grid.
    - `heads`: the range (start, stop) of query heads that the branch serves; None means all of them.

    Under causality a query sees those of its neighbours that do not come after it in the sequence, and windows move back from
    edges all the same. Raises `PatternError` or TypeError.

        >>> from dilkit import Neighborhood, Pattern
        >>> Pattern.of(Neighborhood(6, kernel_size=3)).count(6, 1)[0].tolist()[:2]
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
        >>> Pattern.of(Neighborhood((3, 4), kernel_size=(3, 1))).count(12, 1)[0, 5].view(3, 4).tolist()
        [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    """

    kind: ClassVar[str] = "neighborhood"

    shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    heads: tuple[int, int] | None = None

    def __init__(
        self, shape: Sizes, kernel_size: Sizes, dilation: Sizes = 1, heads: range | tuple[int, int] | None = None
    ) -> None:
        grid = _sizes("shape", shape, None)
        kernel, steps = _sizes("kernel_size", kernel_size, len(grid)), _sizes("dilation", dilation, len(grid))
        for size, width, step in zip(grid, kernel, steps, strict=True):
            if width % 2 == 0:
                raise PatternError(f"kernel_size={kernel}: {width} is even, and cannot lie evenly around a token; give odd sizes")
            if width * step > size:
                raise PatternError(
                    f"kernel_size={kernel} with dilation={steps} spans {width * step} of a grid of shape {grid}; at most {size}"
                )
        for name, value in dict(shape=grid, kernel_size=kernel, dilation=steps, heads=heads).items():
            object.__setattr__(self, name, value)
        self._settle()

    def call(self) -> str:
        return super().call().replace(f", dilation={(1,) * len(self.shape)!r}", "")

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
            raise PatternError(
                f"seq={seq}: the neighborhood is of a grid of {shape}, {self.tokens} tokens; exactly these are needed"
            )

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        seen, cells = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device), self.tokens
        for size, width, step in zip(self.shape, self.kernel_size, self.dilation, strict=True):
            cells //= size
            i, j = rows // cells % size, keys // cells % size
            start = torch.minimum((i // step - width // 2).clamp(min=0), (size - i % step - 1) // step + 1 - width)[:, None]
            seen &= (i[:, None] % step == j % step) & (start <= j // step) & (j // step < start + width)
        return seen[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        earlier, own, all_pairs = 0, 1, 1  # pairs whose key comes before the query, is it, and all: from the last dimension on
        for size, width in zip(reversed(self.shape), reversed(self.kernel_size), strict=True):
            earlier = size * (width // 2) * all_pairs + size * earlier
            own, all_pairs = own * size, all_pairs * size * width
        return len(self.served(heads)) * (earlier + own if is_causal else all_pairs)

    def forms(self, heads: Heads, seq: int) -> Iterable[Grid]:
        return [Grid(heads=self.range_served(heads), shape=self.shape, kernel=self.kernel_size, dilation=self.dilation)]

    def __str__(self) -> str:
        grid, kernel = (" x ".join(map(str, sizes)) for sizes in (self.shape, self.kernel_size))
        steps = "" if set(self.dilation) == {1} else f", 1 in {' x '.join(map(str, self.dilation))}"
        return f"neighborhoods of {kernel} in a grid of {grid}{steps}{self.heads_text()}"


def _sizes(name: str, sizes: Any, count: int | None) -> tuple[int, ...]:
    """`sizes` as a tuple, one for each dimension; a single integer holds for all `count`, which None leaves open."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        number = integer(name, sizes)
        given: tuple[int, ...] = (number,) * (count or 1)
    else:
        given = tuple(integer(f"{name}[{i}]", size) for i, size in enumerate(sizes))
    if not 1 <= len(given) <= 3 or count not in (None, len(given)):
        wanted = "1 to 3" if count is None else str(count)
        raise PatternError(f"{name}={given} has {len(given)} dimensions; {wanted} are needed")
    for size in given:
        if not 1 <= size <= WHOLE_SEQUENCE:
            raise PatternError(f"{name}={given}: {size} must be from 1 to 2**63 - 1")
    return given
