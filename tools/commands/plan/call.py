"""What one call is, on one device: pairs and FLOPs of each branch, bytes, and who computes it and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.selector import Trace, explain
from dilkit.tools.console.text import in_bytes, in_thousands
from dilkit.tools.report.document import Table

HEADER = ("branch", "kind", "pairs", "GFLOP", "of dense")


@dataclass(frozen=True)
class Call:
    """A call of `problem` on its device."""

    problem: Problem

    @property
    def trace(self) -> Trace:
        """Which backend computes it, and why no other."""
        return explain(self.problem)

    @property
    def pairs(self) -> tuple[int, ...]:
        """Of each branch, the pairs of a query and a key, over all heads and the batch."""
        pattern = self.problem.pattern
        return tuple(self._pairs(pattern.with_branches(branch, overlap="count", tail="exact")) for branch in pattern.branches)

    @property
    def dense_pairs(self) -> int:
        """Those of every token with every token, under the same causality."""
        return self._pairs(Pattern.dense())

    def _pairs(self, pattern: Pattern) -> int:
        return replace(self.problem, pattern=pattern).flops() // (4 * self.problem.head_dim)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind: query, key, value (and mask); out and lse; gradients of the results and of the inputs."""
        p = self.problem
        tokens, row = p.batch * p.seq, p.head_dim * DTYPE_BYTES[p.dtype]
        lse = 8 if p.dtype == "float64" else 4
        by_name = dict(
            inputs=tokens * (row * (p.heads + 2 * p.kv_heads) + p.key_padding_mask),
            results=tokens * p.heads * (row + lse),
            gradients=tokens * row * (2 * p.heads + 2 * p.kv_heads),
        )
        return by_name | dict(total=sum(by_name.values()))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        rows = zip(self.problem.pattern.branches, self.pairs, strict=True)
        branches = [dict(kind=branch.kind, text=str(branch), pairs=pairs, flops=self._flops(pairs)) for branch, pairs in rows]
        return dict(self.trace.to_dict(), branches=branches, dense_pairs=self.dense_pairs, memory_bytes=self.memory)

    def _flops(self, pairs: int) -> int:
        return 4 * self.problem.head_dim * pairs

    def table(self) -> Table:
        """A row for each branch; below it what each of them is, and the bytes of the call."""
        rows, dense = [], self.dense_pairs
        for number, (branch, pairs) in enumerate(zip(self.problem.pattern.branches, self.pairs, strict=True)):
            share = f"{100 * pairs / dense:.3g} %"
            rows.append((str(number), branch.kind, in_thousands(pairs), in_thousands(self._flops(pairs) / 1e9), share))
        held = ", ".join(f"{name} {in_bytes(count)}" for name, count in self.memory.items())
        return Table("a call on one device, forward", HEADER, tuple(rows), f"{self.problem.pattern.describe()}\nmemory: {held}")

    def verdicts(self) -> Iterator[str]:
        """Who computes it and why, and what stands against every other backend."""
        trace = self.trace
        yield f"on {trace.problem.device}: {trace.picked or 'no backend'} computes it"
        for one in trace.decisions:
            yield f"{one.name} {one.verdict}: {'; '.join(filter(None, (one.detail, *one.reasons)))}"
