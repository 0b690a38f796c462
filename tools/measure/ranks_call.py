"""A call of `ring_dilated_attention` to be measured: a rank's random shard, the call itself, the bytes of its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilkit.comm import Comm, ExchangePlan, exchange_plan, ring_dilated_attention, shard, shard_cuts, unshard
from dilkit.comm.collectives import gather_values
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check, Results, differentiated, expected, shortened
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import BACKWARD_FLOPS
from dilkit.tools.results.rows import ResultRow


@dataclass(frozen=True)
class RanksCall:
    """The computation of `problem`, that of the whole sequence, on the ranks of `comm`."""

    comm: Comm
    problem: Problem
    schedule: str = "auto"
    fuse_branches: bool = True
    keep: str = "rows"

    @property
    def plan(self) -> ExchangePlan:
        """The exchange plan. Raises ValueError for what cannot be sharded in this way."""
        return plan_of(self.problem, self.comm.size, self.schedule, self.fuse_branches, self.keep)

    @property
    def flops(self) -> float:
        return self.problem.flops() * (1 + BACKWARD_FLOPS * self.problem.requires_grad)

    def shard(self) -> Tensors:
        """Random tensors for the rows of this rank; no rank makes the whole. A mask ignores the last eighth of each shard."""
        rows = len(self.plan.positions(self.comm.rank))
        return Tensors.random(replace(self.problem, seq=rows), seed=self.comm.rank)

    def part(self, whole: Tensors) -> Tensors:
        pattern, grad = self.problem.pattern, self.problem.requires_grad
        q, k, v = (shard(x.detach(), self.comm, pattern).requires_grad_(grad) for x in whole.qkv)
        mask = None if whole.mask is None else shard(whole.mask, self.comm, pattern)
        return Tensors(q, k, v, mask, shard(whole.dout, self.comm, pattern))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        p = self.problem
        options: dict[str, Any] = dict(is_causal=p.is_causal, key_padding_mask=mask, scale=p.scale, return_lse=True)
        options |= dict(schedule=self.schedule, fuse_branches=self.fuse_branches, keep=self.keep)
        out, lse = ring_dilated_attention(query, key, value, p.pattern, self.comm, **options)
        return out, lse

    def once(self, inputs: Tensors) -> Results:
        """Return `out` and `lse` of this rank's rows, with `dq`, `dk` and `dv` where the problem asks for gradients."""
        with torch.set_grad_enabled(self.problem.requires_grad):
            return differentiated(self.forward, inputs, self.problem.requires_grad)

    def together(self, whole: Tensors) -> Results:
        parts = self.once(self.part(whole))
        return {name: unshard(x, self.comm, dim=2 if name == "lse" else 1) for name, x in parts.items()}

    def planned_bytes(self) -> tuple[int, ...]:
        """Return the bytes that each rank sends in a call by the plan."""
        p, phases = self.problem, ("forward", "backward") if self.problem.requires_grad else ("forward",)
        sizes: dict[str, Any] = dict(head_dim=p.head_dim, dtype=p.dtype, batch=p.batch, key_padding_mask=p.key_padding_mask)
        counts = [self.plan.all_bytes(phase, **sizes) for phase in phases]
        return tuple(int(sum(of_rank)) for of_rank in zip(*counts, strict=True))

    def count(self, inputs: Tensors) -> dict[str, list[int]]:
        """Make a call, and return the bytes that each rank sent in it, beside those of the plan."""
        before = self.comm.sent_bytes
        self.once(inputs)
        sent = gather_values(self.comm, self.comm.sent_bytes - before)
        return dict(sent_bytes=sent, planned_bytes=[*self.planned_bytes()])

    def check(self) -> tuple[Check, ...]:
        short = replace(self, problem=shortened(self.problem))
        return () if short.problem.seq < self.comm.size else short.check_whole()

    def check_whole(self) -> tuple[Check, ...]:
        """Compare the results of all ranks with the oracle, which rank 0 asks."""
        whole = Tensors.random(self.problem, seed=1)
        results = self.together(whole)
        checks = expected(self.problem, whole).checks(results, self.problem.seq) if self.comm.rank == 0 else ()
        return gather_values(self.comm, checks)[0]


def judged(checks: tuple[Check, ...], counted: Mapping[str, Sequence[int]], time: ResultRow | None = None) -> ResultRow:
    """Return the entry of a call over ranks; without a time if a check failed or `counted` bytes differ from the plan."""
    wrong = [check.complaint for check in checks if not check.passed]
    if counted and counted["sent_bytes"] != counted["planned_bytes"]:
        wrong.append(f"bytes sent by rank: {counted['sent_bytes']}; the plan says {counted['planned_bytes']}")
    if wrong:
        return ResultRow(verdict="wrong", reasons=tuple(wrong), checks=checks)
    return ResultRow(checks=checks).timed(time) if time else ResultRow(checks=checks)


def plan_of(problem: Problem, ranks: int, schedule: str = "auto", fuse_branches: bool = True, keep: str = "rows") -> ExchangePlan:
    cuts = shard_cuts(problem.seq, ranks, problem.pattern)
    options: dict[str, Any] = dict(is_causal=problem.is_causal, schedule=schedule, fuse_branches=fuse_branches, keep=keep)
    return exchange_plan(problem.pattern, cuts, problem.heads, problem.kv_heads, **options)
