"""How a pair of tokens that branches of several kinds show counts once: each branch leaves out what others have shown.

    GlobalTokens              none of its tokens, as queries or keys that see or are seen by all, takes part in another branch
    SlidingWindow, Strided    a band begins where a narrower one ends whose rate divides its own
    DilatedSegment            the segments of all branches are scored together

Other mixes have no such order: what one branch shows of another is left out pair by pair (`shown_before`), or the mix is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from dilkit.pattern import Branch, DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.pattern.runs import UNBOUNDED

TURNS = {"dilated_segment": 0, "sliding_window": 1, "strided": 1, "neighborhood": 2, "block_sparse": 3}


def branches_of_heads(pattern: Pattern, heads: int) -> set[tuple[Branch, ...]]:
    """The branches that serve a query head, of each: what one head sees counts by itself."""
    return {tuple(branch for branch in pattern.branches if branch.serves(head)) for head in range(heads)}


def counts_once(branches: Sequence[Branch]) -> bool:
    """Whether each pair that these branches show a head can be counted once in this order, with nothing left out pair by pair."""
    if len(branches) < 2 or all(isinstance(branch, DilatedSegment) for branch in branches):
        return True
    bands = [branches[i] for i in in_order(branches)]
    chosen = sum(isinstance(branch, GlobalTokens) for branch in branches)
    return len(bands) + chosen == len(branches) and all(rate_of(b) % rate_of(a) == 0 for a, b in combinations(bands, 2))


def globals_before(branches: Sequence[Branch], at: int, head: int) -> tuple[GlobalTokens, ...]:
    """The branches of global tokens whose pairs branch `at` leaves out for a query head."""
    found = (
        branch
        for i, branch in enumerate(branches)
        if isinstance(branch, GlobalTokens) and branch.serves(head) and (i < at or not isinstance(branches[at], GlobalTokens))
    )
    return tuple(found)


def beyond(branches: Sequence[Branch], at: int, head: int) -> int:
    """The distance from which on a band of `branches` begins for a query head; 0 for what is no band."""
    order = in_order(branches)
    earlier = (branches[i] for i in (order[: order.index(at)] if at in order else []) if branches[i].serves(head))
    return max((end_of(band) for band in earlier if rate_of(branches[at]) % rate_of(band) == 0), default=0)


def shown_before(branches: Sequence[Branch], at: int, head: int) -> list[int]:
    """The places of the branches whose pairs branch `at` has to leave out one by one for a query head.

    Segments come first, then bands, neighborhoods, and last blocks, of which those of all branches are taken together.
    """
    if branches[at].kind not in TURNS:
        return []
    bands = in_order(branches)
    places = [i for i, branch in enumerate(branches) if branch.serves(head) and branch.kind in TURNS]
    found = [i for i in places if TURNS[branches[i].kind] < TURNS[branches[at].kind]]
    if at in bands:
        earlier = (i for i in bands[: bands.index(at)] if i in places)
        found += [i for i in earlier if rate_of(branches[at]) % rate_of(branches[i])]
    elif branches[at].kind == "neighborhood":
        found += [i for i in places if i < at and branches[i].kind == "neighborhood"]
    return found


def in_order(branches: Sequence[Branch]) -> list[int]:
    """The places of the bands among branches, each after those that it leaves out."""
    places = [i for i, branch in enumerate(branches) if isinstance(branch, (SlidingWindow, Strided))]
    return sorted(places, key=lambda i: (rate_of(branches[i]), -end_of(branches[i])))


def rate_of(band: Branch) -> int:
    """What the distances of a band are multiples of."""
    return band.stride if isinstance(band, Strided) else getattr(band, "dilation_rate", 1)


def end_of(band: Branch) -> int:
    """The distance that a band ends before; of a stride none, for no tokens are so far apart."""
    return min(getattr(band, "window", UNBOUNDED), UNBOUNDED)
