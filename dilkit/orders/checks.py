"""Checks of the arguments of token orders, and of the tensors that they are applied to."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dilkit.checks import check_type, integer

if TYPE_CHECKING:
    from dilkit.orders.token_order import TokenOrder

Index: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
"""Row numbers: int32 below 2**31 tokens, else int64."""

CURVES = ("hilbert", "morton", "tile", "row-major", "snake")
MAX_DIMENSIONS = 3
MAX_TOKENS = 2**62
"""The most tokens whose row numbers can be added in 64 bits without overflow."""
_GRID = "(n,), (rows, columns) or (depth, rows, columns)"


def sizes(name: str, values: Any) -> tuple[int, ...]:
    """Return `values`, one integer an axis, as a tuple of ints. Raises TypeError for others."""
    if type(values) is not tuple and (isinstance(values, (str, bytes)) or not isinstance(values, Sequence)):
        raise TypeError(f"{name}={values!r} is a {type(values).__name__}; a sequence of integers is needed, {_GRID}")
    listed = tuple(values)
    if {*map(type, listed)} == {int}:
        return listed
    return tuple(integer(f"{name}[{i}]", size) for i, size in enumerate(listed))


def check_grid(shape: tuple[int, ...], extra_tokens: int) -> None:
    """Raise ValueError unless `shape` is a grid of 1 to 3 axes and, with the extra tokens, at most 2**62 tokens."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise ValueError(f"shape={shape} has {len(shape)} dimensions; 1 to {MAX_DIMENSIONS} are possible: {_GRID}")
    for i, size in enumerate(shape):
        if size < 1:
            raise ValueError(f"shape[{i}]={size} of shape={shape} must be at least 1")
    if prod(shape) + extra_tokens > MAX_TOKENS:
        raise ValueError(f"shape={shape} with extra_tokens={extra_tokens} has {prod(shape) + extra_tokens} tokens; at most 2**62")


def check_curve(curve: Any) -> None:
    """Raise TypeError or ValueError, suggesting the nearest name, unless `curve` is known."""
    check_type("curve", curve, str, f"a name is needed, one of {', '.join(map(repr, CURVES))}")
    if curve not in CURVES:
        meant = get_close_matches(curve.lower(), CURVES, 1)
        hint = f"did you mean {meant[0]!r}? All" if meant else "choose from"
        raise ValueError(f"curve={curve!r} is not known; {hint}: {', '.join(map(repr, CURVES))}")


def check_tile(tile: tuple[int, ...], shape: tuple[int, ...], curve: str) -> None:
    if curve != "tile":
        raise ValueError(f"tile={tile} does not go with curve={curve!r}; use curve='tile', or leave tile out")
    if len(tile) != len(shape):
        raise ValueError(f"tile={tile} has {len(tile)} dimensions and shape={shape} {len(shape)}; as many are needed")
    for i, (side, size) in enumerate(zip(tile, shape, strict=True)):
        if not 1 <= side <= size:
            raise ValueError(f"tile[{i}]={side} of tile={tile} must be from 1 to {size}, the grid's side (shape={shape})")


def permutation(values: Any) -> Index:
    """Copy `values` as row numbers. Raises TypeError or ValueError unless it is a permutation of `0 .. n - 1`."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("perm is a masked array; one without a mask is needed")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # lists of unequal lengths, tensors elsewhere than on the CPU
        raise TypeError(f"perm is a {type(values).__name__} that is no array of integers: {error}") from None
    if array.dtype.kind not in "iu":
        raise TypeError(f"perm has dtype {array.dtype}; integers are needed")
    if array.ndim != 1 or not len(array):
        raise ValueError(f"perm has shape {array.shape}; (n,) with n >= 1 is needed")
    n = len(array)
    if array.min() != 0 or array.max() != n - 1 or not (np.bincount(array, minlength=n) == 1).all():
        raise ValueError(f"perm is no permutation: each of 0 to {n - 1} must be there once")
    copy = empty(n)
    copy[:] = array
    return copy


def empty(tokens: int) -> Index:
    """Return an uninitialised table of row numbers, `(tokens,)`: int32 below 2**31 tokens, else int64. Raises MemoryError."""
    dtype = np.dtype(np.int32 if tokens < 2**31 else np.int64)
    try:
        return np.empty(tokens, dtype)
    except (MemoryError, ValueError):  # ValueError: more bytes than an address space has
        gigabytes = tokens * dtype.itemsize / 2**30
        raise MemoryError(
            f"out of memory for a table of {tokens:,} tokens ({gigabytes:,.1f} GiB); order a smaller grid"
        ) from None


def check_tokens(x: Any, dim: int, order: TokenOrder, name: str = "x") -> None:
    """Raise TypeError or ValueError unless `x` has as many tokens along `dim` as the order."""
    check_dim(x, dim, name)
    if x.shape[dim] != len(order):
        raise wrong_length(f"{name} has {x.shape[dim]} tokens along dim {dim}", x.shape[dim], order)


def check_dim(x: Any, dim: int, name: str = "x") -> None:
    if not -x.ndim <= integer("dim", dim) < x.ndim:
        raise ValueError(f"dim={dim} is no dimension of {name}, which has shape {tuple(x.shape)}")


def wrong_length(what: str, tokens: int, order: TokenOrder) -> ValueError:
    """Return the error for a sequence of another length than the order's; `what` begins its text."""
    cells, extra = len(order) - order.extra_tokens, order.extra_tokens
    grid = f"{' x '.join(map(str, order.shape))} cells and extra_tokens={extra}"
    if tokens == cells:
        hint = "extra_tokens=0 fits"
    elif tokens > cells:
        hint = f"extra_tokens={tokens - cells} would leave {tokens - cells} in front, such as a class token"
    else:
        hint = f"use an order of these tokens: of the grid that they come from, {_GRID}, or sort_points of their coordinates"
    return ValueError(f"{what}, but the order is of {len(order)}: {grid}; {hint}")
