"""Curves as automata: how they are turned in each part of a square or cube, as the tables that the C of dilkit.points takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Turn: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A turn of the cube, (source, flip): axis i of what comes out is axis source[i] of what goes in, flipped where flip[i] is 1."""

HILBERT: dict[int, tuple[Turn, ...]] = {
    2: (((1, 0), (0, 0)), ((0, 1), (0, 0)), ((0, 1), (0, 0)), ((1, 0), (1, 1))),
    3: (
        ((1, 2, 0), (0, 0, 0)),
        ((1, 0, 2), (0, 0, 0)),
        ((0, 1, 2), (0, 0, 0)),
        ((2, 1, 0), (1, 0, 1)),
        ((2, 1, 0), (0, 0, 0)),
        ((0, 1, 2), (0, 0, 0)),
        ((1, 0, 2), (1, 1, 0)),
        ((1, 2, 0), (1, 0, 1)),
    ),
}
"""Hilbert's curve as Skilling's transform has it: how the copy of it is turned in the d-th part visited, d = 0 ... 2**ndim - 1.

The d-th part is at the corner whose bits, the first axis highest, are Gray's code of d, `d ^ d >> 1`.
"""


ANY = np.array([0x00, 0x10, 0x20, 0x30])
"""The bits of an index that do not matter."""


@dataclass(frozen=True, eq=False)
class Automaton:
    """A curve in one direction, points to codes or back; points_kernel.h says how the C goes by it."""

    turns: NDArray[np.uint8]
    """`(256,)`: by state ^ what comes in."""
    starts: tuple[int, ...]
    """The states from which 0, 1, 2 or 3 levels of zeros lead to the state 0."""
    parity: bool
    """Whether a digit's last bit is the parity of the point's bits; else it is the bit of its last axis."""


@cache
def automaton(curve: str, ndim: int, decoding: bool) -> Automaton:
    """The automaton of "hilbert" or "morton" in 2-D or 3-D."""
    digits = range(2**ndim)
    if curve == "hilbert":
        corners, turns = [d ^ d >> 1 for d in digits], HILBERT[ndim]
    else:
        corners, turns = list(digits), ((tuple(range(ndim)), (0,) * ndim),) * 2**ndim
    table = np.zeros(256, np.uint8)
    parity = curve == "hilbert" and ndim == 3
    flips = ((0, 0), (1, 1)) if decoding and ndim == 2 else ((0,) * ndim,)
    for source, flip, digit in product(permutations(range(ndim)), flips, digits):
        point = [_bit(corners[digit], ndim - 1 - axis) ^ f for axis, f in zip(source, flip, strict=True)]
        turn = turns[digit]
        after = tuple(turn[0][axis] for axis in source), tuple(turn[1][axis] ^ f for axis, f in zip(source, flip, strict=True))
        state = _state(source, flip, decoding)
        first_two = point[0] << 1 | point[1]
        last = sum(point) % 2 if parity else point[-1]
        comes_in = digit if decoding else first_two | (last << 3 if ndim == 3 else 0)
        goes_out = first_two if decoding else digit >> ndim - 2
        table[(state ^ comes_in) + ANY] = state ^ _state(*after, decoding) | goes_out << 4
    table.setflags(write=False)
    return Automaton(table, tuple(_starts(table)), parity)


def _starts(table: NDArray[np.uint8]) -> list[int]:
    """For 0 to 3 levels of zeros: the state that they lead to 0 from. Zeros go round a cycle of states and bring no bits out."""
    cycle = [0]
    while (after := cycle[-1] ^ int(table[cycle[-1]])) != 0:
        cycle.append(after)
    return [cycle[-levels % len(cycle)] for levels in range(4)]


def _bit(number: int, place: int) -> int:
    return number >> place & 1


def _state(source: tuple[int, ...], flip: tuple[int, ...], decoding: bool) -> int:
    """A turn as a byte."""
    number = sorted(permutations(source)).index(source)
    turned = (0x00, 0x40, 0xC0)[number >> 1]
    if not decoding:
        return turned | (number & 1) << 2 | flip[0] << 1 | flip[1]
    if len(source) == 2:
        return number << 2 | flip[0] << 3
    return turned | (number & 1) << 3 | flip[0] << 1 | flip[1]
