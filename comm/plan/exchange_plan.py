"""The exchange plan: which rank computes what, and which rows have to be sent for that. A pure value; making it sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import numpy as np

from dilkit import plan as core_plan
from dilkit.checks import boolean, check_type, integer, one_of
from dilkit.comm.cuts import checked_cuts
from dilkit.comm.plan.exchange import BranchExchange, Pairs, Route
from dilkit.comm.plan.kinds.blocks import BlockExchange
from dilkit.comm.plan.kinds.tokens import TokenExchange
from dilkit.comm.plan.kinds.windows import WindowExchange
from dilkit.comm.plan.messages import IntArray
from dilkit.comm.plan.segments import SegmentExchange, busiest_ranks, choose_route, segment_shards
from dilkit.comm.plan.shardable_forms import (
    Forms,
    excluding_forms,
    is_stride,
    joint_segments,
    pattern_in_segment,
    served_heads,
    shardable_forms,
    why_joint,
)
from dilkit.comm.plan.traffic import PhaseTraffic, Rows, branch_traffic
from dilkit.pattern import Branch, Pattern
from dilkit.pattern.lowering import Band, Global, Runs, Segments

SCHEDULES = ("auto", "balanced", "scatter", "gather", "ring")
KEEPS = ("rows", "nothing")
"""Received rows that a rank keeps from the forward to the backward pass."""
PHASES = ("forward", "backward")
LocalRange = tuple[int, int, Pattern, int]
"""Rows `start .. stop - 1` of a shard, the pattern whose segments tile them, and the position of the first row."""
_ARRAYS = 3
"""About as many arrays as large as its shards are made of a branch, and of numbers a rank."""
MOST_COUNTS = 2**23
"""The most counts of rows that are made of the residue classes of a stride: 64 MiB for each quantity of a plan."""


@dataclass(frozen=True)
class ExchangePlan:
    """The computation and the messages of all ranks for one call. Rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`.

    The plan is a function of its arguments alone: every rank makes the same one, and nothing is sent for it. For each branch it
    chooses a route (`routes`), and counts the rows and bytes that each rank sends, and the query-key pairs that it computes.

    `schedule`: "auto" chooses for each branch the route that moves the fewest rows through the busiest rank, "balanced" the one
    whose busiest rank computes the fewest pairs: with causality the last ranks see more keys than the first. "scatter", "gather"
    and "ring" are used wherever a segment or a stride is not within one rank. Branches of other kinds have one route
    each; neighborhoods, and most mixes with `overlap="once"`, are joint: whole rows are scattered, and a head is computed in one
    piece. `fuse_branches=False` computes branches and segments one by one, and patterns with other kinds jointly, so that the
    result is bitwise the same for every world size: rows are moved, and never summed in another order. "auto" then scatters, and
    "gather" and "ring", which sum up partial results of ranks, are refused.

    `keep`: with "rows" a rank keeps the rows that it received from the forward to the backward pass; with "nothing" they are
    sent again there. Rows then travel one branch after the other, in both passes, so that those of one branch alone lie in
    buffers at a time. Results are the same, bit for bit, but for the gradient of a bias: its sums are taken in another order.

    Raises ValueError or TypeError for arguments that do not fit: cuts that do not grow from 0, heads that the pattern does not
    serve, a `keep` or a schedule that is not known, or one that `fuse_branches` or `overlap="once"` rules out.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import ExchangePlan
        >>> plan = ExchangePlan(Pattern([16, 64], [1, 4]), cuts=(0, 32, 64), heads=4, kv_heads=4)
        >>> [route.kind for route in plan.routes]
        ['local', 'scatter']
        >>> plan.bytes(0, "forward", head_dim=8, dtype="float32")  # 16 rows each of q, k, v there, 16 rows with lse back
        2112
        >>> plan.work(0)  # query-key pairs, in 4 heads: 2 segments of 16 * 16, and half of one segment of 16 * 16
        2560

    Source: DeepSpeed Ulysses (arXiv 2309.14509) scatters dense heads; here each branch scatters the sparse rows that it keeps.
    """

    pattern: Pattern
    cuts: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool = False
    schedule: str = "auto"
    fuse_branches: bool = True
    keep: str = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", checked_cuts(self.cuts))
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("keep", self.keep, KEEPS)
        boolean("is_causal", self.is_causal)
        boolean("fuse_branches", self.fuse_branches)
        integer("heads", self.heads, at_least=1)
        check_type("pattern", self.pattern, Pattern, "a dilkit.Pattern is needed")
        self.pattern.check_heads(self.heads, integer("kv_heads", self.kv_heads))
        self.pattern.check_seq(self.seq)
        self._check_countable(Rows(1, "float16"))
        if self.schedule in ("gather", "ring"):
            self._check_partial_results()
        self._check_strides()
        if self.schedule != "auto" and not any(isinstance(exchange, SegmentExchange) for exchange in self.exchanges):
            raise ValueError(
                f"schedule={self.schedule!r} is for branches with segments or strides, of which the pattern has none; use 'auto'"
            )

    def _check_countable(self, rows: Rows) -> None:
        if self.seq * self.heads * rows.batch * 8 * (rows.row_bytes + rows.lse_bytes) >= 2**63:
            raise ValueError(
                f"seq={self.seq:,}: with heads={self.heads}, batch={rows.batch} and rows of {rows.row_bytes} bytes, the bytes of "
                "a call do not fit into 64 bits; plan for fewer tokens"
            )

    def _check_strides(self) -> None:
        strides = [forms[0].rate for forms in self.forms if isinstance(forms[0], Band) and is_stride(forms)]
        for stride in strides if self.world_size > 1 else ():
            counts = min(stride, self.seq) * self.world_size * self.kv_heads
            if counts > MOST_COUNTS:
                raise ValueError(
                    f"stride={stride:,}: on {self.world_size:,} ranks with kv_heads={self.kv_heads}, the rows of its "
                    f"residue classes are {counts:,} counts, at most {MOST_COUNTS:,} are made; use a smaller stride, or fewer "
                    "ranks"
                )

    def _check_partial_results(self) -> None:
        if not self.fuse_branches:
            raise ValueError(
                f"schedule={self.schedule!r} sums the results of ranks, so that bits depend on the world size, which "
                "fuse_branches=False rules out; use schedule='scatter' or 'auto'"
            )
        if self.is_joint:
            raise ValueError(
                f"schedule={self.schedule!r} sums the results of branches, but {self._why_joint}; use "
                "schedule='scatter' or 'auto'"
            )

    @cached_property
    def is_joint(self) -> bool:
        """True if a row's whole softmax must be computed in one piece, such as where a key counts once over all branches."""
        in_one_piece = not self.fuse_branches and not self.pattern.only_segments
        return in_one_piece or bool(self._why_joint)

    @cached_property
    def _why_joint(self) -> str:
        return why_joint(self.pattern, self.seq, self.heads, self.kv_heads)

    @cached_property
    def exchange_pattern(self) -> Pattern:
        """The pattern whose rows are exchanged: `pattern`, or for joint branches segments with all their rows."""
        return joint_segments(self.pattern, self.seq, self.heads, self.kv_heads) if self.is_joint else self.pattern

    @cached_property
    def forms(self) -> tuple[Forms, ...]:
        """The forms of each branch of `exchange_pattern`."""
        return shardable_forms(self.exchange_pattern, self.seq, self.heads, self.kv_heads)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.cuts) - 1

    @property
    def seq(self) -> int:
        """Tokens of the whole sequence."""
        return self.cuts[-1]

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The route of each branch; of all together where they are joint."""
        return tuple(exchange.route for exchange in self.exchanges)

    @cached_property
    def exchanges(self) -> tuple[BranchExchange, ...]:
        """The messages of each branch of `exchange_pattern`, and the problems that they are for."""
        return tuple(map(self._exchange, range(len(self.exchange_pattern.branches))))

    def _exchange(self, branch: int) -> BranchExchange:
        forms, sizes = self.forms[branch], (self.heads, self.kv_heads)
        facts = branch, self.exchange_pattern.branches[branch], self.cuts, served_heads(forms, *sizes), self.is_causal
        if isinstance(forms[0], Segments) or is_stride(forms):
            shards = segment_shards(self.exchange_pattern, branch, self.cuts, *sizes)
            route = choose_route(self.schedule, shards, self.world_size, self.is_causal, self._scatter_only)
            shards = replace(shards, group_size=route.group_size)
            pattern_of = partial(pattern_in_segment, self.pattern, forms[0].heads, self.seq, *sizes) if self.is_joint else None
            return SegmentExchange(*facts, forms[0], route, shards, pattern_of, not self.fuse_branches)
        if isinstance(forms[0], Runs):
            model = self.pattern.among(*sizes)
            return BlockExchange(*facts, cast(tuple[Runs, ...], forms), (model.in_model, model.total * model.group))
        excluding = excluding_forms(self.pattern, branch, self.seq, *sizes)
        if isinstance(forms[0], Band):
            return WindowExchange(*facts, forms[0], excluding)
        assert isinstance(forms[0], Global)
        return TokenExchange(*facts, forms[0], excluding)

    def local_ranges(self, rank: int) -> tuple[LocalRange, ...]:
        """Return the ranges that a rank computes by itself; none where segments are computed one by one."""
        if rank not in self._local_ranges:
            self._local_ranges[rank] = self._ranges_of(rank) if self.fuse_branches else ()
        return self._local_ranges[rank]

    @cached_property
    def _local_ranges(self) -> dict[int, tuple[LocalRange, ...]]:
        return {}

    def _ranges_of(self, rank: int) -> tuple[LocalRange, ...]:
        first, branches = self.cuts[rank], dict[tuple[int, int], list[Branch]]()
        for exchange in self.exchanges:
            if local := exchange.local(rank):
                start, stop, branch = local
                branches.setdefault((start, stop), []).append(branch)
        # Without the keys that segments are padded with: those are added to whole results.
        return tuple(
            (start - first, stop - first, self.pattern.with_branches(*every, tail="exact"), start)
            for (start, stop), some in branches.items()
            for every in [self.pattern.branches if self.is_joint else some]
        )

    @cached_property
    def rings(self) -> tuple[SegmentExchange, ...]:
        return tuple(one for one in self.exchanges if isinstance(one, SegmentExchange) and one.route.kind == "ring")

    @cached_property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """The branches whose rows travel together by all-to-all, round by round: all at once, or one by one where none are kept.

        They do on routes other than the ring, and where segments are computed one by one.
        """
        every = [b for b, route in enumerate(self.routes) if not self.fuse_branches or route.kind not in ("local", "ring")]
        return ((*every,),) if every and self.keep == "rows" else tuple((branch,) for branch in every)

    def check_dropout(self, dropout_p: float) -> None:
        """Raise ValueError where weights are to be dropped of rows that do not lie at equal steps."""
        if dropout_p and any(isinstance(exchange, TokenExchange) and exchange.is_scattered for exchange in self.exchanges):
            raise ValueError(
                f"dropout_p={dropout_p}: dropout over ranks needs each rank's global tokens to be contiguous; use "
                "fuse_branches=False, which computes head by head, or dropout_p=0"
            )

    @property
    def nbytes(self) -> int:
        """About the bytes of what it counts: of each branch a few arrays as large as its shards, and some numbers a rank."""
        shards = sum(exchange.shards.nbytes for exchange in self.exchanges if isinstance(exchange, SegmentExchange))
        return _ARRAYS * (shards + 8 * self.world_size * len(self.exchanges))

    def positions(self, rank: int) -> range:
        """Return the positions in the sequence of the rows that a rank holds."""
        rank = self._rank(rank)
        return range(*self.cuts[rank : rank + 2])

    def work(self, rank: int) -> int:
        """Query-key pairs that a rank computes, over all heads, a key seen by several branches counting each time.

        Nominal forward FLOPs are `4 * head_dim * batch` times this.
        """
        return int(self.all_work["total"][self._rank(rank)])

    @cached_property
    def all_work(self) -> dict[str, Pairs]:
        """The pairs of all ranks, `(world_size,)` each, as integers of any size.

        "local": within a shard; "moved": with rows moved to the rank; "ring": with blocks that go round; "total": all.
        """
        work = {name: np.zeros(self.world_size, object) for name in ("local", "moved", "ring")}
        for exchange in self.exchanges:
            work["local" if self.fuse_branches else "moved"] += self._local_pairs(exchange)
            work["ring" if exchange.route.kind == "ring" else "moved"] += self._exchanged_pairs(exchange)
        return work | dict(total=work["local"] + work["moved"] + work["ring"])

    def _local_pairs(self, exchange: BranchExchange) -> Pairs:
        pairs: dict[tuple[Branch | None, int], int] = {}
        total = np.zeros(self.world_size, object)
        for rank in range(self.world_size):
            if local := exchange.local(rank):
                start, stop, branch = local
                pattern, key = self.pattern, (None if self.is_joint else branch, stop - start)
                if key not in pairs:
                    pattern = pattern if self.is_joint else pattern.with_branches(branch, overlap="count", tail="exact")
                    pairs[key] = self._pairs_of(pattern, stop - start, self.heads, self.kv_heads)
                total[rank] = pairs[key]
        return total

    def _exchanged_pairs(self, exchange: BranchExchange) -> Pairs:
        if not isinstance(exchange, SegmentExchange) or exchange.pattern_of is None:
            return exchange.pairs
        total = np.zeros(self.world_size, object)
        shards = exchange.shards
        for (start, stop), ranks in zip(shards.token_bounds.tolist(), shards.compute_ranks.tolist(), strict=True):
            for head, rank in zip(shards.heads, ranks, strict=True):
                if pattern := exchange.pattern_of(head.kv_head):
                    total[rank] += self._pairs_of(pattern, stop - start, head.width, 1)
        return total

    def _pairs_of(self, pattern: Pattern, tokens: int, heads: int, kv_heads: int) -> int:
        return pattern.flops(tokens, heads, 1, kv_heads=kv_heads, is_causal=self.is_causal) // 4

    def bytes(
        self,
        rank: int,
        phase: str,
        *,
        head_dim: int,
        dtype: str,
        batch: int = 1,
        key_padding_mask: bool = False,
        position_dims: int = 0,
        gradients: str = "qkv",
    ) -> int:
        """Count the bytes that a rank sends in the "forward" or "backward" phase of one call, as `Comm.sent_bytes` does.

        The other arguments are those of `dilkit.comm.Rows`.
        """
        rows = Rows(head_dim, dtype, batch, key_padding_mask, position_dims, gradients)
        return int(self.traffic(phase, rows).sent[self._rank(rank)])

    def all_bytes(self, phase: str, *, head_dim: int, dtype: str, batch: int = 1, key_padding_mask: bool = False) -> IntArray:
        """Return `bytes` of all ranks, `(world_size,)`."""
        return self.traffic(phase, Rows(head_dim, dtype, batch, key_padding_mask)).sent

    def traffic(self, phase: str, rows: Rows, branch: int | None = None) -> PhaseTraffic:
        """Count the bytes that all ranks send and receive in a phase, by what is sent; of one `branch` alone if given."""
        one_of("phase", phase, PHASES)
        self._check_countable(rows)
        branches = range(len(self.routes)) if branch is None else [branch]
        step = "again" if phase == "backward" and self.keep == "nothing" else phase
        traffic = [branch_traffic(self.exchanges[b], step, rows) for b in branches]
        return sum(traffic[1:], traffic[0])

    def explain(self, rows: Rows | None = None) -> str:
        """Explain for each branch its route, its number of ranks, what moves, and what other routes would move.

        `rows` (`dilkit.comm.Rows`) says how large rows are; by default 64 numbers in float32, and a batch of 1.
        """
        from dilkit.comm.plan.explain import explanation

        return explanation(self, rows or Rows(64, "float32"))

    def candidates(self, branch: int) -> Mapping[int, int]:
        """Count the rows through the busiest rank of a forward pass by group size: the numbers that "auto" compares.

        The size 1 is "gather", the largest "scatter"; empty for a branch whose segments are all within ranks, or that has none.
        """
        exchange = self.exchanges[branch]
        if not isinstance(exchange, SegmentExchange):
            return {}
        return busiest_ranks(exchange.shards, self.world_size, self.is_causal, self._scatter_only)

    def _rank(self, rank: int) -> int:
        if not 0 <= integer("rank", rank) < self.world_size:
            raise ValueError(f"rank={rank} is no rank of this plan; ranks are 0 to {self.world_size - 1}")
        return rank

    @property
    def _scatter_only(self) -> bool:
        return self.is_joint or not self.fuse_branches


def exchange_plan(
    pattern: Pattern,
    cuts: Sequence[int],
    heads: int,
    kv_heads: int | None = None,
    *,
    is_causal: bool = False,
    schedule: str = "auto",
    fuse_branches: bool = True,
    keep: str = "rows",
) -> ExchangePlan:
    """Return the `ExchangePlan` for these shards from the pattern cache (`dilkit.plan`).

    `cuts` say where shards begin, as `shard_cuts` makes them; `kv_heads` defaults to `heads`; the rest as in `ExchangePlan`,
    which also says what is raised.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import exchange_plan, shard_cuts
        >>> pattern = Pattern([16, 64], [1, 4])
        >>> plan = exchange_plan(pattern, shard_cuts(64, 2, pattern), heads=4, is_causal=True)
        >>> plan.routes[1]
        Route(kind='scatter', group_size=2)
        >>> plan.positions(1)
        range(32, 64)
    """
    cuts = cuts if type(cuts) is tuple else checked_cuts(cuts)
    facts = (pattern, cuts, heads, heads if kv_heads is None else kv_heads, is_causal, schedule, fuse_branches, keep)
    # Values that are equal but of another type, such as 1 and True, have plans of their own: one of them may be refused.
    plan: ExchangePlan = core_plan.cached(("exchange plan", *facts, *map(type, facts)), ExchangePlan, *facts)
    return plan
