"""Where the host shim takes elements of matrices to lie in registers, against what CUTLASS and Triton say of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.fragments import LANES, LOADS, PRODUCTS, Fragments, LayoutsMissing, Places, Product, loaded, of_cutlass, of_triton
from helpers.instructions import run
from numpy.typing import NDArray
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
PUBLISHED = [(k, product) for k, products in PRODUCTS.items() for product in products]
NUMBERS = 1024
"""More than one factor has places."""


def triton_fragments(k: int) -> Fragments:
    try:
        return of_triton(k)
    except LayoutsMissing as missing:
        pytest.skip(str(missing))


def numbered(places: Places) -> Tensor:
    """The matrix whose elements are the numbers of their places, of which each must have one."""
    lie = [place for lane in places for place in lane]
    rows, columns = (1 + max(x) for x in zip(*lie, strict=True))
    matrix = torch.full((rows, columns), -1.0)
    for number, place in enumerate(lie):
        matrix[place] = number
    assert len(lie) == matrix.numel()
    assert (matrix >= 0).all()
    return matrix


def held(matrix: Tensor, places: Places) -> Tensor:
    """What each lane holds of a matrix."""
    return torch.stack([torch.stack([matrix[place] for place in lane]) for lane in places])


def product(left: Tensor, right: Tensor, sums: Tensor, lie: Fragments, dtype: torch.dtype) -> Tensor:
    """What lanes hold of `left @ right + sums` after the shim's instruction."""
    k, given = left.shape[1], torch.zeros(LANES, 10, dtype=torch.int32)
    given[:, : k // 4] = held(left, lie.left).to(dtype).view(torch.int32)
    given[:, 4 : 4 + k // 8] = held(right, lie.right).to(dtype).view(torch.int32)
    given[:, 6:] = held(sums, lie.sums).view(torch.int32)
    got: NDArray[np.float32] = run("products", given.numpy(), 4 * LANES, 2 * (dtype == torch.bfloat16) + k // 16).view(np.float32)
    return torch.from_numpy(got.copy()).view(LANES, 4)


def check_products(lie: Fragments, k: int, dtype: torch.dtype) -> None:
    """Factors that choose rows and columns bring the number of every place of the other factor, and of the sum, to its own."""
    left, right, sums = map(numbered, (lie.left, lie.right, lie.sums))
    for first in range(0, k, 8):
        choice = torch.eye(k)[:, first : first + 8]
        want = left[:, first : first + 8] + NUMBERS * sums
        assert torch.equal(product(left, choice, NUMBERS * sums, lie, dtype), held(want, lie.sums))
    choice = torch.eye(16)[:, :k]
    assert torch.equal(product(choice, right, NUMBERS * sums, lie, dtype), held(choice @ right + NUMBERS * sums, lie.sums))


@pytest.mark.parametrize(("k", "published"), PUBLISHED, ids=lambda x: getattr(x, "struct", str(x)))
def test_products_take_what_lies_where_cutlass_puts_it(k: int, published: Product) -> None:
    check_products(of_cutlass(published, k), k, torch.bfloat16 if "BF16" in published.struct else torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", PRODUCTS)
def test_products_take_what_lies_where_triton_puts_it(k: int, dtype: torch.dtype) -> None:
    check_products(triton_fragments(k), k, dtype)


@pytest.mark.parametrize(("k", "published"), PUBLISHED, ids=lambda x: getattr(x, "struct", str(x)))
def test_triton_and_cutlass_say_the_same(k: int, published: Product) -> None:
    assert triton_fragments(k) == of_cutlass(published, k)


@pytest.mark.parametrize(("count", "transposed"), LOADS)
def test_matrices_are_loaded_to_where_cutlass_expects_them(count: int, transposed: bool) -> None:
    elements = np.arange(LANES * 8, dtype=np.uint16).reshape(LANES, 8)
    got = run("matrices", elements, 4 * LANES, {1: 0, 2: 1, 4: 2}[count] + 3 * transposed).view(np.uint16).reshape(LANES, 8)
    want = [[elements[place] for place in lane] for lane in loaded(LOADS[count, transposed], count)]
    np.testing.assert_array_equal(got[:, : 2 * count], want)
