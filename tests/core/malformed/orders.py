"""Malformed token orders, points and reports on them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from core.malformed.case import MASK, Case, P, Q, made, under

from dilkit import PatternError, TokenOrder, locality_report, order, ordered_dilated_attention, sort_points
from dilkit.orders import _curves
from dilkit.orders.points import decode, encode

GRID = order((2, 3))
X = torch.zeros(1, 6)
CELLS = np.zeros((3, 2), int)
PLANE, SPACE, LINE = np.zeros((4, 2), int), np.zeros((4, 3), int), np.zeros(4, int)


def grid(*args, **options) -> Callable[[], Any]:
    return made(order, *args, **options)


def given(perm, **options) -> Callable[[], Any]:
    return made(TokenOrder.from_permutation, perm, **options)


def valued(shape, perm, **options) -> Callable[[], Any]:
    return made(TokenOrder, shape, "given", np.array(perm), **options)


GRIDS = [order((2, 3), c) for c in ("hilbert", "snake", "morton")] + [order((2, 3), "tile", tile=(1, 2))]


def along(orders, **options) -> Callable[[], Any]:
    return made(ordered_dilated_attention, Q, Q, Q, P, orders, **options)


def points(coords=CELLS, **options) -> Callable[[], Any]:
    return made(sort_points, coords, **options)


def report(*args, **options) -> Callable[[], Any]:
    return made(locality_report, *args, **options)


def empty(cells: int):
    return np.empty(cells, np.int32)


def perm(*places: int):
    return np.array(places, np.int32)


def generalised(cells: int, shape: tuple[int, ...]) -> Callable[[], Any]:
    return made(_curves.generalised_hilbert, empty(cells), shape)


ORDERS = {
    "shape is a number": Case(grid(8), TypeError, "shape=8", "int", "(rows, columns)"),
    "shape of 4 axes": Case(grid((2, 2, 2, 2)), ValueError, "shape=(2, 2, 2, 2)", "4 dimensions", "1 to 3"),
    "unknown curve": Case(grid((4, 4), "hilber"), ValueError, "curve='hilber'", "did you mean 'hilbert'"),
    "tile of another curve": Case(grid((4, 4), tile=(2, 2)), ValueError, "tile=(2, 2)", "curve='hilbert'", "'tile'"),
    "tile of one side": Case(grid((4, 4), "tile", tile=(2,)), ValueError, "tile=(2,)", "1 dimensions", "as many"),
    "tile is a number": Case(grid((4, 4), "tile", tile=2), TypeError, "tile=2", "sequence"),
    "extra tokens below 0": Case(grid((4, 4), extra_tokens=-1), ValueError, "extra_tokens=-1", "at least 0"),
    "generation order of a text": Case(grid((4, 4), is_generation_order="yes"), TypeError, "is_generation_order='yes'"),
    "a side of a bool": Case(grid((True, 2)), TypeError, "shape[0]=True", "bool"),
    "too many tokens with those in front": Case(grid((2**31, 2**31), extra_tokens=1), ValueError, "at most 2**62"),
    "a curve unlike all": Case(grid((4, 4), "peano"), ValueError, "'hilbert', 'morton', 'tile', 'row-major', 'snake'"),
    "a list of curves": Case(grid((4, 4), ["hilbert"]), TypeError, "curve=['hilbert']", "list", "name"),
    "a tile of nothing": Case(grid((4, 4), "tile", tile=(2, 0)), ValueError, "tile[1]=0", "from 1 to 4"),
    "a side of 0, and a tile to be chosen": Case(grid((0, 3), "tile"), ValueError, "shape[0]=0"),
    "a place beyond 32 bits": Case(given([1, 2**40]), ValueError, "perm", "each of 0 to 1"),
    "a list with no order": Case(along([GRID, 3]), TypeError, "is no TokenOrder, nor a list of them"),
    "an order without room": Case(grid((2**30, 2**30), "row-major"), MemoryError, "tokens (8,589,934,592.0 GiB)"),
    "a place twice": Case(given([0, 0, 1]), ValueError, "perm", "each of 0 to 2", "once"),
    "places are floats": Case(given([0.0, 1.0]), TypeError, "perm", "float64", "integers"),
    "places of no one": Case(given(np.zeros(0, int)), ValueError, "perm", "(0,)", "n >= 1"),
    "places elsewhere": Case(given(torch.arange(2, device="meta")), TypeError, "perm", "Tensor", "cpu()"),
    "places under a mask": Case(given(np.ma.masked_array([1, 0], [True, False])), TypeError, "perm", "masked"),
    "more extra tokens than there can be": Case(given([1, 0], extra_tokens=2**70), ValueError, "extra_tokens=", "at most 2**62"),
    "places under a number": Case(given([0, 1], curve=3), TypeError, "curve=3", "name"),
    "an order of nonsense": Case(valued((2, 2), [0, 7, 1, 2]), ValueError, "perm", "each of 0 to 3"),
    "an order of another grid": Case(valued((9, 9), [0, 1]), ValueError, "perm", "2 places", "81"),
    "an order of four sides": Case(valued((1,) * 4, [0]), ValueError, "4 dimensions", "1 to 3"),
    "an order generated as a text": Case(valued((2,), [0, 1], is_generation_order="no"), TypeError, "is_generation_order='no'"),
    "tokens of a list": Case(lambda: GRID.apply([1, 2]), TypeError, "x", "list", "torch.Tensor"),
    "tokens along no dimension": Case(lambda: GRID.apply(X, dim=5), ValueError, "dim=5", "(1, 6)"),
    "tokens along a name": Case(lambda: GRID.apply(X, dim="seq"), TypeError, "dim='seq'", "integer"),
    "tokens along None": Case(lambda: GRID.restore(np.zeros((1, 6)), dim=None), TypeError, "dim=None", "integer"),
    "sparse tokens": Case(lambda: GRID.apply(X.to_sparse()), TypeError, "x has layout", "sparse", "to_dense"),
    "attention along a name": Case(along("hilbert"), TypeError, "order='hilbert'", "TokenOrder"),
    "attention along no orders": Case(along([]), ValueError, "order is empty", "at least one"),
    "attention along another grid": Case(along(order((4, 4))), ValueError, "6 tokens", "order is of 16"),
    "attention along too many": Case(along([*GRIDS, GRID]), ValueError, "5 orders", "4 key/value"),
    "mask along an order": Case(along(GRID, key_padding_mask=MASK[:, :5]), ValueError, "key_padding_mask", "(2, 5)", "(2, 6)"),
}

POINTS = {
    "one axis": Case(points(np.arange(4)), ValueError, "coords", "(4,)", "(n, 2)"),
    "4 axes": Case(points(np.zeros((3, 4), int)), ValueError, "coords", "4 axes", "3-D"),
    "floats without a cell": Case(points(np.zeros((3, 2))), TypeError, "coords", "float64", "cell="),
    "a cell of 0": Case(points(np.zeros((3, 2)), cell=0), ValueError, "cell=0", "greater than 0"),
    "a cell of a text": Case(points(np.zeros((3, 2)), cell="1"), TypeError, "cell='1'", "number"),
    "points of NaN": Case(points(np.array([[np.nan, 1]]), cell=1.0), ValueError, "coords", "nan", "finite"),
    "a curve of grids": Case(points(curve="snake"), ValueError, "curve='snake'", "'morton'"),
    "clouds of too few": Case(points(batch=np.zeros(2, int)), ValueError, "batch", "(2,)", "3 points"),
    "clouds below 0": Case(points(batch=np.array([0, -1, 0])), ValueError, "batch", "-1", "0 or more"),
    "clouds of a list": Case(points(batch=[0, 0, 1]), TypeError, "batch", "list", "array"),
    "points elsewhere": Case(points(torch.zeros(3, 2, device="meta").int()), ValueError, "coords", "meta", "cpu()"),
    "sparse points": Case(points(torch.zeros(3, 2).long().to_sparse()), TypeError, "coords", "sparse", "plain"),
    "axes of unequal lengths": Case(points((np.zeros(3, int), np.zeros(4, int))), ValueError, "coords", "(3,), (4,)", "alike"),
    "points of bools": Case(points(np.zeros((3, 2), bool)), TypeError, "coords", "bool", "integers"),
    "points that need 32 bits": Case(points(np.array([[0, 0], [0, 2**31]])), ValueError, "span 2**32 cells", "larger cell"),
    "points that span too much": Case(points(np.array([[-1e308, 0], [1e308, 0]]), cell=1e300), ValueError, "span inf cells"),
    "a cell far too small": Case(points(np.array([[0, 0], [0, 100]], np.int8), cell=1e-8), ValueError, "span 1e", "larger cell"),
    "points under a mask": Case(points(np.ma.masked_array([[1, 2]])), TypeError, "MaskedArray; a numpy array without a mask"),
    "points of 8 bits": Case(points(torch.zeros(1, 2, dtype=torch.float8_e5m2), cell=1.0), TypeError, "tensor of torch.float8"),
    "too many clouds": Case(points(np.array([[0, 2**30]]), batch=np.array([2**62])), ValueError, "more than 63"),
}

CODES = {
    "a list": Case(made(encode, [[1, 2], [3, 4]]), TypeError, "coords[0] is a list"),
    "too many bits in space": Case(made(encode, SPACE, 22), ValueError, "bits=22 must be at most 21 in 3-D"),
    "no bits": Case(made(encode, SPACE, 0), ValueError, "bits=0 must be at least 1"),
    "bits of a fraction": Case(made(encode, SPACE, 2.0), TypeError, "bits=2.0"),
    "a curve of grids": Case(made(encode, SPACE, curve="snake"), ValueError, "'snake'", "'hilbert', 'morton'"),
    "an instruction set of no one": Case(under(made(encode, SPACE), DILKIT_CPU_ISA="mmx"), ValueError, "DILKIT_CPU_ISA='mmx'"),
    "too many places": Case(made(encode, SPACE, out=np.zeros(5, int)), ValueError, "out has 5 places; 4 are needed"),
    "places that cannot be written": Case(made(encode, SPACE, out=np.broadcast_to(np.int64(0), 4)), ValueError, "read-only"),
    "places of another byte order": Case(made(encode, PLANE, out=np.zeros(4, ">i8")), ValueError, "dtype >i8; the byte order"),
    "one place for all": Case(made(encode, PLANE, out=torch.zeros(1).int().expand(4)), ValueError, "places that share memory"),
    "codes of floats": Case(made(decode, np.zeros(4), 2, 3), TypeError, "codes is of dtype float64"),
    "codes of two axes": Case(made(decode, PLANE, 2, 3), ValueError, "codes has shape (4, 2)"),
    "codes in 4-D": Case(made(decode, LINE, 4, 3), ValueError, "ndim=4"),
    "narrow cells": Case(made(decode, LINE, 2, 9, out=np.zeros((4, 2), np.uint8)), ValueError, "uint8", "8 bits; 9 are needed"),
    "cells of other axes": Case(made(decode, LINE, 2, 9, out=SPACE), ValueError, "3 axes; ndim=2"),
    "cells of another byte order": Case(made(decode, LINE, 2, 3, out=PLANE.astype(">i4")), ValueError, ">i4; the byte order"),
    "one axis for all": Case(made(decode, LINE, 2, 3, out=[LINE] * 2), ValueError, "out has axes that share memory"),
}

CURVES = {
    "a short array": Case(made(_curves.hilbert, empty(63), 2, 3), ValueError, "out has 63 elements", "each of the 64 cells"),
    "a long array": Case(made(_curves.hilbert, np.empty(65, np.int64), 3, 2), ValueError, "out has 65 elements"),
    "four axes": Case(made(_curves.hilbert, empty(16), 4, 1), ValueError, "ndim=4 must be 2 or 3"),
    "negative bits": Case(made(_curves.hilbert, empty(1), 2, -1), ValueError, "bits=-1 from 0 to 31"),
    "no cells": Case(made(_curves.morton, empty(0), (0, 4)), ValueError, "shape=(0, 4) must be one to three sides of at least 1"),
    "a box of four axes": Case(made(_curves.morton, empty(1), (1, 1, 1, 1)), ValueError, "one to three sides"),
    "more cells than there can be": Case(made(_curves.morton, empty(4), (2**40, 2**40)), ValueError, "out has 4 elements"),
    "a tile of no cells": Case(made(_curves.tiles, empty(4), (2, 2), (0, 2)), ValueError, "tile=(0, 2) must be a side of"),
    "a tile of other axes": Case(made(_curves.tiles, empty(4), (2, 2), (2,)), ValueError, "for each axis of shape=(2, 2)"),
    "index -1": Case(made(_curves.invert, perm(2, -1, 0), empty(3)), ValueError, "perm[1]=-1 must be at least 0 and below 3"),
    "index 3": Case(made(_curves.invert, perm(2, 3, 0), empty(3)), ValueError, "perm[1]=3 must be at least 0 and below 3"),
    "a short inverse": Case(made(_curves.invert, perm(0, 1, 2), empty(2)), ValueError, "out has 2 elements", "as perm, 3"),
    "a curve in a short array": Case(generalised(5, (2, 3)), ValueError, "out has 5 elements"),
    "a curve without end": Case(generalised(6, (2**40, 2**40)), ValueError, "out has 6 elements"),
    "a curve through nothing": Case(generalised(6, (0, 6)), ValueError, "sides of at least 1"),
    "a curve through no axis": Case(generalised(1, ()), ValueError, "one to three sides"),
}

LOCALITY = {
    "of a name": Case(report("hilbert", 4), TypeError, "order='hilbert'", "TokenOrder"),
    "segments of 0": Case(report(GRID, 0), ValueError, "segment_length=0", "at least 1"),
    "segments of a fraction": Case(report(GRID, 2.0), TypeError, "segment_length=2.0", "integer"),
    "one rate": Case(report(GRID, 4, 2), TypeError, "dilation_rates=2", "sequence"),
    "no rates": Case(report(GRID, 4, []), PatternError, "dilation_rates", "empty"),
    "an even window": Case(report(GRID, 4, [1], window=2), ValueError, "window=2", "1 or 3"),
    "a window of 3 sides": Case(report(GRID, 4, [1], window=(3, 3, 3)), ValueError, "window=(3, 3, 3)", "grid has 2"),
    "a window of a text": Case(report(GRID, 4, [1], window="3"), TypeError, "window='3'", "sequence"),
    "a window of no side": Case(report(GRID, 4, [1], window=(3, 0)), ValueError, "window[1]=0", "from 1"),
    "blocks of 0": Case(report(GRID, 4, [1], window=3, block=0), ValueError, "block=0", "at least 1"),
}
