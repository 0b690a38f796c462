"""Token orders: permutations that put the cells of a grid into a sequence, along a space-filling curve."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dilkit.checks import boolean, check_type, integer
from dilkit.orders.checks import CURVES, Index, check_curve, check_grid, check_tile, check_tokens, empty, permutation, sizes
from dilkit.orders.curves import chosen_tile, curve_permutation, inverse, is_power_of_two_cube
from dilkit.plan import cached

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CURVES", "TokenOrder", "order"]


class GridSpec(NamedTuple):
    """The arguments that the order of a grid is made from. They are its key in the cache."""

    shape: tuple[int, ...]
    curve: str
    tile: tuple[int, ...] | None
    extra_tokens: int
    is_generation_order: bool
    is_transposed: bool = False


def order(
    shape: Sequence[int],
    curve: str = "hilbert",
    *,
    tile: Sequence[int] | None = None,
    extra_tokens: int = 0,
    is_generation_order: bool = False,
) -> TokenOrder:
    """Order the cells of a grid `(n,)`, `(rows, columns)` or `(depth, rows, columns)`, of any size, as `curve` visits them.

        order(shape, curve).perm[d] = row-major index of the d-th cell of the curve

    All curves begin at cell 0:

    - `hilbert`: the Hilbert curve (Skilling's transform, doi 10.1063/1.1751381) if all sides are the same power of two, else the
      generalised Hilbert curve, whose steps have length 1 as well; `TokenOrder.variant` says which;
    - `morton`: cells by Morton (Z-order) code;
    - `row-major`: no change;
    - `snake`: every other row backwards, so that steps have length 1;
    - `tile`: tile by tile; tiles, and the cells of a tile, are in row-major order. `tile` is the shape of a tile; the default is
      one of about 64 cells (`TokenOrder.tile`).

    The only order of a grid with one axis is the identity. `extra_tokens` tokens, such as a class token, stay in front.
    `is_generation_order` says that tokens are generated in this order; causal attention along an order requires it. An
    order is made once and then kept in the cache of `dilkit.plan`.

    Raises TypeError or ValueError naming the argument, and MemoryError if there is no memory for the table.

    Example:

        >>> from dilkit import order
        >>> hilbert = order((4, 4))
        >>> hilbert.perm.tolist()
        [0, 4, 5, 1, 2, 3, 7, 6, 10, 11, 15, 14, 13, 9, 8, 12]
        >>> order((4, 4), "tile", tile=(2, 2)).perm.tolist()
        [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
        >>> order((33, 45, 80)).variant, order((4, 4)) is hilbert
        ('generalised', True)
    """
    sides = sizes("shape", shape)
    boolean("is_generation_order", is_generation_order)
    extra_tokens = integer("extra_tokens", extra_tokens, 0)
    check_curve(curve)
    block = None if tile is None else sizes("tile", tile)
    if curve == "tile" and block is None:
        check_grid(sides, extra_tokens)
        block = chosen_tile(sides)
    return _grid_order(GridSpec(sides, curve, block, extra_tokens, is_generation_order))


def _grid_order(spec: GridSpec) -> TokenOrder:
    """Return the order of a grid, from the cache or made now. Raises for a `spec` that does not fit; then nothing is cached."""
    return cached(("order", spec), partial(_make_grid_order, spec))


def _make_grid_order(spec: GridSpec) -> TokenOrder:
    shape, curve, tile, extra_tokens, is_generation_order, is_transposed = spec
    check_grid(shape, extra_tokens)
    if tile is not None:
        check_tile(tile, shape, curve)
    perm = curve_permutation(shape, curve, tile, extra_tokens, is_transposed)
    return TokenOrder(shape, curve, perm, tile, extra_tokens, is_generation_order, is_transposed, spec, checked=True)


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """A permutation of the tokens of a sequence: `order(...)` makes one of a grid, `sort_points(...)` one of points.

        apply(x)[d] = x[perm[d]]        restore(y)[i] = y[rank[i]]        rank[perm[d]] = d

    The tokens are the `extra_tokens`, which stay in front, followed by the cells of the grid in row-major order.
    Orders are immutable values: two that are made from the same arguments are equal. They are safe for threads and cheap to copy
    and to pickle (the order of a grid is pickled as its arguments). Arrays are read-only.

    Example:

        >>> import torch
        >>> from dilkit import TokenOrder, order
        >>> snake = order((2, 3), "snake")
        >>> x = torch.tensor([[0, 1, 2, 3, 4, 5]])  # (batch, seq), row-major
        >>> snake.apply(x).tolist(), torch.equal(snake.restore(snake.apply(x)), x)
        ([[0, 1, 2, 5, 4, 3]], True)
        >>> snake.rank.tolist(), snake.coordinates().tolist()[3]
        ([0, 1, 2, 5, 4, 3], [1, 2])
        >>> TokenOrder.from_permutation([2, 0, 1], extra_tokens=1).perm.tolist()
        [0, 3, 1, 2]
    """

    shape: tuple[int, ...]
    """The grid, `(rows, columns)` or `(depth, rows, columns)`; `(n,)` for a sequence or for points."""
    curve: str
    """The name of the curve."""
    perm: Index
    """`(seq,)`: the row-major index at each place of this order, extra tokens included; int32 below 2**31 tokens, else int64."""
    tile: tuple[int, ...] | None = None
    """The shape of a tile, as given or chosen; None for other curves."""
    extra_tokens: int = 0
    """Number of tokens that stay in front of those of the grid."""
    is_generation_order: bool = False
    """True if tokens are generated in this order, so that causal attention may follow it."""
    is_transposed: bool = False
    """True if the curve runs through the grid with its axes reversed."""
    spec: GridSpec | None = None
    """The arguments that `order` made this from; None for a given permutation."""
    checked: InitVar[bool] = False
    """True if `perm` is known to be a permutation of `shape` and the extra tokens; else it is checked."""
    is_identity: bool = field(init=False)
    """True if no token moves."""
    text: str | None = field(init=False)
    """`spec` as JSON, as compiled graphs hold it; None for a given permutation."""
    _own: dict[Hashable, Any] = field(init=False, default_factory=dict)

    def __post_init__(self, checked: bool) -> None:
        if not checked:
            self._check()
        perm = _locked(self.perm if self.perm.flags.writeable else self.perm.copy())
        object.__setattr__(self, "perm", perm)
        some_then_all = (64, len(perm))  # most orders differ in the first few places
        is_identity = all(np.array_equal(perm[:count], np.arange(len(perm[:count]))) for count in some_then_all)
        object.__setattr__(self, "is_identity", is_identity)
        object.__setattr__(self, "text", None if self.spec is None else json.dumps(self.spec))

    def _check(self) -> None:
        check_type("curve", self.curve, str, "a name is needed")
        boolean("is_generation_order", self.is_generation_order)
        shape, extra = sizes("shape", self.shape), integer("extra_tokens", self.extra_tokens, 0)
        check_grid(shape, extra)
        cells = prod(shape)
        object.__setattr__(self, "perm", permutation(self.perm))
        object.__setattr__(self, "spec", None)  # as of `dataclasses.replace`, which may have changed what it says
        if len(self.perm) != cells + extra or not np.array_equal(self.perm[:extra], np.arange(extra)):
            raise ValueError(f"perm has {len(self.perm)} places; {cells} cells of shape={self.shape} behind {extra} extra tokens")

    @classmethod
    def from_permutation(
        cls, perm: Any, *, curve: str = "given", extra_tokens: int = 0, is_generation_order: bool = False
    ) -> TokenOrder:
        """Make the order of a permutation `(n,)` of `0 .. n - 1`, behind `extra_tokens` more tokens. `curve` is its name.

        Raises TypeError or ValueError for values that are not a permutation.
        """
        extra_tokens, grid = integer("extra_tokens", extra_tokens, 0), permutation(perm)
        check_grid((len(grid),), extra_tokens)
        cells = empty(extra_tokens + len(grid))
        cells[:extra_tokens] = np.arange(extra_tokens)
        cells[extra_tokens:] = grid
        cells[extra_tokens:] += extra_tokens
        return cls((len(grid),), curve, cells, None, extra_tokens, is_generation_order)

    @staticmethod
    def from_text(text: str) -> TokenOrder:
        """Return the order of a grid that has this `text`."""
        shape, curve, tile, *options = json.loads(text)
        return _grid_order(GridSpec(tuple(shape), curve, None if tile is None else tuple(tile), *options))

    @property
    def rank(self) -> Index:
        """`(seq,)`: the place in this order of each row-major index, the inverse of `perm`; made at first use and then kept."""
        rank: Index = self.kept("rank", lambda: _locked(inverse(self.perm)))
        return rank

    @property
    def variant(self) -> str | None:
        """The kind of Hilbert curve: "true" (all sides the same power of two) or "generalised"; None for other curves."""
        if self.curve != "hilbert" or len(self.shape) == 1:
            return None
        return "true" if is_power_of_two_cube(self.shape) else "generalised"

    @property
    def nbytes(self) -> int:
        """Bytes of `perm`. `rank` and the copies on devices are made when needed, and are entries of their own in the cache."""
        return self.perm.nbytes

    def __len__(self) -> int:
        return len(self.perm)

    def apply(self, x: Any, dim: int = 1) -> Any:
        """Move the tokens of `x` along `dim` from row-major order into this order: `out[d] = x[perm[d]]`.

        `x` is a torch tensor or a numpy array.

        Differentiable. Raises ValueError if `x` has another number of tokens, TypeError if it is neither tensor nor array.
        """
        return self._moved(x, dim, False)

    def restore(self, x: Any, dim: int = 1) -> Any:
        """Move the tokens of `x` along `dim` from this order back into row-major order: the inverse of `apply`."""
        return self._moved(x, dim, True)

    def coordinates(self) -> Index:
        """Return `(cells, len(shape))`: the coordinates of the cells in this order, without the extra tokens."""
        cells: Index = np.empty((len(self) - self.extra_tokens, len(self.shape)), self.perm.dtype)
        cells.T[:] = np.unravel_index(self.perm[self.extra_tokens :] - self.perm.dtype.type(self.extra_tokens), self.shape)
        return cells

    def transposed(self) -> TokenOrder:
        """Return the order of the curve through the grid with its axes reversed. Raises ValueError where there is no grid.

        A generalised Hilbert curve runs along the longest side, whichever axis that is, so it stays the same where sides differ.
        """
        if self.spec is None:
            raise ValueError(f"{self!r} has no grid to transpose; sort the points with their axes reversed (coords[:, ::-1])")
        if len(self.shape) == 1:
            return self
        return _grid_order(self.spec._replace(is_transposed=not self.is_transposed))

    def index(self, device: torch.device, inverse: bool = False) -> Tensor:
        """Return `perm`, or `rank` if `inverse`, as a tensor on `device`. It stays in the cache and must not be written to."""
        from dilkit.orders.operators import index_of

        return index_of(self, device, inverse)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenOrder):
            return NotImplemented
        if self.spec is not None or other.spec is not None:
            return self.spec == other.spec
        mine, its = ((one.shape, one.curve, one.extra_tokens, one.is_generation_order) for one in (self, other))
        return self is other or (mine == its and bool(np.array_equal(self.perm, other.perm)))

    def __hash__(self) -> int:
        return hash(self.spec or (self.curve, self.extra_tokens, len(self)))

    def __deepcopy__(self, memo: Any) -> TokenOrder:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.spec is not None:
            return _grid_order, (self.spec,)
        options = self.tile, self.extra_tokens, self.is_generation_order, self.is_transposed
        return TokenOrder, (self.shape, self.curve, np.array(self.perm), *options)

    def __repr__(self) -> str:
        options = "".join(f", {k}={v!r}" for k, v in {"tile": self.tile, "extra_tokens": self.extra_tokens}.items() if v)
        options += ", is_generation_order=True" * self.is_generation_order
        if self.spec is None:
            return f"<TokenOrder of {' x '.join(map(str, self.shape))} points, curve={self.curve!r}{options}>"
        return f"order({self.shape}, {self.curve!r}{options})" + ".transposed()" * self.is_transposed

    def _moved(self, x: Any, dim: int, inverse: bool) -> Any:
        if isinstance(x, np.ndarray):
            check_tokens(x, dim, self)
            return np.take(x, self.rank if inverse else self.perm, dim)
        from dilkit.orders.operators import moved

        return moved(x, dim, self, inverse)

    def kept(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached: in the pattern cache for the order of a grid, else in the order itself."""
        if self.spec is not None:
            return cached(("order", name, self.spec), make)
        return self._own[name] if name in self._own else self._own.setdefault(name, make())


def check_order(order: Any) -> None:
    check_type("order", order, TokenOrder, "a TokenOrder is needed, such as dilkit.order((64, 64))")


def _locked(array: Index) -> Index:
    """Return a read-only view. The array itself stays writable: torch shares its memory (`dilkit.orders.operators`)."""
    view = array.view()
    view.setflags(write=False)
    return view
