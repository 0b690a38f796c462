"""Checks of the arguments of a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from itertools import islice
from typing import Any

from dilkit.checks import integer, one_of, shown

OFFSETS = ("modulo", "block")
OVERLAPS = ("count", "once")
TAILS = ("exact", "zeros")

MOST_BRANCHES = 1024
"""Branches of a pattern, at most: each costs something at every call."""

WHOLE_SEQUENCE = 2**63 - 1
"""A segment length that no sequence reaches: the segment is the whole sequence."""


class PatternError(ValueError):
    """A pattern has arguments that do not fit each other, or does not fit the heads that it is applied to. A ValueError.

    Example:

        >>> from dilkit import Pattern, PatternError
        >>> try:
        ...     Pattern(segment_lengths=[512, 1024], dilation_rates=[1])
        ... except PatternError as error:
        ...     print(error)
        segment_lengths has 2 entries and dilation_rates 1; give one rate for each length
    """


def positive_integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return `values` as a tuple of integers from 1 to 2**63 - 1, at least one of them."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={shown(values)} must be a sequence of integers, such as [2048, 4096]")
    listed = tuple(islice(values, MOST_BRANCHES + 1))
    if len(listed) > MOST_BRANCHES:
        check_number_of_branches(name, len(values) if isinstance(values, Sized) else None)
    if not listed:
        raise PatternError(f"{name} is empty; a pattern has at least one branch (Pattern.dense() is ordinary attention)")
    return tuple(positive(f"{name}[{i}]", value) for i, value in enumerate(listed))


def positive(name: str, value: Any, or_else: str = "") -> int:
    """Return `value` as an integer from 1 to 2**63 - 1. Raises TypeError or `PatternError`, which says what there may be else."""
    if not 1 <= (number := integer(name, value)) <= WHOLE_SEQUENCE:
        raise PatternError(f"{name}={number} must be from 1 to 2**63 - 1{or_else}")
    return number


def check_number_of_branches(name: str, number: int | None) -> None:
    """Raise `PatternError` beyond `MOST_BRANCHES`, before anything is worked out for each; None: an unknown number more."""
    if number is None or number > MOST_BRANCHES:
        entries = f"{number:,}" if number else f"more than {MOST_BRANCHES:,}"
        raise PatternError(
            f"{name} has {entries} entries; at most {MOST_BRANCHES:,} branches are possible (one BlockSparse may do)"
        )


def head_ranges(heads: Any, branches: int) -> tuple[tuple[int, int] | None, ...] | None:
    """Return one (start, stop) pair or None for each branch; None when every branch serves all heads."""
    if heads is None:
        return None
    if isinstance(heads, (str, range)) or not isinstance(heads, Sequence):
        raise TypeError(f"heads={shown(heads)} must be a sequence with one range, (start, stop) pair or None for each branch")
    if len(heads) != branches:
        raise PatternError(f"heads has {len(heads)} entries for {branches} branches; give one range or None for each branch")
    ranges = tuple(head_range(f"heads[{i}]", entry) for i, entry in enumerate(heads))
    return None if all(entry is None for entry in ranges) else ranges


def head_range(name: str, entry: Any) -> tuple[int, int] | None:
    """Return the heads that a branch serves as a pair (start, stop); None: all of them."""
    if entry is None:
        return None
    if isinstance(entry, range):
        if entry.step != 1:
            raise PatternError(f"{name}={shown(entry)} has step {entry.step}; only contiguous heads (step 1) can be served")
        entry = (entry.start, entry.stop)
    if isinstance(entry, list):
        raise TypeError(f"{name}={shown(entry)} is a list; give range(start, stop) or (start, stop)")
    if isinstance(entry, str) or not isinstance(entry, Sequence) or len(entry) != 2:
        raise TypeError(f"{name}={shown(entry)} must be a range, a (start, stop) pair or None")
    start, stop = (integer(name, value) for value in entry)
    if not 0 <= start < stop:
        raise PatternError(f"{name}=({start}, {stop}) serves no head; 0 <= start < stop is needed")
    return start, stop


def shard_of_heads(shard: Any) -> tuple[int, int] | None:
    """Return `(first, total)`: the key/value heads at hand are those from `first` on, of `total`; None: they are all."""
    if shard is None:
        return None
    if isinstance(shard, str) or not isinstance(shard, Sequence) or len(shard) != 2:
        raise TypeError(f"head_shard={shown(shard)} must be a pair (first, total) of key/value heads, or None")
    first, total = (integer("head_shard", value) for value in shard)
    if not 0 <= first < total:
        raise PatternError(f"head_shard=({first}, {total}) holds no head; 0 <= first < total is needed")
    return first, total


def check_tail(tail: str, overlap: str) -> None:
    """Raise `PatternError` unless `tail` is one of `TAILS` and goes with `overlap`."""
    one_of("tail", tail, TAILS, PatternError)
    if tail == "zeros" and overlap == "once":
        raise PatternError("tail='zeros' with overlap='once' is not defined; overlap='count' or tail='exact' is needed")
