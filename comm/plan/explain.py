"""Why each branch takes its route: facts for programs, and a text for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dilkit.comm.plan.exchange_plan import ExchangePlan, Route
from dilkit.comm.plan.traffic import Rows

DEEDS = {
    "local": "every segment is within one rank: nothing is sent",
    "scatter": "the ranks of a segment deal out its heads",
    "gather": "each rank is sent the keys and values that its own queries see",
    "hybrid": "blocks of ranks deal out the heads of their own queries, and are sent the keys and values that these see",
    "ring": "keys and values go from rank to rank of a segment",
}


@dataclass(frozen=True)
class BranchFacts:
    """How a branch is computed over ranks, or all of them if they are joint (`branch` is None): every row is moved then.

    `ranks` is the most that hold one segment, `spread` how many segments several ranks hold. `rows_moved` counts rows that
    leave a rank in a forward pass, over all ranks, for a batch of 1. `busiest` says for each route that "auto" considers, by its
    group size, what the busiest rank sends or is sent in a forward pass, in rows. Bytes are those of the rank that sends most.
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
    tally, segment = plan.tallies[branch], plan.moved.branches[branch]
    length = min(segment.segment_length, plan.seq)
    if route.kind == "ring":
        moved = 2 * tally.ring_keys_sent
    else:
        moved = tally.queries_sent + tally.queries_received + 2 * tally.keys_sent
    return BranchFacts(
        branch=None if plan.is_joint else branch,
        segment_length=length,
        dilation_rate=segment.dilation_rate,
        route=route.kind,
        group_size=route.group_size,
        ranks=tally.members.widest,
        segments=-(-plan.seq // length),
        spread=len(tally.members.bounds),
        rows_moved=int(moved.sum()),
        forward_bytes=int(plan.legs("forward", rows, branch).sent.max()),
        backward_bytes=int(plan.legs("backward", rows, branch).sent.max()),
        busiest=dict(plan.candidates(branch)),
    )


def explained(plan: ExchangePlan, rows: Rows) -> str:
    """One paragraph a branch."""
    return "\n".join(_text(facts, plan.schedule, rows) for facts in branch_facts(plan, rows))


def _text(facts: BranchFacts, schedule: str, rows: Rows) -> str:
    which = "all branches together" if facts.branch is None else f"branch {facts.branch}"
    head = f"{which}: segments of {facts.segment_length:,}, rate {facts.dilation_rate:,}: {facts.route}"
    if facts.route == "local":
        return f"{head}: {DEEDS['local']}"
    among = f", in blocks of {facts.group_size:,}" if facts.route == "hybrid" else ""
    sent = f"the rank that sends most sends {facts.forward_bytes:,} bytes forward, {facts.backward_bytes:,} backward"
    return f"{head} over {facts.ranks:,} ranks{among}: {DEEDS[facts.route]}; {sent} ({rows.dtype}); {why(facts, schedule)}"


def why(facts: BranchFacts, schedule: str) -> str:
    """What the choice rests on: the rows of the busiest rank by each route."""
    names = {1: "gather", facts.ranks: "scatter"}
    told = {names.get(size, f"hybrid({size:,})"): busiest for size, busiest in facts.busiest.items()}
    best = sorted(told, key=told.__getitem__)
    shown = [name for name in told if name in ("scatter", "gather") or name in best[:2]]
    rows = ", ".join(f"{name} {told[name]:,}" for name in shown)
    if schedule == "auto":
        return f"{facts.route} moves the fewest rows through the busiest rank forward: {rows}"
    return f"as schedule={schedule!r} says; rows through the busiest rank forward: {rows}"
