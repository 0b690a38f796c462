"""What the ranks do in a job of the suite of published settings: time beside one rank alone, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.tools.bench.over_ranks import memory_note
from dilkit.tools.bench.published.longest import called
from dilkit.tools.bench.published.record import Job, PublishedCase, Setting
from dilkit.tools.bench.ranks.tasks import beside_one_rank, peaks_of
from dilkit.tools.measure.ranks_call import RanksCall

if TYPE_CHECKING:
    from dilkit.comm import Comm

LONG_CALL = 1e11
"""FLOPs of a call of which fewer samples are taken."""


def over_ranks(
    comm: Comm, transport: str, calls: Sequence[tuple[Setting, bool]], divisor: int, one_rank_threads: int, repeats: int
) -> Job:
    """Settings and passes: ranks beside one rank that has all cores, in turns, and the peak memory of each rank.

    `divisor` divides lengths. `repeats` is for calls that are short: `samples_of`.
    """
    note, rows = memory_note(transport != "threads"), []
    for setting, backward in calls:
        call = RanksCall(comm, setting.problem(backward, divisor))
        check, entries = beside_one_rank(call, one_rank_threads, samples_of(call.flops, repeats))
        tokens, peaks = setting.divided(divisor).tokens, None if note else _peaks(call)
        fields: dict[str, Any] = dict(backward=backward, tokens=tokens, transport=transport, check=check, entries=entries)
        rows.append(PublishedCase(setting=setting, **fields, peak_bytes=peaks, memory_note=note))
    return Job(ranks=comm.size, transport=transport, rows=tuple(rows))


def samples_of(flops: float, repeats: int) -> int:
    """How many samples of a call of so many FLOPs: fewer where calls are long."""
    return repeats if flops < LONG_CALL else min(3 if flops < 3 * LONG_CALL else 2, repeats)


def _peaks(call: RanksCall) -> tuple[int, ...]:
    """Peak bytes of each rank, inputs counted. Calls were made before, so that nothing is loaded or planned in it."""
    shard = replace(call.problem, seq=len(call.plan.positions(call.comm.rank)))
    return peaks_of(call.comm, lambda: called(shard, lambda inputs, _: call.once(inputs)))
