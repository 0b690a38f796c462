"""State tables of the Hilbert and Morton curves: finite-state machines that turn coordinates into codes and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Orientation: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A symmetry of the cube, (source, flip): output axis i is input axis source[i], reversed where flip[i] is 1."""

HILBERT: dict[int, tuple[Orientation, ...]] = {
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
"""The orientation of Skilling's Hilbert curve in each part of the square or cube, in the order of its visits, by ndim.

The d-th part that the curve visits is at the corner whose bits, the first axis highest, are the Gray code of d, `d ^ d >> 1`.
"""

BLOCK_BITS = {2: 4, 3: 3}
"""Bits of a coordinate within a block of cells, by ndim."""


@cache
def block_tables(ndim: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the tables of `HilbertTables` (c/curves/curves.h): cells and inner states `(states, cells)`, and states before."""
    parts, orientations, inner = HILBERT[ndim], [(tuple(range(ndim)), (0,) * ndim)], []
    for orientation in orientations:  # which grow until none is new
        states = [_compose(orientation, part) for part in parts]
        orientations += [state for i, state in enumerate(states) if state not in orientations and state not in states[:i]]
        inner.append([orientations.index(state) for state in states])
    corners = [tuple((i ^ i >> 1) >> place & 1 for place in reversed(range(ndim))) for i in range(2**ndim)]
    step = np.array([[_apply(orientation, corner) for corner in corners] for orientation in orientations])
    next_state, state = np.array(inner), np.arange(len(inner))[:, None]
    cells = np.zeros((len(inner), 1, ndim), np.int64)
    for _ in range(BLOCK_BITS[ndim]):
        cells = (2 * cells[:, :, None] + step[state]).reshape(len(inner), -1, ndim)
        state = next_state[state].reshape(len(inner), -1)
    before = np.empty(len(inner), np.uint8)
    before[next_state[:, 0]] = np.arange(len(inner))
    cell = cells @ (1 << BLOCK_BITS[ndim] * np.arange(ndim)[::-1])
    return cell.astype(np.uint16), state.astype(np.uint8), before


@dataclass(frozen=True, eq=False)
class StateTable:
    """The finite-state machine of a curve in one direction, points to codes or back. c/points/kernel.h describes its steps."""

    transitions: NDArray[np.uint8]
    """`(256,)`: state change and output bits, by state ^ input bits."""
    start_states: tuple[int, ...]
    """The states from which 0, 1, 2 or 3 levels of zeros lead to the state 0."""
    is_oriented: bool
    """True if the orientation changes, as it does for Hilbert's curve and not for Morton's. The last bit of a digit is then the
    parity of the point's bits, else the bit of the last axis."""


@cache
def state_table(curve: str, ndim: int, decoding: bool) -> StateTable:
    """Return the state table of "hilbert" or "morton" in 2-D or 3-D."""
    is_oriented, identity = curve == "hilbert", (tuple(range(ndim)), (0,) * ndim)
    parts = HILBERT[ndim] if is_oriented else (identity,) * 2**ndim
    table = np.zeros(256, np.uint8)
    levels = 4 - ndim
    for source, digits in product(permutations(range(ndim)), product(range(2**ndim), repeat=levels)):
        orientation, points = (source, (0,) * ndim), []
        for digit in digits:
            bits = digit ^ digit >> 1 if is_oriented else digit
            points.append(_apply(orientation, tuple(bits >> place & 1 for place in reversed(range(ndim)))))
            orientation = _compose(orientation, parts[digit])
        input_bits, output_bits = _step_bits(digits, points, is_oriented, decoding)
        before = _state((source, (0,) * ndim), decoding)
        table[before ^ input_bits] = before ^ _state(orientation, decoding) ^ output_bits
    table.setflags(write=False)
    cycle = [identity]  # of the orientations by which the first part is entered again and again
    while (orientation := _compose(cycle[-1], parts[0])) != identity:
        cycle.append(orientation)
    starts = tuple(_state(cycle[-levels % len(cycle)], decoding) for levels in range(4))
    return StateTable(table, starts, is_oriented)


def _apply(orientation: Orientation, point: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(point[axis] ^ flip for axis, flip in zip(*orientation, strict=True))


def _compose(outer: Orientation, inner: Orientation) -> Orientation:
    """Return the orientation `inner` within a cube of orientation `outer`."""
    return tuple(inner[0][axis] for axis in outer[0]), _apply(outer, inner[1])


def _step_bits(digits: tuple[int, ...], points: list[tuple[int, ...]], is_oriented: bool, decoding: bool) -> tuple[int, int]:
    if decoding and len(points) == 2:
        return digits[0] << 2 | digits[1], points[0][0] << 5 | points[1][0] << 4
    if decoding:
        return digits[0], points[0][0] << 5 | points[0][1] << 4
    last = [sum(point) % 2 if is_oriented else point[-1] for point in points]
    if len(points) == 2:
        return points[0][0] << 3 | points[1][0] << 2 | last[0] << 1 | last[1], (digits[0] >> 1) << 6 | (digits[1] >> 1) << 4
    return last[0] << 3 | points[0][0] << 1 | points[0][1], digits[0] >> 1 << 4


def _state(orientation: Orientation, decoding: bool) -> int:
    source, flip = orientation
    number = sorted(permutations(source)).index(source)
    if len(source) == 2:
        return number << 7 | flip[0] * (0b11 if decoding else 0b1100)
    return (0x00, 0x40, 0xC0)[number >> 1] | (number & 1) << (3 if decoding else 2) | flip[0] << 1 | flip[1]
