"""Why each branch takes its route: facts for programs, and a text for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.routes import Route
from dilkit.comm.plan.traffic import Rows

ROUTE_TEXTS = {
    "local": "every segment is within one rank: nothing is sent",
    "scatter": "the ranks of a segment deal out its heads",
    "gather": "each rank is sent the keys and values that its own queries see",
    "hybrid": "groups of ranks deal out the heads of their own queries, and are sent the keys and values that these see",
    "ring": "keys and values go from rank to rank of a segment",
}


@dataclass(frozen=True)
class BranchFacts:
    """How a branch is computed over ranks. `branch` is None if all branches are joint: every row is moved then.

    `ranks` is the most ranks that hold one segment, `spread` how many segments are held by several ranks. `rows_moved` counts
    the rows that leave a rank in a forward pass, over all ranks, for a batch of 1. `busiest` says for each route that "auto"
    considers, by its group size, how many rows the busiest rank sends or receives in a forward pass. Bytes are those of the rank
    that sends most.
    """

    branch: int | None
    segment_length: int
    dilation_rate: int
    route: str
    group_size: int
    ranks: int
    segments: int
    spread: int
    rows_moved: int
    forward_bytes: int
    backward_bytes: int
    busiest: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the keys of `busiest` as texts."""
        return {**asdict(self), "busiest": {str(size): rows for size, rows in self.busiest.items()}}


def branch_facts(plan: ExchangePlan, rows: Rows) -> list[BranchFacts]:
    """The facts of all branches."""
    return [_facts(plan, branch, route, rows) for branch, route in enumerate(plan.routes)]


def _facts(plan: ExchangePlan, branch: int, route: Route, rows: Rows) -> BranchFacts:
    counts, segment = plan.row_counts[branch], plan.exchange_pattern.segments[branch]
    length = min(segment.segment_length, plan.seq)
    if route.kind == "ring":
        moved = 2 * counts.ring_keys_sent
    else:
        moved = counts.queries_sent + counts.queries_received + 2 * counts.keys_sent
    return BranchFacts(
        branch=None if plan.is_joint else branch,
        segment_length=length,
        dilation_rate=segment.dilation_rate,
        route=route.kind,
        group_size=route.group_size,
        ranks=counts.shards.most_ranks,
        segments=-(-plan.seq // length),
        spread=len(counts.shards.token_bounds),
        rows_moved=int(moved.sum()),
        forward_bytes=int(plan.traffic("forward", rows, branch).sent.max()),
        backward_bytes=int(plan.traffic("backward", rows, branch).sent.max()),
        busiest=dict(plan.candidates(branch)),
    )


def explanation(plan: ExchangePlan, rows: Rows) -> str:
    """One paragraph a branch."""
    return "\n".join(_text(facts, plan.schedule, rows) for facts in branch_facts(plan, rows))


def _text(facts: BranchFacts, schedule: str, rows: Rows) -> str:
    which = "all branches together" if facts.branch is None else f"branch {facts.branch}"
    head = f"{which}: segments of {facts.segment_length:,}, rate {facts.dilation_rate:,}: {facts.route}"
    if facts.route == "local":
        return f"{head}: {ROUTE_TEXTS['local']}"
    among = f", in groups of {facts.group_size:,}" if facts.route == "hybrid" else ""
    sent = f"the rank that sends most sends {facts.forward_bytes:,} bytes forward, {facts.backward_bytes:,} backward"
    return f"{head} over {facts.ranks:,} ranks{among}: {ROUTE_TEXTS[facts.route]}; {sent} ({rows.dtype}); {why(facts, schedule)}"


def why(facts: BranchFacts, schedule: str) -> str:
    """What the choice rests on: the rows of the busiest rank by each route."""
    names = {1: "gather", facts.ranks: "scatter"}
    rows_by_route = {names.get(size, f"hybrid({size:,})"): busiest for size, busiest in facts.busiest.items()}
    best = sorted(rows_by_route, key=rows_by_route.__getitem__)
    shown = [name for name in rows_by_route if name in ("scatter", "gather") or name in best[:2]]
    rows = ", ".join(f"{name} {rows_by_route[name]:,}" for name in shown)
    if schedule == "auto":
        return f"{facts.route} moves the fewest rows through the busiest rank forward: {rows}"
    return f"as schedule={schedule!r} says; rows through the busiest rank forward: {rows}"
