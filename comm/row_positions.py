"""Where the rows of a rank lie in the sequence: the ranks tell each other how many rows they have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.comm.agreement import agree_on
from dilkit.comm.reorder import fingerprint
from dilkit.comm.transports.base import Comm
from dilkit.op.sequences import check_cu_seqlens
from dilkit.orders.checks import MAX_TOKENS
from dilkit.orders.token_order import TokenOrder


def first_row(
    rows: int,
    comm: Comm,
    device: torch.device | str | None,
    order: TokenOrder | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[int, int]:
    """The number of this rank's first row, and the rows of all ranks. Raises what `positions` raises, on every rank."""

    def facts() -> dict[str, Any]:
        if integer("rows", rows, at_least=0) > MAX_TOKENS:
            raise ValueError(f"rows={rows} must be at most 2**62")
        try:
            torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r} is not known to torch: {error}") from None
        if cu_seqlens is not None and order is not None:
            raise ValueError("order and cu_seqlens cannot go together; a token order is of one sequence")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, cu_seqlens, 0)
        starts = "" if cu_seqlens is None else str(cu_seqlens.tolist())
        return dict(rows=int(rows), order=fingerprint(order), cu_seqlens=starts)

    counts = [fact["rows"] for fact in agree_on(comm, facts, ("rows",), "positions of shards")]
    start = sum(counts[: comm.rank])
    return start, sum(counts)
