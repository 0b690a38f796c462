"""A call of `ring_dilated_attention` as it is measured: a rank's random shard, the call itself, what its plan says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.tools.measure import correctness
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Inputs
from dilkit.tools.measure.ranks import gather
from dilkit.tools.results.record import Check

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.comm import Comm, ExchangePlan


@dataclass(frozen=True)
class RanksCall:
    """How `problem`, that of the whole sequence, is computed on the ranks of `comm`."""

    comm: Comm
    problem: Problem
    schedule: str = "auto"
    fuse_branches: bool = True
    backend: tuple[str, ...] | None = None

    @property
    def plan(self) -> ExchangePlan:
        """The exchange plan. Raises ValueError for what cannot be sharded in this way."""
        return plan_of(self.problem, self.comm.size, self.schedule, self.fuse_branches)

    @property
    def flops(self) -> float:
        """Nominal FLOPs of the whole problem."""
        return self.problem.flops() * (1 + BACKWARD_FLOPS * self.problem.requires_grad)

    def shard(self) -> Inputs:
        """Random tensors for the rows of this rank; no rank makes the whole. A mask ignores the last eighth of each shard."""
        rows = len(self.plan.positions(self.comm.rank))
        return Inputs.random(replace(self.problem, seq=rows), seed=self.comm.rank)

    def part(self, whole: Inputs) -> Inputs:
        """This rank's rows of `whole`."""
        from dilkit.comm import shard

        pattern = self.problem.pattern
        query, key, value = (
            shard(x.detach(), self.comm, pattern).requires_grad_(x.requires_grad) for x in (whole.query, whole.key, whole.value)
        )
        mask = None if whole.key_padding_mask is None else shard(whole.key_padding_mask, self.comm, pattern)
        return Inputs(query, key, value, shard(whole.dout, self.comm, pattern), mask)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of this rank's rows."""
        from dilkit.comm import ring_dilated_attention

        p = self.problem
        options: dict[str, Any] = dict(is_causal=p.is_causal, key_padding_mask=inputs.key_padding_mask, scale=p.scale)
        options |= dict(schedule=self.schedule, fuse_branches=self.fuse_branches, backend=self.backend)
        out, lse = ring_dilated_attention(
            inputs.query, inputs.key, inputs.value, p.pattern, self.comm, return_lse=True, **options
        )
        return out, lse

    def once(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """`(out,)`; where the problem asks for gradients, `(out, dquery, dkey, dvalue)`."""
        import torch

        if not self.problem.requires_grad:
            with torch.no_grad():
                return self.forward(inputs)[:1]
        out, _ = self.forward(inputs)
        return out, *torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.dout)

    def planned_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends in a call, as the plan says."""
        p, phases = self.problem, ("forward", "backward") if self.problem.requires_grad else ("forward",)
        sizes: dict[str, Any] = dict(head_dim=p.head_dim, dtype=p.dtype, batch=p.batch, key_padding_mask=p.key_padding_mask)
        counts = [self.plan.all_bytes(phase, **sizes) for phase in phases]
        return tuple(int(sum(of_rank)) for of_rank in zip(*counts, strict=True))

    def check(self) -> tuple[Check, ...]:
        """The results of all ranks, put together, beside the oracle, which rank 0 asks; the problem is a shortened one."""
        from dilkit.comm import unshard

        short = replace(self, problem=correctness.shortened(self.problem))
        if short.problem.seq < self.comm.size:
            return ()
        whole = Inputs.random(short.problem, seed=1)
        tensors = [unshard(x, self.comm) for x in short.once(short.part(whole))]
        pattern, alone = short.problem.pattern, self.comm.rank == 0
        found = correctness.check_tensors(tensors, short.problem, pattern, whole) if alone else ()
        return gather(self.comm, found)[0]


def plan_of(problem: Problem, ranks: int, schedule: str = "auto", fuse_branches: bool = True) -> ExchangePlan:
    """The exchange plan of a problem over so many ranks."""
    from dilkit.comm import exchange_plan, shard_cuts

    cuts = shard_cuts(problem.seq, ranks, problem.pattern)
    options: dict[str, Any] = dict(is_causal=problem.is_causal, schedule=schedule, fuse_branches=fuse_branches)
    return exchange_plan(problem.pattern, cuts, problem.heads, problem.kv_heads, **options)
