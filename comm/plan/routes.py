"""The route of a branch: how its segments are computed where several ranks hold them, and how "auto" chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dilkit.comm.plan.row_counts import RowCounts
from dilkit.comm.plan.sharded_segments import SegmentShards

SCHEDULES = ("auto", "balanced", "scatter", "gather", "ring")
KEEPS = ("rows", "nothing")
"""What a rank keeps, from the forward to the backward pass, of the rows that it received."""
CHOOSING = ("auto", "balanced")
"""The schedules that choose a route for each branch."""


@dataclass(frozen=True)
class Route:
    """How a branch is computed over ranks.

    `kind` is, of branches with segments or strides, one of
    "local" (every segment lies within one rank),
    "scatter" (the ranks of a segment divide its heads among them),
    "gather" (each rank computes its own queries and receives the keys and values of the others),
    "hybrid" (both: groups of `group_size` ranks divide the heads; keys and values go to all groups),
    "ring" (as gather, but blocks of keys and values rotate hop by hop, and never lie together on one rank);
    and of other branches "local" (no rank needs rows of another) or
    "halo" (windows: each rank receives the keys and values within reach of its own queries),
    "broadcast" (global tokens: their keys and values go to all ranks, their queries to the keys of all),
    "blocks" (each rank receives the blocks of keys and values that its own queries see, or sends queries that see many).
    """

    kind: str
    group_size: int


def choose_route(schedule: str, shards: SegmentShards, world_size: int, is_causal: bool, scatter_only: bool) -> Route:
    """The route of a branch by `schedule`.

    "auto" takes the group size whose busiest rank moves the fewest rows; "balanced" the one whose busiest rank computes the
    fewest pairs and, of several, moves the fewest rows.
    """
    most_ranks = shards.most_ranks
    if most_ranks == 1:
        return Route("local", 1)
    if schedule in CHOOSING:
        busiest = busiest_ranks(shards, world_size, is_causal, scatter_only)
        most_pairs = dict.fromkeys(busiest, 0)
        if schedule == "balanced":
            most_pairs = {size: int(RowCounts(shards, world_size, size, is_causal).pairs.max()) for size in busiest}
        size = min(busiest, key=lambda size: (most_pairs[size], busiest[size]))
        return Route({1: "gather", most_ranks: "scatter"}.get(size, "hybrid"), size)
    return Route(schedule, most_ranks if schedule == "scatter" else 1)


def busiest_ranks(shards: SegmentShards, world_size: int, is_causal: bool, scatter_only: bool) -> Mapping[int, int]:
    """Rows of the busiest rank by group size, for the sizes that "auto" considers; empty for a local branch.

    Those are the divisors of the most ranks that hold one segment, and powers of two; with `scatter_only`, the largest alone.
    """
    most_ranks = shards.most_ranks
    sizes = [size for size in range(most_ranks, 0, -1) if most_ranks % size == 0 or size.bit_count() == 1]
    sizes = sizes[:1] if scatter_only else sizes
    busiest = {size: RowCounts(shards, world_size, size, is_causal).busiest for size in sizes if most_ranks > 1}
    return MappingProxyType(busiest)
