"""The generalised Hilbert curve."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dilkit.orders._curves import generalised_hilbert

RECTANGLES = list(product(range(1, 41), repeat=2))
CUBOIDS = list(product(range(1, 13), repeat=3))
THIN = [(1, 99_991), (99_991, 1), (2, 50_001), (50_001, 2), (3, 33_333), (1, 7_001, 2), (7_001, 1, 3), (5, 2, 9_001)]
LARGE = st.one_of(
    st.lists(st.integers(1, 700), min_size=2, max_size=2),
    st.lists(st.integers(1, 60), min_size=3, max_size=3),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5_000)).flatmap(st.permutations),
)


def curve(shape, dtype=np.int32):
    out = np.full(prod(shape), -1, dtype)
    generalised_hilbert(out, tuple(shape))
    return out


def cells_along(shape):
    perm = curve(shape)
    assert perm[0] == 0, f"{shape} starts at {perm[0]}"
    assert perm.min() == 0, f"{shape} leaves the grid"
    assert np.array_equal(np.bincount(perm), np.ones(prod(shape))), f"{shape} is no permutation"
    return np.stack(np.unravel_index(perm, shape))


def assert_sound(shape):
    lengths = np.abs(np.diff(cells_along(shape))).sum(0)
    assert (lengths == 1).all(), f"{shape} has {(lengths != 1).sum()} steps that are not to a neighbour"


def mean_diagonal(shape, segment):
    along = cells_along(shape).astype(float)
    parts = [along[:, i : i + segment] for i in range(0, along.shape[1] - segment // 2, segment)]
    return np.mean([np.linalg.norm(part.max(1) - part.min(1)) for part in parts])


@pytest.mark.parametrize("shapes", [RECTANGLES, CUBOIDS, THIN], ids=["rectangles", "cuboids", "thin"])
def test_each_cell_once_and_each_step_to_a_neighbour(shapes):
    for shape in shapes:
        assert_sound(shape)


@settings(max_examples=25, deadline=None)
@given(LARGE)
def test_large_boxes_are_sound(shape):
    assert_sound(tuple(shape))


@pytest.mark.parametrize("shape", [(5,), (1, 1), (1, 1, 1), (7, 1), (37, 41), (6, 7, 9), (90, 160)], ids=str)
def test_nothing_is_written_beside_the_array(shape):
    cells = prod(shape)
    for dtype in (np.int32, np.int64):
        guarded = np.full(cells + 64, -7, dtype)
        generalised_hilbert(guarded[32 : 32 + cells], shape)
        assert (guarded[:32] == -7).all()
        assert (guarded[32 + cells :] == -7).all()
        assert np.array_equal(np.sort(guarded[32 : 32 + cells]), np.arange(cells))


@pytest.mark.parametrize(
    "shape", [(601, 499), (1, 8_000_003), (2203, 2111), (171, 173, 205), (234, 213, 120), (2, 3_000_001)], ids=str
)
def test_the_curve_does_not_depend_on_the_width(shape):
    assert np.array_equal(curve(shape, np.int64), curve(shape))


@pytest.mark.parametrize(("shape", "segment"), [((64, 64), 1024), ((256, 256), 4096), ((32, 32, 32), 512), ((16, 64, 32), 4096)])
def test_powers_of_two_have_exact_blocks(shape, segment):
    """A segment as large as a square or cube of a power of two is one."""
    side = round(segment ** (1 / len(shape)))
    assert mean_diagonal(shape, segment) == pytest.approx((side - 1) * len(shape) ** 0.5)


def test_segments_are_compact_whatever_the_sides_and_their_length():
    """The mean over random boxes, in sides of an equal square or cube, whose diagonals are 1.41 and 1.73."""
    draw = np.random.default_rng(3)
    for ndim, sides, most in ((2, (50, 350), 1.64), (3, (10, 60), 1.955)):
        shapes = draw.integers(*sides, (12, ndim)).tolist()
        ratios = [mean_diagonal(shape, s) / s ** (1 / ndim) for shape in shapes for s in (128, 1000, 1024, 3000)]
        assert np.exp(np.log(ratios).mean()) < most
