"""What the passes need besides tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.index_tables import IndexTables, index_tables
from dilkit.comm.plan.exchange_plan import ExchangePlan, LocalRange
from dilkit.comm.transports.base import Comm
from dilkit.op.zero_keys import ZeroKeys, zero_keys_of
from dilkit.plan import cached

UNKNOWN = 0
"""When the forward pass of compiled code began."""


@dataclass(frozen=True)
class PassContext:
    """One call of attention over ranks, as this rank sees it."""

    op: AttentionOp
    comm: Comm
    plan: ExchangePlan
    batch: int
    device: torch.device
    gradients: str
    """Of which inputs a rank asks for gradients: "qkv" or a part of it, the same on all ranks."""
    began: int
    """The transport's `exchanges` when the forward pass began, by which the backward pass knows its call."""

    @property
    def rounds(self) -> tuple[IndexTables, ...]:
        """This rank's index tables, for each round in which rows travel by all-to-all."""
        of_rank, facts = (
            (self.plan, self.comm.rank, self.batch, self.device),
            (self.op.options.dropout_p > 0, self.op.options.bias is not None),
        )
        return tuple(index_tables(*of_rank, branches, self.gradients, *facts) for branches in self.plan.rounds)

    @property
    def ranges(self) -> tuple[LocalRange, ...]:
        """The rows that this rank computes by itself."""
        return self.plan.local_ranges(self.comm.rank)

    def zero_keys(self, query: Tensor) -> ZeroKeys | None:
        """The keys that segments are padded with, as this rank's rows see them; None where there are none."""
        plan = self.plan
        if plan.pattern.tail == "exact" or plan.is_causal:
            return None
        facts, rows = (plan.pattern, plan.seq, plan.heads, plan.kv_heads), plan.positions(self.comm.rank)
        return cached(("zero keys", facts, rows, query.dtype, query.device), zero_keys_of, *facts, query, rows)

    @property
    def ring_branches(self) -> list[int]:
        """The branches with a ring schedule."""
        return [b for b, route in enumerate(self.plan.routes) if route.kind == "ring"]
