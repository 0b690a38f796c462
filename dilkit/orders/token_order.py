"""Token orders: in which order the cells of a grid become the tokens of a sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dilkit.checks import boolean, integer
from dilkit.orders.checks import CURVES, check_curve, check_grid, check_tile, check_tokens, permutation, sizes
from dilkit.orders.curves import chosen_tile, draw, draw_transposed, hilbert_rank, inverse, is_power_of_two_cube
from dilkit.plan import Index, cached

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CURVES", "TokenOrder", "order"]


class Spec(NamedTuple):
    """What the order of a grid is made from, and found by."""

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
    threads: int = 1,
) -> TokenOrder:
    """The order in which `curve` visits the cells of a grid `(n,)`, `(rows, columns)` or `(depth, rows, columns)` of any size.

        order(shape, curve).perm[d] = row-major index of the d-th cell of the curve

    Curves, all of them beginning at cell 0:

    - `hilbert`: Hilbert's (Skilling's transform, doi 10.1063/1.1751381) where all sides are the same power of two, else the
      generalised Hilbert curve, whose steps are of length 1 as well; `TokenOrder.variant` says which;
    - `morton`: cells by Morton (Z-order) code; `row-major`: no change; `snake`: every other row backwards, unit steps;
    - `tile`: tile by tile, row-major among tiles and within; the tile's shape is `tile`, or else chosen (`TokenOrder.tile`).

    A grid of one axis has the one order, the identity. `extra_tokens` tokens, such as a class token, stay in front.
    `is_generation_order` says that tokens are generated in this order, which causal attention needs to be told. `threads` may
    help above some 4 million cells. Made once and kept in the cache of plans.

    Raises TypeError or ValueError naming the argument, and MemoryError for a grid whose table finds no room.
    """
    sides = sizes("shape", shape)
    boolean("is_generation_order", is_generation_order)
    extra_tokens, threads = integer("extra_tokens", extra_tokens, 0), integer("threads", threads, 1)
    check_curve(curve)
    block = None if tile is None else sizes("tile", tile)
    if curve == "tile" and block is None:
        check_grid(sides, extra_tokens)
        block = chosen_tile(sides)
    return _of(Spec(sides, curve, block, extra_tokens, is_generation_order), threads)


def _of(spec: Spec, threads: int = 1) -> TokenOrder:
    """The order of a grid, from the cache or made: what is wrong with `spec` is found here, before anything is kept."""
    return cached(("order", spec), partial(_made, spec, threads))


def _made(spec: Spec, threads: int) -> TokenOrder:
    shape, curve, tile, extra_tokens, is_generation_order, is_transposed = spec
    check_grid(shape, extra_tokens)
    if tile is not None:
        check_tile(tile, shape, curve)
    drawn = (draw_transposed if is_transposed else draw)(shape, curve, tile, extra_tokens, threads)
    return TokenOrder(shape, curve, drawn, tile, extra_tokens, is_generation_order, is_transposed, spec)


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """A permutation of the tokens of a sequence: `order(...)` makes one of a grid, `sort_points(...)` one of points.

        apply(x)[d] = x[perm[d]]        restore(y)[i] = y[rank[i]]        rank[perm[d]] = d

    The tokens are the `extra_tokens`, which stay in front, and after them the cells of the grid, row-major to begin with.
    Orders are values: equal where they are made alike, never changed, safe for threads, cheap to copy and to pickle (the order
    of a grid travels as what it is made from). Arrays are read-only.
    """

    shape: tuple[int, ...]
    """The grid, `(rows, columns)` or `(depth, rows, columns)`; `(n,)` for a sequence or for points."""
    curve: str
    """The name of the curve."""
    perm: Index
    """`(seq,)`: place in this order -> row-major index, extra tokens among them; int32 below 2**31 tokens, else int64."""
    tile: tuple[int, ...] | None = None
    """The shape of a tile, as given or chosen; None for other curves."""
    extra_tokens: int = 0
    """How many tokens stay in front of those of the grid."""
    is_generation_order: bool = False
    """Whether tokens are generated in this order: causal attention then goes by it."""
    is_transposed: bool = False
    """Whether the curve runs through the grid with its axes reversed."""
    spec: Spec | None = None
    """What `order` makes this of; None for a permutation that was given."""
    is_identity: bool = field(init=False)
    """Whether no token moves."""
    text: str | None = field(init=False)
    """`spec` as JSON: what compiled graphs carry."""
    _own: dict[Hashable, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        perm = _locked(self.perm if self.perm.flags.writeable else self.perm.copy())
        object.__setattr__(self, "perm", perm)
        object.__setattr__(self, "is_identity", _is_identity(perm))
        object.__setattr__(self, "text", None if self.spec is None else json.dumps(self.spec))

    @classmethod
    def from_permutation(
        cls, perm: Any, *, curve: str = "given", extra_tokens: int = 0, is_generation_order: bool = False
    ) -> TokenOrder:
        """The order of a permutation `(n,)` of `0 .. n - 1`, behind `extra_tokens` more tokens. `curve` is its name.

        Raises TypeError or ValueError for what is no permutation.
        """
        extra_tokens = integer("extra_tokens", extra_tokens, 0)
        boolean("is_generation_order", is_generation_order)
        cells = permutation(perm)
        if extra_tokens:
            cells = np.concatenate([np.arange(extra_tokens, dtype=cells.dtype), cells + cells.dtype.type(extra_tokens)])
        return cls((len(cells) - extra_tokens,), curve, cells, None, extra_tokens, is_generation_order)

    @staticmethod
    def from_text(text: str) -> TokenOrder:
        """The order of a grid that has this `text`."""
        shape, curve, tile, *options = json.loads(text)
        return _of(Spec(tuple(shape), curve, None if tile is None else tuple(tile), *options))

    @property
    def rank(self) -> Index:
        """`(seq,)`: row-major index -> place in this order, the inverse of `perm`; made at first use and then kept."""
        rank: Index = self.kept("rank", self._inverse)
        return rank

    @property
    def variant(self) -> str | None:
        """Which Hilbert curve this is: "true" (all sides the same power of two) or "generalised"; None for other curves."""
        if self.curve != "hilbert" or len(self.shape) == 1:
            return None
        return "true" if is_power_of_two_cube(self.shape) else "generalised"

    @property
    def nbytes(self) -> int:
        """Bytes of `perm`. The rank and the copies on devices are made when needed, and counted for themselves."""
        return self.perm.nbytes

    def __len__(self) -> int:
        return len(self.perm)

    def apply(self, x: Any, dim: int = 1) -> Any:
        """A tensor or array `x`, whose tokens along `dim` are row-major, with them in this order: `out[d] = x[perm[d]]`.

        Differentiable. Raises ValueError if `x` has another number of tokens, TypeError if it is neither tensor nor array.
        """
        return self._moved(x, dim, False)

    def restore(self, x: Any, dim: int = 1) -> Any:
        """The inverse of `apply`: `x`, whose tokens along `dim` are in this order, with them row-major again."""
        return self._moved(x, dim, True)

    def coordinates(self) -> Index:
        """`(cells, len(shape))`: the cells as this order visits them, without the extra tokens."""
        found: Index = np.empty((len(self) - self.extra_tokens, len(self.shape)), self.perm.dtype)
        found.T[:] = np.unravel_index(self.perm[self.extra_tokens :] - self.perm.dtype.type(self.extra_tokens), self.shape)
        return found

    def transposed(self) -> TokenOrder:
        """The same curve through the grid with its axes reversed. Raises ValueError where there is no grid.

        A generalised Hilbert curve goes along the longest side, whichever axis that is: where sides differ, it stays the same.
        """
        if self.spec is None:
            raise ValueError(f"{self!r} has no grid to transpose; sort the points with their axes reversed (coords[:, ::-1])")
        if len(self.shape) == 1:
            return self
        return _of(self.spec._replace(is_transposed=not self.is_transposed))

    def index(self, device: torch.device, inverse: bool = False) -> Tensor:
        """`perm`, or `rank` if `inverse`, as a tensor on `device` that must not be written to; kept with the plans."""
        from dilkit.orders.operators import index_of

        return index_of(self, device, inverse)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenOrder):
            return NotImplemented
        if self.spec is not None or other.spec is not None:
            return self.spec == other.spec
        same = (self.curve, self.extra_tokens, self.is_generation_order) == (
            other.curve,
            other.extra_tokens,
            other.is_generation_order,
        )
        return self is other or (same and bool(np.array_equal(self.perm, other.perm)))

    def __hash__(self) -> int:
        return hash(self.spec or (self.curve, self.extra_tokens, len(self)))

    def __deepcopy__(self, memo: Any) -> TokenOrder:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.spec is not None:
            return _of, (self.spec,)
        return TokenOrder, (self.shape, self.curve, np.array(self.perm), None, self.extra_tokens, self.is_generation_order)

    def __repr__(self) -> str:
        options = "".join(f", {k}={v!r}" for k, v in {"tile": self.tile, "extra_tokens": self.extra_tokens}.items() if v)
        options += ", is_generation_order=True" * self.is_generation_order
        if self.spec is None:
            return f"<TokenOrder of {self.shape[0]} points, curve={self.curve!r}{options}>"
        return f"order({self.shape}, {self.curve!r}{options})" + ".transposed()" * self.is_transposed

    def _moved(self, x: Any, dim: int, inverse: bool) -> Any:
        if isinstance(x, np.ndarray):
            check_tokens(x, dim, self)
            return np.take(x, self.rank if inverse else self.perm, dim)
        from dilkit.orders.operators import moved

        return moved(x, dim, self, inverse)

    def _inverse(self) -> Index:
        if self.spec is not None and self.variant == "true" and not self.is_transposed:
            return _locked(hilbert_rank(self.shape, self.extra_tokens))
        return _locked(inverse(self.perm))

    def kept(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, kept with the plans; for an order that the cache does not know of, as long as that lives."""
        if self.spec is not None:
            return cached(("order", name, self.spec), make)
        return self._own[name] if name in self._own else self._own.setdefault(name, make())


def _locked(array: Index) -> Index:
    """A read-only view. What it views stays writable, so that torch can share its memory (`dilkit.orders.operators`)."""
    view = array.view()
    view.setflags(write=False)
    return view


def _is_identity(perm: Index) -> bool:
    """Looks at a few places first: most orders are told apart there."""
    return all(np.array_equal(perm[:places], np.arange(len(perm[:places]))) for places in (64, len(perm)))
