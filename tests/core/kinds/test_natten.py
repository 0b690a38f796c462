"""NATTEN's neighbourhood as a walk: a window is laid around a coordinate and moved, step by step, until it is within the grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilkit import Neighborhood, Pattern

Axis = tuple[int, int, int]
"""Size, kernel size and dilation of one dimension."""


def around(at: int, size: int, kernel_size: int, dilation: int) -> range:
    """As many coordinates before `at` as after it, `dilation` apart; of a window that reaches out of the grid, the nearest place
    within it that keeps to the same residue."""
    first = at - kernel_size // 2 * dilation
    while first < 0:
        first += dilation
    while first + (kernel_size - 1) * dilation >= size:
        first -= dilation
    return range(first, first + kernel_size * dilation, dilation)


def sees(axes: list[Axis], i: int, j: int) -> bool:
    """Whether cell i sees cell j of a row-major grid: dimension by dimension, from the last one on."""
    for size, kernel_size, dilation in reversed(axes):
        (i, at), (j, to) = divmod(i, size), divmod(j, size)
        if to not in around(at, size, kernel_size, dilation):
            return False
    return True


def check(axes: list[Axis]) -> None:
    sizes, kernel_sizes, dilations = zip(*axes, strict=True)
    tokens = int(np.prod(sizes))
    expected = np.array([[sees(axes, i, j) for j in range(tokens)] for i in range(tokens)], dtype=np.int32)
    pattern = Pattern.of(Neighborhood(sizes, kernel_sizes, dilations))
    np.testing.assert_array_equal(pattern.count(tokens, 1)[0].numpy(), expected)
    np.testing.assert_array_equal(pattern.count(tokens, 1, is_causal=True)[0].numpy(), np.tril(expected))
    assert (expected.sum(1) == np.prod(kernel_sizes)).all()


EDGES = {
    "odd": [(9, 5, 1)],
    "even": [(10, 5, 1)],
    "as large as the grid": [(7, 7, 1)],
    "dilated, odd": [(13, 3, 4)],
    "dilated, even": [(16, 5, 3)],
    "dilation that divides": [(12, 3, 4)],
    "odd by even": [(7, 3, 2), (6, 3, 1)],
    "even by odd": [(6, 3, 2), (9, 5, 1)],
    "3-D": [(4, 3, 1), (5, 3, 1), (6, 3, 2)],
    "3-D, one dimension alone": [(3, 1, 2), (2, 1, 1), (7, 3, 2)],
}


@pytest.mark.parametrize("axes", EDGES.values(), ids=list(EDGES))
def test_neighborhoods_are_those_of_the_walk(axes: list[Axis]) -> None:
    check(axes)


@st.composite
def axis(draw: st.DrawFn) -> Axis:
    kernel_size, dilation = draw(st.sampled_from([1, 3, 5])), draw(st.integers(1, 3))
    return draw(st.integers(kernel_size * dilation, kernel_size * dilation + 3)), kernel_size, dilation


@settings(max_examples=20, deadline=None)
@given(st.lists(axis(), min_size=1, max_size=3).filter(lambda axes: np.prod([size for size, _, _ in axes]) <= 250))
def test_random_neighborhoods_are_those_of_the_walk(axes: list[Axis]) -> None:
    check(axes)
