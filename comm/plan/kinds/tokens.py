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

from dilkit.comm.plan.kept_rows import KeptRows, Message, ProblemRows, SmallProblem
from dilkit.comm.plan.kinds.exchange import BranchExchange, ExchangeCounts
from dilkit.comm.plan.kinds.excluded import ExcludedTokens, Spans, spans_within
from dilkit.comm.plan.local_branches import LocalBranch
from dilkit.comm.plan.sharded_segments import ServedHead
from dilkit.pattern import GlobalTokens
from dilkit.pattern.lowering import Global


@dataclass(frozen=True, eq=False)
class TokenExchange(BranchExchange):
    """What is sent of global tokens."""

    tokens: Global
    excluded: ExcludedTokens

    @property
    def kind(self) -> str:
        return "broadcast"

    @cached_property
    def holders(self) -> list[int]:
        """The ranks that hold global tokens."""
        return [rank for rank in self.held if self._runs(rank)]

    @property
    def is_scattered(self) -> bool:
        """Whether the tokens of a rank are more than one run of rows."""
        return any(len(self._runs(rank)) > 1 for rank in self.holders)

    @property
    def see_all(self) -> bool:
        """Whether the tokens see all others, too."""
        return len(self.tokens.rows) > 0

    def _runs(self, rank: int) -> Spans:
        return spans_within(self.tokens.columns, *self.shard(rank))

    def local(self, rank: int) -> LocalBranch | None:
        (start, stop), runs = self.shard(rank), self._runs(rank)
        if not runs:
            return None
        first_ones = len(runs) == 1 and runs[0][0] == start
        tokens = runs[0][1] - start if first_ones else [token - start for run in runs for token in range(*run)]
        return LocalBranch(start, stop, GlobalTokens(tokens, "both" if self.see_all else "read", self.branch.heads))

    def peers(self, rank: int) -> Iterable[int]:
        return self.held if rank in self.holders else [*self.holders, rank]

    def _seen(self, source: int, target: int) -> bool:
        """Whether queries of `target` see global tokens of `source` by its message."""
        return source in self.holders and (source < target if self.is_causal else source != target)

    def _sees(self, source: int, target: int) -> bool:
        """Whether global tokens of `source` see keys of `target` there."""
        earlier = target < source if self.is_causal else source != target
        return self.see_all and source in self.holders and earlier

    def message(self, source: int, target: int) -> Message:
        if source == target:
            own = [self.kept(head, *self.shard(source)) for head in self.heads]
            queries, keys = (any(has(other, source) for other in self.holders) for has in (self._seen, self._sees))
            return Message(own if queries else [], own if keys else [])
        kept = [rows for head in self.heads for rows in self._of_tokens(head, source)]
        return Message(kept if self._sees(source, target) else [], kept if self._seen(source, target) else [])

    def _of_tokens(self, head: ServedHead, rank: int) -> list[KeptRows]:
        return [self.kept(head, *run) for run in self._runs(rank)]

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        start, stop = self.shard(rank)
        for source in self.holders:
            first, last = self.shard(source)
            for head in self.heads:
                own, tokens = ProblemRows.whole([self.kept(head, start, stop)]), ProblemRows.whole(self._of_tokens(head, source))
                if self._seen(source, rank):
                    excluded = self.excluded.queries(head, start, stop), self.excluded.keys(head, first, last)
                    yield SmallProblem(own, tokens, False, None, source, *excluded)
                if self._sees(source, rank):
                    excluded = (
                        self.excluded.queries(head, first, last),
                        self.excluded.keys(head, start, stop, self.tokens.columns),
                    )
                    yield SmallProblem(tokens, own, False, None, source, *excluded)

    @cached_property
    def counts(self) -> ExchangeCounts:
        rows, ranks = np.diff(self.edges), np.arange(len(self.held))
        tokens = np.array([sum(stop - start for start, stop in self._runs(rank)) for rank in self.held], np.int64)
        through, others, both = np.cumsum(tokens), len(ranks) - 1, self.see_all
        if self.is_causal:
            keys, queries, to_keys, to_queries = through - tokens, through[-1] - through, ranks, others - ranks
        else:
            keys, to_keys = through[-1] - tokens, others + 0 * ranks
            queries, to_queries = keys, to_keys
        queries, to_keys = queries * both, to_keys * both
        heads, width = len(self.heads), self.width
        there = width * tokens * to_keys, width * queries, width * (queries + rows * (keys > 0))
        back = heads * tokens * to_queries, heads * keys, heads * (keys + rows * (queries > 0))
        pairs = (rows.astype(object) * keys + queries.astype(object) * (rows - tokens)) * width
        return ExchangeCounts(*(self.by_rank(x) for x in (*there, *back, pairs)))
