"""Why each branch takes its route: facts for programs, and a text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dilkit.comm.plan.segments import SegmentExchange
from dilkit.comm.plan.traffic import Rows
from dilkit.pattern import Branch
from dilkit.pattern.lowering import Band, Form, Runs, Segments

if TYPE_CHECKING:
    from dilkit.comm.plan.exchange_plan import ExchangePlan

ROUTE_TEXTS = {
    "local": "every segment is within one rank: nothing is sent",
    "blocks": "each rank is sent the blocks of keys and values that its own queries see, or sends queries that see many",
    "broadcast": "keys and values of global tokens go to all ranks that see them, their queries to the keys that they see",
    "halo": "each rank is sent the keys and values within reach of its own queries",
    "scatter": "the ranks of a segment deal out its heads",
    "gather": "each rank is sent the keys and values that its own queries see",
    "hybrid": "groups of ranks deal out the heads of their own queries, and are sent the keys and values that these see",
    "ring": "keys and values go from rank to rank of a segment",
}


def branch_facts(plan: ExchangePlan, rows: Rows) -> list[dict[str, Any]]:
    """Return how each branch is computed over ranks, as plain data. `branch` is None if all are joint: every row is moved then.

    `kind` is the kind of the branch, of joint ones that of the segments they are moved in. What is no segment has the length of a
    window or block, or of the sequence, as its `segment_length`, and 1 or its rate or stride as its `dilation_rate`.

    `ranks` is the most ranks that hold one segment, `spread` how many segments are held by several ranks. `rows_moved` counts
    the rows that leave a rank in a forward pass, over all ranks, for a batch of 1. `busiest` holds for each route that "auto"
    considers, by its group size as text, how many rows the busiest rank sends or receives in a forward pass. Bytes are those of
    the rank that sends most.
    """
    return [_facts(plan, branch, rows) for branch in range(len(plan.routes))]


def _facts(plan: ExchangePlan, branch: int, rows: Rows) -> dict[str, Any]:
    exchange, route = plan.exchanges[branch], plan.routes[branch]
    length, rate = (min(size, plan.seq) for size in _length_and_rate(plan.forms[branch][0], plan.seq))
    ranks, segments, spread = plan.world_size, 1, int(route.kind != "local")
    if isinstance(exchange, SegmentExchange):
        ranks, segments, spread = exchange.shards.most_ranks, -(-plan.seq // length), len(exchange.shards.token_bounds)
    if isinstance(exchange, SegmentExchange) and route.kind == "ring":
        moved = 2 * exchange.ring_rows[0][0]
    else:
        queries, keys = exchange.counts
        moved = queries[:2].sum(0) + 2 * keys[0]
    return dict(
        branch=None if plan.is_joint else branch,
        segment_length=length,
        dilation_rate=rate,
        route=route.kind,
        group_size=route.group_size,
        ranks=ranks,
        segments=segments,
        spread=spread,
        rows_moved=int(moved.sum()),
        forward_bytes=int(plan.traffic("forward", rows, branch).sent.max()),
        backward_bytes=int(plan.traffic("backward", rows, branch).sent.max()),
        busiest={str(size): busiest for size, busiest in plan.candidates(branch).items()},
        kind=exchange.branch.kind,
    )


def _length_and_rate(form: Form, seq: int) -> tuple[int, int]:
    match form:
        case Segments():
            return form.length, form.rate
        case Band():
            return min(form.back, seq) + 1, form.rate
        case Runs():
            return form.block, 1
    return seq, 1


def explanation(plan: ExchangePlan, rows: Rows) -> str:
    named = zip(branch_facts(plan, rows), plan.exchange_pattern.branches, plan.forms, strict=True)
    return "\n".join(_text(facts, branch, isinstance(forms[0], Segments), plan, rows) for facts, branch, forms in named)


def _text(facts: dict[str, Any], branch: Branch, in_segments: bool, plan: ExchangePlan, rows: Rows) -> str:
    route, which = facts["route"], "all branches together" if facts["branch"] is None else f"branch {facts['branch']}"
    what = f"segments of {facts['segment_length']:,}, rate {facts['dilation_rate']:,}" if in_segments else str(branch)
    head = f"{which}: {what}: {route}"
    if route == "local":
        return f"{head}: {ROUTE_TEXTS['local'] if in_segments else 'no rank needs rows of another: nothing is sent'}"
    among = f", in groups of {facts['group_size']:,}" if route == "hybrid" else ""
    sent = f"the rank that sends most sends {facts['forward_bytes']:,} bytes forward, {facts['backward_bytes']:,} backward"
    if plan.keep == "nothing" and route != "ring":
        sent += ", rows once more among them"
    reason = f"; {_why(facts, plan.schedule)}" if facts["busiest"] else ""
    return f"{head} over {facts['ranks']:,} ranks{among}: {ROUTE_TEXTS[route]}; {sent} ({rows.dtype}){reason}"


def _why(facts: dict[str, Any], schedule: str) -> str:
    names = {"1": "gather", str(facts["ranks"]): "scatter"}
    rows_by_route = {names.get(size, f"hybrid({int(size):,})"): busiest for size, busiest in facts["busiest"].items()}
    best = sorted(rows_by_route, key=rows_by_route.__getitem__)
    shown = [name for name in rows_by_route if name in ("scatter", "gather") or name in best[:2]]
    rows = ", ".join(f"{name} {rows_by_route[name]:,}" for name in shown)
    if schedule == "auto":
        return f"{facts['route']} moves the fewest rows through the busiest rank forward: {rows}"
    if schedule == "balanced":
        return f"with {facts['route']} the busiest rank computes the fewest pairs; rows through it forward: {rows}"
    return f"as schedule={schedule!r} says; rows through the busiest rank forward: {rows}"
