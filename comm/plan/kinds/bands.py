"""Bands: which pairs lie at most so many rows apart, as dense problems; for queries after their keys, or before them.

keys     k0 . . . . k1              queries and keys are numbers of rows, the keys all before the queries: query v sees the
query v0  * * * * * *               keys from v - reach on. The first rows of queries see all of these keys, the last ones
       .  * * * * * *               none, and between them lies a triangle, which is causal attention if both sides go backwards.
       .    * * * * *
       .      * * * *
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    """`queries` and `keys` `(first, count)` that see each other; in a `triangle`, equally many: key i is seen by queries <= i."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    triangle: bool


def pieces_after(queries: tuple[int, int], keys: tuple[int, int], reach: int) -> Iterator[Piece]:
    """The pairs at most `reach` apart of queries and keys, each `(first, stop)`, where all queries come after all keys.

    >>> [tuple(piece) for piece in pieces_after((4, 8), (0, 4), 2)]  # query 4 sees keys 2 and 3, query 5 key 3
    [((4, 2), (2, 2), True)]
    >>> [tuple(piece) for piece in pieces_after((4, 8), (0, 4), 5)]
    [((4, 1), (0, 4), False), ((5, 3), (0, 3), True), ((5, 3), (3, 1), False)]
    """
    (v0, v1), (u0, u1) = queries, keys
    u0, v1 = max(u0, v0 - reach), min(v1, u1 + reach)
    if u0 >= u1 or v0 >= v1:
        return
    turn = max(v0, min(u0 + reach, v1))  # queries before it see all keys
    if v0 < turn:
        yield Piece((v0, turn - v0), (u0, u1 - u0), False)
    if turn < v1:
        yield Piece((turn, v1 - turn), (turn - reach, v1 - turn), True)
        if v1 - reach < u1:
            yield Piece((turn, v1 - turn), (v1 - reach, u1 - v1 + reach), False)


def pieces_before(queries: tuple[int, int], keys: tuple[int, int], reach: int) -> Iterator[Piece]:
    """The same where all queries come before all keys: in a triangle, key i is seen by queries >= i."""
    for (v, rows), (u, seen), triangle in pieces_after(_mirrored(queries), _mirrored(keys), reach):
        yield Piece((1 - v - rows, rows), (1 - u - seen, seen), triangle)


def _mirrored(rows: tuple[int, int]) -> tuple[int, int]:
    return 1 - rows[1], 1 - rows[0]
