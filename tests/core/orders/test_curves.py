"""The engines of token orders against definitions in plain Python."""

from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from core.orders.definitions import interleaved, skilling
from helpers.pairwise import diagonal
from hypothesis import given, settings, strategies as st

from dilkit.orders import _curves
from dilkit.orders.curves import curve_permutation

DTYPES = (np.int32, np.int64)
CUBES = [(2, bits) for bits in range(9)] + [(3, bits) for bits in range(7)]
GUARD = 64
MARK = -77


def written(engine, count, *arguments, dtype=np.int32, start=0):
    room = np.full(count + 3 * GUARD, MARK, dtype)
    first = -(room.ctypes.data // room.itemsize) % (64 // room.itemsize) + GUARD + start
    out = room[first : first + count]
    engine(out, *arguments)
    assert (room[:first] == MARK).all()
    assert (room[first + count :] == MARK).all()
    return out


def hilbert(ndim, bits, **options):
    return written(_curves.hilbert, 1 << ndim * bits, ndim, bits, **options)


def morton(shape, **options):
    return written(_curves.morton, prod(shape), shape, **options)


def tiles(shape, tile, **options):
    return written(_curves.tiles, prod(shape), shape, tile, **options)


def snake(shape):
    return curve_permutation(shape, "snake", None, 0)


def inverse(perm):
    return written(lambda out: _curves.invert(perm, out), len(perm), dtype=perm.dtype)


@cache
def oracle(ndim, bits):
    return np.argsort(skilling(np.indices((1 << bits,) * ndim).reshape(ndim, -1).T, bits))


def morton_by_sorting(shape):
    return np.argsort(interleaved(np.indices(shape).reshape(len(shape), -1).T, max(shape).bit_length()))


def tiles_by_sorting(shape, tile):
    grid = np.indices(shape).reshape(len(shape), -1)
    which = [cells // side for cells, side in zip(grid, tile, strict=True)]
    return np.lexsort([*grid[::-1], *which[::-1]])


def steps(perm, shape):
    return np.abs(np.diff(np.stack(np.unravel_index(perm, shape)), axis=1)).sum(0)


@pytest.mark.parametrize(("cube", "dtype"), diagonal(CUBES, DTYPES), ids=str)
class TestHilbert:
    def test_it_is_skillings_curve(self, cube, dtype):
        ndim, bits = cube
        perm = hilbert(ndim, bits, dtype=dtype)
        assert perm.dtype == dtype
        assert np.array_equal(perm, oracle(ndim, bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ndim", "bits"), [(2, 9), (2, 11), (3, 7)])
def test_larger_hilbert_curves_step_to_neighbours_and_hold_the_smaller_ones(ndim, bits, dtype):
    perm = hilbert(ndim, bits, dtype=dtype)
    shape = (1 << bits,) * ndim
    assert perm[0] == 0
    assert (steps(perm, shape) == 1).all()
    assert np.array_equal(np.sort(perm), np.arange(len(perm)))
    first = np.stack(np.unravel_index(perm[: 1 << ndim * (bits - ndim)], shape))  # as many levels on, the frame is the same
    assert np.array_equal(np.ravel_multi_index(first, (1 << (bits - ndim),) * ndim), hilbert(ndim, bits - ndim))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(dtype):
    expected, by_sorting = oracle(2, 7), morton_by_sorting((50, 41))
    for start in range(0, 16, 3):
        assert np.array_equal(hilbert(2, 7, dtype=dtype, start=start), expected), start
        assert np.array_equal(morton((50, 41), dtype=dtype, start=start), by_sorting), start
    assert np.array_equal(tiles((50, 41), (7, 6), dtype=dtype, start=start), tiles_by_sorting((50, 41), (7, 6)))


class TestBoxes:
    def test_morton_of_every_small_plane(self):
        for rows, columns in product(range(1, 21), range(1, 21)):
            assert np.array_equal(morton((rows, columns)), morton_by_sorting((rows, columns))), (rows, columns)

    def test_morton_of_every_small_box(self):
        for shape in product(range(1, 8), range(1, 8), range(1, 8)):
            assert np.array_equal(morton(shape), morton_by_sorting(shape)), shape

    @settings(max_examples=25, deadline=None)
    @given(st.one_of(st.tuples(*[st.integers(1, 300)] * 2), st.tuples(*[st.integers(1, 70)] * 3)), st.sampled_from(DTYPES))
    def test_morton_of_larger_boxes(self, shape, dtype):
        assert np.array_equal(morton(shape, dtype=dtype), morton_by_sorting(shape))

    @pytest.mark.parametrize(
        "shape", [(1, 70_000), (2, 5_000), (3_000, 3), (2, 2, 9_000), (2_000, 1, 5), (257, 257), (64, 65, 64)]
    )
    def test_morton_of_long_and_of_almost_round_boxes(self, shape):
        assert np.array_equal(morton(shape), morton_by_sorting(shape))

    @settings(max_examples=30, deadline=None)
    @given(st.data(), st.integers(1, 3), st.sampled_from(DTYPES))
    def test_tiles(self, data, ndim, dtype):
        shape = data.draw(st.tuples(*[st.integers(1, (400, 60, 20)[ndim - 1])] * ndim))
        tile = data.draw(st.tuples(*[st.integers(1, 40)] * ndim))
        assert np.array_equal(tiles(shape, tile, dtype=dtype), tiles_by_sorting(shape, tile))

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 3).flatmap(lambda ndim: st.tuples(*[st.integers(1, 30)] * ndim)))
    def test_snake_visits_every_cell_by_steps_to_neighbours(self, shape):
        perm = snake(shape)
        assert perm[0] == 0
        assert (steps(perm, shape) == 1).all()
        assert np.array_equal(np.sort(perm), np.arange(prod(shape)))

    def test_snake_of_a_box(self):
        assert snake((2, 2, 3)).tolist() == [0, 1, 2, 5, 4, 3, 9, 10, 11, 8, 7, 6]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_inverse(dtype):
    perm = np.random.default_rng(1).permutation(1000).astype(dtype)
    assert np.array_equal(inverse(perm)[perm], np.arange(1000))
    assert len(inverse(perm[:0])) == 0


@pytest.mark.parametrize("start", [0, 1, 4])
def test_large_arrays_are_those_of_the_other_type(start):
    assert np.array_equal(hilbert(2, 11, dtype=np.int64, start=start), hilbert(2, 11))
