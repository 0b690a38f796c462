"""The factor by which branches repeat keys: scored branch by branch, the pairs of a problem over its distinct pairs.

A branch shows a query an arithmetic progression of keys. Keys that several progressions have are counted by inclusion and
exclusion, on some queries of each kind of head:

    distinct = sum over all sets S of branches: (-1) ** (len(S) + 1) * keys in every progression of S
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from dilkit.pattern.lowering import Band, Segments

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dilkit.pattern.lowering import Form
    from dilkit.problem import Problem

    Ints = NDArray[np.int64]

MOST_QUERIES = 256
"""The queries that are looked at, spread over the sequence; of a shorter one all."""
MOST_BRANCHES = 8
"""The branches of a head that are looked at: every further one doubles the sets."""
LONGEST = 2**31
"""The tokens of a longer sequence that are looked at: products of two of their positions fit into int64."""
_GOLDEN = 0.6180339887498949


class _Keys(NamedTuple):
    """Progressions of keys, one for each query: `start <= j < stop` with `j mod step == residue`; none where stop <= start."""

    start: Ints
    stop: Ints
    residue: Ints
    step: int

    def within(self, seq: int) -> _Keys:
        """Return the same keys below `seq` with a step of at most `seq`."""
        if self.step <= seq:
            return self
        first = self.start + (self.residue - self.start) % self.step  # the only key, if there is one
        return _Keys(first, first + (first < self.stop), first % seq, seq)

    @property
    def total(self) -> int:
        first = self.start + (self.residue - self.start) % self.step
        return int((-(-(self.stop - first) // self.step)).clip(min=0).sum())


@lru_cache(maxsize=256)
def repetition(problem: Problem) -> float:
    """Return how many times a key is scored on average if each branch is computed by itself; 1.0 where none share keys.

    Dilated segments and bands that begin at the query count. Branches of other kinds share few keys.

    >>> from dilkit import Device, Pattern, Problem
    >>> pattern = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    >>> gpu = Device.assume("sm_90")
    >>> round(repetition(Problem(pattern=pattern, seq=131072, heads=8, head_dim=64, dtype="bfloat16", device=gpu)), 2)
    1.32
    """
    seq = min(max(problem.seq, 1), problem.pattern.max_seq, LONGEST)
    forms = [form for form in problem.forms if isinstance(form, Segments) or (isinstance(form, Band) and not form.first)]
    by_branches: dict[tuple[int, ...], int] = {}
    for head in range(problem.heads):
        by_branches.setdefault(tuple(i for i, form in enumerate(forms) if form.serves(head))[:MOST_BRANCHES], head)
    scored = distinct = 0
    for served, head in by_branches.items():
        sets: list[tuple[int, _Keys]] = []
        for keys in (_keys(forms[i], head, seq, problem.is_causal).within(seq) for i in served):
            scored += keys.total
            sets += [(1, keys), *((-sign, _common(other, keys).within(seq)) for sign, other in sets)]
        distinct += sum(sign * keys.total for sign, keys in sets)
    return scored / distinct if distinct else 1.0


def _keys(form: Form, head: int, seq: int, is_causal: bool) -> _Keys:
    import numpy as np

    count = min(seq, MOST_QUERIES)
    place = np.arange(count)
    query = ((place + (place * _GOLDEN % 1 if seq > count else 0)) * (seq / count)).astype(np.int64)  # of all residues
    if isinstance(form, Segments):
        length, offset = min(form.length, seq), form.offset_of(head)
        start = query - query % length
        keys = _Keys(start, np.minimum(start + length, seq), (start + offset) % form.rate, form.rate)
        keys = keys._replace(stop=np.where((query - start) % form.rate == offset, keys.stop, start))
    else:
        assert isinstance(form, Band)
        back, ahead = min(form.back, seq), min(form.ahead, seq)
        keys = _Keys(np.maximum(query - back, 0), np.minimum(query + ahead + 1, seq), query % form.rate, form.rate)
    return keys._replace(stop=np.minimum(keys.stop, query + 1)) if is_causal else keys


def _common(one: _Keys, other: _Keys) -> _Keys:
    """Return the keys in both progressions, by the Chinese remainder theorem."""
    import numpy as np

    shared = gcd(one.step, other.step)
    turns = other.step // shared
    apart = other.residue - one.residue
    times = apart // shared * pow(one.step // shared, -1, turns) % turns
    start = np.maximum(one.start, other.start)
    stop = np.where(apart % shared == 0, np.minimum(one.stop, other.stop), start)
    step = one.step * turns
    return _Keys(start, stop, (one.residue + one.step * times) % step, step)
