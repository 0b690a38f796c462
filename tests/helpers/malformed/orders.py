"""Malformed token orders, points and reports on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers.malformed.case import MASK, Case, P, Q

from dilkit import PatternError, TokenOrder, locality_report, order, ordered_dilated_attention, sort_points

GRID = order((2, 3))
X = torch.zeros(1, 6)
CELLS = np.zeros((3, 2), int)
CURVES = ("hilbert", "snake", "row-major", "morton")


def made(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: order(*args, **options)


def given(perm: Any, **options: Any) -> Callable[[], Any]:
    return lambda: TokenOrder.from_permutation(perm, **options)


def along(orders: Any, **options: Any) -> Callable[[], Any]:
    return lambda: ordered_dilated_attention(Q, Q, Q, P, orders, **options)


def points(coords: Any = CELLS, **options: Any) -> Callable[[], Any]:
    return lambda: sort_points(coords, **options)


def report(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: locality_report(*args, **options)


ORDERS = {
    "shape is a number": Case(made(8), TypeError, ("shape=8", "int", "(rows, columns)")),
    "shape is a text": Case(made("8x8"), TypeError, ("shape='8x8'", "str", "sequence")),
    "shape of 4 axes": Case(made((2, 2, 2, 2)), ValueError, ("shape=(2, 2, 2, 2)", "4 dimensions", "1 to 3")),
    "shape of no axis": Case(made(()), ValueError, ("shape=()", "1 to 3")),
    "side of 0": Case(made((0, 4)), ValueError, ("shape[0]=0", "at least 1")),
    "side of a fraction": Case(made((4.0, 4)), TypeError, ("shape[0]=4.0", "integer")),
    "too many tokens": Case(made((2**40, 2**40)), ValueError, ("shape=", "at most 2**62")),
    "unknown curve": Case(made((4, 4), "hilber"), ValueError, ("curve='hilber'", "did you mean 'hilbert'")),
    "curve is None": Case(made((4, 4), None), TypeError, ("curve=None", "'morton'")),
    "tile of another curve": Case(made((4, 4), tile=(2, 2)), ValueError, ("tile=(2, 2)", "curve='hilbert'", "'tile'")),
    "tile of one side": Case(made((4, 4), "tile", tile=(2,)), ValueError, ("tile=(2,)", "1 dimensions", "as many")),
    "tile is a number": Case(made((4, 4), "tile", tile=2), TypeError, ("tile=2", "sequence")),
    "tile beyond the grid": Case(made((4, 4), "tile", tile=(8, 2)), ValueError, ("tile[0]=8", "from 1 to 4")),
    "extra tokens below 0": Case(made((4, 4), extra_tokens=-1), ValueError, ("extra_tokens=-1", "at least 0")),
    "no threads": Case(made((4, 4), threads=0), ValueError, ("threads=0", "at least 1")),
    "generation order of a text": Case(made((4, 4), is_generation_order="yes"), TypeError, ("is_generation_order='yes'",)),
    "a place twice": Case(given([0, 0, 1]), ValueError, ("perm", "each of 0 to 2", "once")),
    "places from 1 on": Case(given([1, 2, 3]), ValueError, ("perm", "each of 0 to 2", "once")),
    "places are floats": Case(given([0.0, 1.0]), TypeError, ("perm", "float64", "integers")),
    "places of 2 dimensions": Case(given([[0, 1]]), ValueError, ("perm", "(1, 2)", "(n,)")),
    "places of no one": Case(given(np.zeros(0, int)), ValueError, ("perm", "(0,)", "n >= 1")),
    "places of unequal lists": Case(given([[0], [1, 2]]), TypeError, ("perm", "list", "array of integers")),
    "places elsewhere": Case(given(torch.arange(2, device="meta")), TypeError, ("perm", "Tensor", "cpu()")),
    "places under a mask": Case(given(np.ma.masked_array([1, 0], [True, False])), TypeError, ("perm", "masked")),
    "more extra tokens than there can be": Case(
        given([1, 0], extra_tokens=2**70), ValueError, ("extra_tokens=", "at most 2**62")
    ),
    "places under a number": Case(given([0, 1], curve=3), TypeError, ("curve=3", "name")),
    "an order of nonsense": Case(
        lambda: TokenOrder((2, 2), "given", np.array([0, 7, 1, 2])), ValueError, ("perm", "each of 0 to 3")
    ),
    "an order of another grid": Case(lambda: TokenOrder((9, 9), "given", np.arange(2)), ValueError, ("perm", "2 places", "81")),
    "an order of no sides": Case(lambda: TokenOrder((-1, -2), "given", np.arange(2)), ValueError, ("shape[0]=-1", "at least 1")),
    "an order of four sides": Case(lambda: TokenOrder((1,) * 4, "given", np.arange(1)), ValueError, ("4 dimensions", "1 to 3")),
    "an order generated as a text": Case(
        lambda: TokenOrder((2,), "given", np.arange(2), is_generation_order="no"), TypeError, ("is_generation_order='no'",)
    ),
    "tokens of a list": Case(lambda: GRID.apply([1, 2]), TypeError, ("x", "list", "torch.Tensor")),
    "tokens of another number": Case(lambda: GRID.apply(torch.zeros(1, 7)), ValueError, ("x has 7 tokens", "order is of 6")),
    "tokens along no dimension": Case(lambda: GRID.apply(X, dim=5), ValueError, ("dim=5", "(1, 6)")),
    "tokens along a name": Case(lambda: GRID.apply(X, dim="seq"), TypeError, ("dim='seq'", "integer")),
    "tokens along None": Case(lambda: GRID.restore(np.zeros((1, 6)), dim=None), TypeError, ("dim=None", "integer")),
    "sparse tokens": Case(lambda: GRID.apply(X.to_sparse()), TypeError, ("x has layout", "sparse", "to_dense")),
    "points transposed": Case(lambda: given([0, 1])().transposed(), ValueError, ("no grid", "coords")),
    "attention along nothing": Case(along(None), TypeError, ("order=None", "TokenOrder")),
    "attention along a name": Case(along("hilbert"), TypeError, ("order='hilbert'", "TokenOrder")),
    "attention along no orders": Case(along([]), ValueError, ("order is empty", "at least one")),
    "attention along another grid": Case(along(order((4, 4))), ValueError, ("6 tokens", "order is of 16")),
    "attention along a table": Case(along(GRID.perm), TypeError, ("order=array", "TokenOrder")),
    "attention along too many": Case(
        along([order((2, 3), c) for c in CURVES] + [order((2, 3), "tile", tile=(1, 2))]), ValueError, ("5 orders", "4 key/value")
    ),
    "causality along a curve": Case(
        along(order((2, 3), "snake"), is_causal=True), ValueError, ("is_causal=True", "is_generation_order=True")
    ),
    "mask along an order": Case(along(GRID, key_padding_mask=MASK[:, :5]), ValueError, ("key_padding_mask", "(2, 5)", "(2, 6)")),
}

POINTS = {
    "a list": Case(points([[1, 2], [3, 4]]), TypeError, ("coords[0]", "list", "array")),
    "one axis": Case(points(np.arange(4)), ValueError, ("coords", "(4,)", "(n, 2)")),
    "4 axes": Case(points(np.zeros((3, 4), int)), ValueError, ("coords", "4 axes", "3-D")),
    "floats without a cell": Case(points(np.zeros((3, 2))), TypeError, ("coords", "float64", "cell=")),
    "a cell of 0": Case(points(np.zeros((3, 2)), cell=0), ValueError, ("cell=0", "greater than 0")),
    "a cell of a text": Case(points(np.zeros((3, 2)), cell="1"), TypeError, ("cell='1'", "number")),
    "a cell of NaN": Case(points(np.zeros((3, 2)), cell=float("nan")), ValueError, ("cell=nan", "finite")),
    "a cell for each axis": Case(points(np.zeros((3, 2)), cell=(1, 1)), TypeError, ("cell=(1, 1)", "number")),
    "points of NaN": Case(points(np.array([[np.nan, 1]]), cell=1.0), ValueError, ("coords", "nan", "finite")),
    "points far apart": Case(points(np.array([[0, 1], [1e300, 1]]), cell=1.0), ValueError, ("coords", "2**31", "larger cell")),
    "a curve of grids": Case(points(curve="snake"), ValueError, ("curve='snake'", "'morton'")),
    "clouds of too few": Case(points(batch=np.zeros(2, int)), ValueError, ("batch", "(2,)", "3 points")),
    "clouds below 0": Case(points(batch=np.array([0, -1, 0])), ValueError, ("batch", "-1", "0 or more")),
    "clouds of a list": Case(points(batch=[0, 0, 1]), TypeError, ("batch", "list", "array")),
    "no threads": Case(points(threads=0), ValueError, ("threads=0", "at least 1")),
    "points elsewhere": Case(points(torch.zeros(3, 2, device="meta").int()), ValueError, ("coords", "meta", "cpu()")),
    "points of bfloat16": Case(points(torch.zeros(3, 2).bfloat16(), cell=1.0), TypeError, ("coords", "bfloat16", "numpy")),
    "sparse points": Case(points(torch.zeros(3, 2).long().to_sparse()), TypeError, ("coords", "sparse", "plain")),
    "axes of unequal lengths": Case(points((np.zeros(3, int), np.zeros(4, int))), ValueError, ("coords", "(3,), (4,)", "alike")),
    "points of bools": Case(points(np.zeros((3, 2), bool)), TypeError, ("coords", "bool", "integers")),
    "no points": Case(points(None), TypeError, ("coords", "NoneType", "array")),
}

LOCALITY = {
    "of a name": Case(report("hilbert", 4), TypeError, ("order='hilbert'", "TokenOrder")),
    "segments of 0": Case(report(GRID, 0), ValueError, ("segment_length=0", "at least 1")),
    "segments of a fraction": Case(report(GRID, 2.0), TypeError, ("segment_length=2.0", "integer")),
    "one rate": Case(report(GRID, 4, 2), TypeError, ("dilation_rates=2", "sequence")),
    "no rates": Case(report(GRID, 4, []), PatternError, ("dilation_rates", "empty")),
    "a rate of 0": Case(report(GRID, 4, [0]), PatternError, ("dilation_rates[0]=0", "from 1")),
    "an even window": Case(report(GRID, 4, [1], window=2), ValueError, ("window=2", "1 or 3")),
    "a window of 3 sides": Case(report(GRID, 4, [1], window=(3, 3, 3)), ValueError, ("window=(3, 3, 3)", "grid has 2")),
    "a window of a text": Case(report(GRID, 4, [1], window="3"), TypeError, ("window='3'", "sequence")),
    "blocks of 0": Case(report(GRID, 4, [1], window=3, block=0), ValueError, ("block=0", "at least 1")),
}
