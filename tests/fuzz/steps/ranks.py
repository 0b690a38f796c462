"""Calls over ranks that are threads, with shards of any lengths."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from fuzz.calls import Call, tensors_of
from fuzz.checks import DOES_NOT_FIT, require, require_raises, require_right
from fuzz.wrong_calls import ARGUMENTS
from helpers.ranks import assert_counted, over_ranks, plan_of

from dilkit import plan
from dilkit.comm import ExchangePlan, arguments, ring_dilated_attention, run_threads
from dilkit.comm.passes import index_tables, problem_stacks
from dilkit.testing import accuracy

TIMEOUT = 100.0
"""Seconds; a rank that waits for so long raises CommTimeout, which is no error that a step expects."""


def ranks(world, call: dict[str, Any], cuts: Sequence[int], schedule: str, fuse_branches: bool, small: bool = False):
    """The call over ranks: right, with as many bytes sent as planned, or refused where it has to be.

    `small`: by tiles and stacks of a few rows, of which a long sequence has as many.
    """
    one = Call.from_data(call)
    tensors, case = tensors_of(one), one.case
    options = dict(is_causal=case.is_causal, scale=case.scale, schedule=schedule, lengths=case.lengths)
    options |= {} if case.lengths else dict(fuse_branches=fuse_branches, dropout_p=case.dropout_p)
    options |= dict(backend=one.backend, gradients=all(one.wants), through_lse=one.through_lse, timeout=TIMEOUT)
    refusal = _refusal(one, cuts, schedule, fuse_branches)
    try:
        with _seeded(one), _few_rows_at_once() if small else nullcontext():
            found = over_ranks(tensors, case.pattern, cuts, **options)
    except ValueError as error:
        require(bool(refusal) and refusal in str(error) and "use " in str(error), f"refused: {error}")
    else:
        require(not refusal, f"not refused: {refusal}")
        require_right(replace(one, wants=(all(one.wants),) * 3), tensors, found.results)
        if tensors.dlse is None:
            assert_counted(found, tensors)


@contextmanager
def _seeded(one: Call) -> Iterator[None]:
    """Let every rank draw the oracle's seed from the shared generator."""
    dropout = accuracy.dropout_in(one.case.problem())
    drawn = torch.tensor(0 if dropout is None else dropout.seed)
    with mock.patch.object(arguments, "draw_seed", return_value=drawn):
        yield


@contextmanager
def _few_rows_at_once() -> Iterator[None]:
    """Within the block problems are cut into tiles of 5 rows, and stacks have about 20."""
    with (
        mock.patch.object(problem_stacks, "SHORT_SIDE", 5),
        mock.patch.object(index_tables, "stack_rows", return_value=20),
    ):
        plan.cache_clear()
        yield
    plan.cache_clear()


def _refusal(one: Call, cuts: Sequence[int], schedule: str, fuse_branches: bool) -> str:
    """Return the text that a refusal needs by `docs/ranks.md`; "" if none is due."""
    case = one.case
    if any(start == stop for start, stop in pairwise(cuts)):
        return "no rows on this rank"
    options = dict(is_causal=case.is_causal, schedule=schedule)
    options |= {} if case.lengths else dict(fuse_branches=fuse_branches)
    try:
        planned = plan_of(case.pattern, cuts, case.lengths, case.heads, case.kv_heads or case.heads, **options)
        if isinstance(planned, ExchangePlan):
            planned.check_dropout(case.dropout_p)
    except ValueError as error:
        return "dropout_p=" if "dropout_p=" in str(error) else "schedule="
    return ""


def wrong_rank(world, call: dict[str, Any], cuts: Sequence[int], rank: int, argument: str, how: str):
    """The call over ranks, with a wrong argument on one: all raise."""
    one = Call.from_data(call)
    tensors = tensors_of(one)

    def on_rank(comm):
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        given = dict(zip(("query", "key", "value"), (x[:, rows] for x in tensors.qkv), strict=True))
        given |= dict(pattern=one.case.pattern, key_padding_mask=None if tensors.mask is None else tensors.mask[:, rows])
        if comm.rank == rank % comm.size:
            given[argument] = ARGUMENTS[argument][how](given["query"] if argument == "key_padding_mask" else given[argument])
        require_raises(lambda: ring_dilated_attention(comm=comm, **given), DOES_NOT_FIT)

    run_threads(len(cuts) - 1, on_rank, timeout=TIMEOUT)
