"""Calls over ranks that are threads, with shards of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fuzz.calls import Call, tensors_of
from fuzz.checks import DOES_NOT_FIT, require, require_raises, require_right
from fuzz.wrong_calls import ARGUMENTS
from helpers.ranks import over_ranks

from dilkit.comm import ring_dilated_attention, run_threads
from dilkit.comm.transports.threads import ThreadComm

TIMEOUT = 100.0
"""Seconds; a rank that waits for so long raises CommTimeout, which is no error that a step expects."""


def ranks(world: Any, call: dict[str, Any], cuts: Sequence[int], schedule: str, fuse_branches: bool) -> None:
    """The call over ranks."""
    one = Call.from_data(call)
    tensors = replace(tensors_of(one), dlse=None)
    options: dict[str, Any] = dict(is_causal=one.case.is_causal, scale=one.case.scale, gradients=all(one.wants))
    options |= dict(schedule=schedule, fuse_branches=fuse_branches, timeout=TIMEOUT)
    try:
        found = over_ranks(tensors, one.case.pattern, cuts, **options)
    except ValueError as error:
        require("schedule=" in str(error), f"refused: {error}")
    else:
        require_right(replace(one, wants=(all(one.wants),) * 3), tensors, found.results)


def wrong_rank(world: Any, call: dict[str, Any], cuts: Sequence[int], rank: int, argument: str, how: str) -> None:
    """The call over ranks, of which one passes an argument that does not fit: it and all others raise."""
    one = Call.from_data(call)
    tensors = tensors_of(one)

    def on_rank(comm: ThreadComm) -> None:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        given: dict[str, Any] = dict(zip(("query", "key", "value"), (x[:, rows] for x in tensors.qkv), strict=True))
        given |= dict(pattern=one.case.pattern, key_padding_mask=None if tensors.mask is None else tensors.mask[:, rows])
        if comm.rank == rank % comm.size:
            given[argument] = ARGUMENTS[argument][how](given["query"] if argument == "key_padding_mask" else given[argument])
        require_raises(lambda: ring_dilated_attention(comm=comm, **given), DOES_NOT_FIT)

    run_threads(len(cuts) - 1, on_rank, timeout=TIMEOUT)
