"""Curves as automata: how they are turned in each part of a square or cube, as the tables that the C code of points takes."""

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


@dataclass(frozen=True, eq=False)
class Automaton:
    """A curve in one direction, points to codes or back; points_kernel.h says how the C goes by it."""

    turns: NDArray[np.uint8]
    """`(256,)`: by state ^ what goes in."""
    starts: tuple[int, ...]
    """The states from which 0, 1, 2 or 3 levels of zeros lead to the state 0."""
    turning: bool
    """Whether the curve turns: a digit's last bit is then the parity of the point's bits, else the bit of its last axis."""


@cache
def automaton(curve: str, ndim: int, decoding: bool) -> Automaton:
    """The automaton of "hilbert" or "morton" in 2-D or 3-D."""
    turning, straight = curve == "hilbert", (tuple(range(ndim)), (0,) * ndim)
    turns = HILBERT[ndim] if turning else (straight,) * 2**ndim
    table = np.zeros(256, np.uint8)
    levels = 4 - ndim
    for source, digits in product(permutations(range(ndim)), product(range(2**ndim), repeat=levels)):
        turn, points = (source, (0,) * ndim), []
        for digit in digits:
            points.append(_turned(turn, _corner(digit, ndim, turning)))
            turn = _after(turn, turns[digit])
        goes_in, comes_out = _decoded(digits, points) if decoding else _encoded(digits, points, turning)
        before = _state((source, (0,) * ndim), decoding)
        table[before ^ goes_in] = before ^ _state(turn, decoding) ^ comes_out
    table.setflags(write=False)
    return Automaton(table, tuple(_state(turn, decoding) for turn in _starts(turns[0], straight)), turning)


def _corner(digit: int, ndim: int, gray: bool) -> tuple[int, ...]:
    bits = digit ^ digit >> 1 if gray else digit
    return tuple(bits >> place & 1 for place in reversed(range(ndim)))


def _turned(turn: Turn, point: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(point[axis] ^ flip for axis, flip in zip(*turn, strict=True))


def _after(turn: Turn, inner: Turn) -> Turn:
    """The turn that `inner` comes to where the cube is turned by `turn`."""
    return tuple(inner[0][axis] for axis in turn[0]), _turned(turn, inner[1])


def _starts(first: Turn, straight: Turn) -> list[Turn]:
    """For 0 to 3 levels of zeros, each of which goes to the first part: the turn that they straighten."""
    cycle = [straight]
    while (turn := _after(cycle[-1], first)) != straight:
        cycle.append(turn)
    return [cycle[-levels % len(cycle)] for levels in range(4)]


def _encoded(digits: tuple[int, ...], points: list[tuple[int, ...]], turning: bool) -> tuple[int, int]:
    """Bytes for what goes in and what comes out at a step of encoding."""
    last = [sum(point) % 2 if turning else point[-1] for point in points]
    if len(points) == 2:
        return points[0][0] << 3 | points[1][0] << 2 | last[0] << 1 | last[1], (digits[0] >> 1) << 6 | (digits[1] >> 1) << 4
    return last[0] << 3 | points[0][0] << 1 | points[0][1], digits[0] >> 1 << 4


def _decoded(digits: tuple[int, ...], points: list[tuple[int, ...]]) -> tuple[int, int]:
    """The same of decoding."""
    if len(points) == 2:
        return digits[0] << 2 | digits[1], points[0][0] << 5 | points[1][0] << 4
    return digits[0], points[0][0] << 5 | points[0][1] << 4


def _state(turn: Turn, decoding: bool) -> int:
    """A turn as a byte."""
    source, flip = turn
    number = sorted(permutations(source)).index(source)
    if len(source) == 2:
        return number << 7 | flip[0] * (0b11 if decoding else 0b1100)
    return (0x00, 0x40, 0xC0)[number >> 1] | (number & 1) << (3 if decoding else 2) | flip[0] << 1 | flip[1]
