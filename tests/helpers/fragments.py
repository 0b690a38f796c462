"""Where elements of matrices lie in the registers of a warp, as others than dilkit say it.

    places[lane][i] = (row, column) of element i that a lane holds:  left (16, k), right (k, 8), sums (16, 8)

CUTLASS (https://github.com/NVIDIA/cutlass) says it by the layouts of its traits, whose numbers are here with the struct that has
them; Triton by the linear layouts of its compiler, which `gluon_layouts.py` asks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Union

from helpers.project import ROOT, succeed

LANES = 32
HALF_BITS = 16
ROW_BITS = 128

Numbers = Union[int, tuple["Numbers", ...]]  # noqa: UP007 (Python 3.10 has no such union of a name in quotes)
Places = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Fragments:
    """The places of the two factors and of the sum of one product."""

    left: Places
    right: Places
    sums: Places


@dataclass(frozen=True)
class Layout:
    """`cute::Layout<Shape<threads, values>, Stride<...>>`: coordinates, each counted through its shape, times the strides."""

    shape: tuple[Numbers, Numbers]
    stride: tuple[Numbers, Numbers]

    def __call__(self, thread: int, value: int) -> int:
        return sum(_offset(*given) for given in zip((thread, value), self.shape, self.stride, strict=True))


def _offset(index: int, shape: Numbers, stride: Numbers) -> int:
    """Where `index` leads: the first of the shape's numbers is counted through first."""
    if isinstance(shape, int) or isinstance(stride, int):
        assert isinstance(shape, int)
        assert isinstance(stride, int)
        return index * stride
    total = 0
    for length, step in zip(shape, stride, strict=True):
        size = _size(length)
        total += _offset(index % size, length, step)
        index //= size
    assert not index
    return total


def _size(shape: Numbers) -> int:
    size = 1
    for length in (shape,) if isinstance(shape, int) else shape:
        size *= length if isinstance(length, int) else _size(length)
    return size


@dataclass(frozen=True)
class Product:
    """`ALayout`, `BLayout` and `CLayout` of `MMA_Traits<struct>`: to coordinates in (M, K), (N, K) and (M, N), M or N fastest."""

    header: str
    struct: str
    left: Layout
    right: Layout
    sums: Layout


_16X8 = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
_8X8 = Layout(((4, 8), 2), ((16, 1), 8))
PRODUCTS = {
    8: (
        Product("cute/atom/mma_traits_sm75.hpp", "SM75_16x8x8_F32F16F16F32_TN", _16X8, _8X8, _16X8),
        Product("cute/atom/mma_traits_sm80.hpp", "SM80_16x8x8_F32F16F16F32_TN", _16X8, _8X8, _16X8),
        Product("cute/atom/mma_traits_sm80.hpp", "SM80_16x8x8_F32BF16BF16F32_TN", _16X8, _8X8, _16X8),
    ),
    16: tuple(
        Product(
            "cute/atom/mma_traits_sm80.hpp",
            struct,
            left=Layout(((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128))),
            right=Layout(((4, 8), (2, 2)), ((16, 1), (8, 64))),
            sums=_16X8,
        )
        for struct in ("SM80_16x8x16_F32F16F16F32_TN", "SM80_16x8x16_F32BF16BF16F32_TN")
    ),
}
"""By k. Read at CUTLASS 56e011a3 (sm75) and 468e0eaf (sm80)."""


def of_cutlass(product: Product, k: int) -> Fragments:
    def places(layout: Layout, count: int, place: Callable[[int], tuple[int, int]]) -> Places:
        return [[place(layout(lane, i)) for i in range(count)] for lane in range(LANES)]

    return Fragments(
        places(product.left, k // 2, lambda x: (x % 16, x // 16)),
        places(product.right, k // 4, lambda x: (x // 8, x % 8)),
        places(product.sums, 4, lambda x: (x % 16, x // 16)),
    )


@dataclass(frozen=True)
class Load:
    """`SrcLayout` and `DstLayout` of `Copy_Traits<struct>`: a lane and one of its bits, to one of the bits that are copied."""

    struct: str
    source: Layout
    target: Layout


LOADS = {
    (1, False): Load("SM75_U32x1_LDSM_N", Layout(((8, 4), ROW_BITS), ((128, 0), 1)), Layout((32, 32), (32, 1))),
    (2, False): Load("SM75_U32x2_LDSM_N", Layout(((16, 2), ROW_BITS), ((128, 0), 1)), Layout((32, (32, 2)), (32, (1, 1024)))),
    (4, False): Load("SM75_U32x4_LDSM_N", Layout((32, ROW_BITS), (128, 1)), Layout((32, (32, 4)), (32, (1, 1024)))),
    (1, True): Load(
        "SM75_U16x2_LDSM_T", Layout(((8, 4), ROW_BITS), ((128, 0), 1)), Layout(((4, 8), (16, 2)), ((256, 16), (1, 128)))
    ),
    (2, True): Load(
        "SM75_U16x4_LDSM_T",
        Layout(((16, 2), ROW_BITS), ((128, 0), 1)),
        Layout(((4, 8), (16, 2, 2)), ((256, 16), (1, 128, 1024))),
    ),
    (4, True): Load(
        "SM75_U16x8_LDSM_T", Layout((32, ROW_BITS), (128, 1)), Layout(((4, 8), (16, 2, 4)), ((256, 16), (1, 128, 1024)))
    ),
}
"""By count of matrices, and transposed or not: of cute/atom/copy_traits_sm75.hpp, at CUTLASS 474c1fd4."""


def loaded(load: Load, count: int) -> Places:
    """For each lane and half that it gets: the lane that named the row where it lay, and its place in that row."""
    halves = range(0, ROW_BITS, HALF_BITS)
    lay = {load.source(lane, bit): (lane, bit // HALF_BITS) for lane in range(8 * count) for bit in halves}
    return [[lay[load.target(lane, HALF_BITS * i)] for i in range(2 * count)] for lane in range(LANES)]


class LayoutsMissing(Exception):
    """There is no Triton, or it has nothing to ask for its layouts."""


@cache
def of_triton(k: int) -> Fragments:
    """By what Triton's compiler says of `mma.sync`. Raises LayoutsMissing."""
    answer = json.loads(succeed(sys.executable, str(Path(__file__).with_name("gluon_layouts.py")), str(k), cwd=ROOT))
    if isinstance(answer, str):
        raise LayoutsMissing(answer)
    return Fragments(*([[(row, column) for row, column in lane] for lane in places] for places in answer))
