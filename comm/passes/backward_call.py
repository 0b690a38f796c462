"""The call whose backward pass runs: ranks compare it, since autograd runs backward passes in the order of each rank's loss."""

from __future__ import annotations

from typing import Any

from dilkit.comm.agreement import agree_on
from dilkit.comm.passes.context import UNKNOWN, PassContext
from dilkit.comm.transports.errors import PlanMismatch, ranks_text

STEP = "backward pass of ring_dilated_attention"
CALL, LSE = "call", "lse in the loss"


def agree_on_call(context: PassContext, lse_in_loss: bool) -> bool:
    """Whether `lse` is in the loss of a rank. Raises PlanMismatch on all ranks where they run the backward passes of other calls.

    Rows of calls of equal shapes would be taken for each other. A rank that does not know its call goes with the others.
    """
    if context.comm.size == 1:
        return lse_in_loss
    facts: dict[str, Any] = {CALL: context.began, LSE: lse_in_loss}
    every_rank = agree_on(context.comm, lambda: facts, (CALL, LSE), STEP)
    known = {rank: of_rank[CALL] for rank, of_rank in enumerate(every_rank) if of_rank[CALL] != UNKNOWN}
    calls = list(known.values())
    if odd := [rank for rank, call in known.items() if call != max(calls, key=calls.count)]:
        raise PlanMismatch(
            f"{STEP}{context.comm.along}: {ranks_text(odd)} and the others are in the backward passes of different calls; all "
            "ranks must run them in the same order",
            odd,
            STEP,
        )
    return any(of_rank[LSE] for of_rank in every_rank)
