"""Global tokens over ranks: their keys and values go to all ranks, their queries to the keys of all ranks.

    rank              0          1          2          3
    global tokens  |**-------|---------|---------|---------|
    keys, values     `-------> to each rank, whose own queries see them
    queries          `-------> to each rank, which computes them with its own keys; (out, lse) come back, and are merged

With causality keys go to the ranks after their own alone, and queries to those before. Two global tokens see each other where the
query is at home.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dilkit.comm.plan.exchange import BranchExchange, LocalBranch, Pairs
from dilkit.comm.plan.messages import Message, SharedRows, SmallProblem, whole
from dilkit.comm.plan.shardable_forms import Forms, Spans, excluded_keys, excluded_queries, spans_within
from dilkit.pattern import GlobalTokens
from dilkit.pattern.lowering import Global


@dataclass(frozen=True, eq=False)
class TokenExchange(BranchExchange):
    """The messages of global tokens."""

    kind = "broadcast"
    tokens: Global
    excluding: Forms

    @cached_property
    def holders(self) -> dict[int, Spans]:
        """The runs of global tokens on each rank that holds some."""
        runs = {rank: spans_within(self.tokens.columns, *self.shard(rank)) for rank in self.held}
        return {rank: spans for rank, spans in runs.items() if spans}

    @property
    def is_scattered(self) -> bool:
        """True if the tokens of a rank are more than one run of rows."""
        return any(len(runs) > 1 for runs in self.holders.values())

    @property
    def see_all(self) -> bool:
        return len(self.tokens.rows) > 0

    def local(self, rank: int) -> LocalBranch | None:
        (start, stop), runs = self.shard(rank), self.holders.get(rank, ())
        if not runs:
            return None
        first_ones = len(runs) == 1 and runs[0][0] == start
        tokens = runs[0][1] - start if first_ones else [token - start for run in runs for token in range(*run)]
        return start, stop, GlobalTokens(tokens, "both" if self.see_all else "read", self.branch.heads)

    def peers(self, rank: int) -> Iterable[int]:
        return self.held if rank in self.holders else [*self.holders, rank]

    def _seen(self, source: int, target: int) -> bool:
        """True if queries of `target` see global tokens of `source` by its message."""
        return source in self.holders and (source < target if self.is_causal else source != target)

    def _sees(self, source: int, target: int) -> bool:
        """True if global tokens of `source` see keys of `target` there."""
        earlier = target < source if self.is_causal else source != target
        return self.see_all and source in self.holders and earlier

    def message(self, source: int, target: int) -> Message:
        if source == target:
            start, stop = self.shard(source)
            own: list[SharedRows] = [(self.heads, start, 1, stop - start)]
            queries, keys = (any(has(other, source) for other in self.holders) for has in (self._seen, self._sees))
            return own if queries else [], own if keys else []
        tokens: list[SharedRows] = [(self.heads, start, 1, stop - start) for start, stop in self.holders.get(source, ())]
        return tokens if self._sees(source, target) else [], tokens if self._seen(source, target) else []

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        here, forms = self.shard(rank), self.excluding
        for source, runs in self.holders.items():
            there = self.shard(source)
            for head in self.heads:
                own_rows, tokens = whole([self.rows_of(head, *here)]), whole(self.rows_of(head, *run) for run in runs)
                if self._seen(source, rank):
                    excluded = excluded_queries(forms, head, *here), excluded_keys(forms, head, *there)
                    yield SmallProblem(own_rows, tokens, False, None, source, *excluded)
                if self._sees(source, rank):
                    excluded = excluded_queries(forms, head, *there), excluded_keys(forms, head, *here, self.tokens.columns)
                    yield SmallProblem(tokens, own_rows, False, None, source, *excluded)

    @cached_property
    def pairs(self) -> Pairs:
        queries, keys = self.counts
        rows, tokens = np.diff(self.edges), np.zeros(self.world_size, np.int64)
        tokens[[*self.holders]] = [sum(stop - start for start, stop in runs) for runs in self.holders.values()]
        seen, seeing = keys[1] // len(self.heads), queries[1] // self.width
        pairs: Pairs = (rows.astype(object) * seen + seeing.astype(object) * (rows - tokens)) * self.width
        return pairs
