"""One slide over ranks: each holds some of its rows, and what is pooled is summed over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dilkit.integrations.ranks import over_ranks
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Pattern

T = TypeVar("T")


class Ranks:
    """The operations of a slide encoder on a process group, a `dilkit.comm.Comm`."""

    def __init__(self, comm: Any, pattern: Pattern) -> None:
        self.comm, self.pattern = comm, pattern

    def attention(self, backend: str | Sequence[str] | None) -> nn.Module:
        """Return the attention of all ranks together."""
        return over_ranks().attention_module(self.pattern, self.comm, backend)

    def agreed(self, compute: Callable[[], T], facts: Callable[[T], dict[str, Any]]) -> T:
        """Return `compute()`. Raises on every rank if it raises on one, or if ranks differ in its `facts`."""
        values: list[T] = []

        def facts_here() -> dict[str, Any]:
            values.append(compute())
            return facts(values[0])

        over_ranks().agree_on(self.comm, facts_here, step="arguments of SlideEncoder")
        return values[0]

    def tiles(self, lengths: Sequence[int]) -> tuple[slice, bool]:
        """Return the slice of a slide's tiles on this rank, and True if it holds the class token, the first of all rows.

        Raises ValueError for several slides.
        """
        if len(lengths) != 1:
            raise ValueError(f"tiles has {len(lengths)} slides; over ranks (comm=) one at a time is computed: tiles[:1]")
        cuts = over_ranks().shard_cuts(lengths[0] + 1, self.comm.size, self.pattern)
        start, stop = cuts[self.comm.rank : self.comm.rank + 2]
        return slice(max(start - 1, 0), stop - 1), self.comm.rank == 0

    def pool(self, x: Tensor, global_pool: bool) -> Tensor:
        """Return the mean of all tiles, or the class token, `(1, embed_dim)`, the same on each rank, from the rows of each."""
        classes = int(self.comm.rank == 0)
        rows = x[classes:] if global_pool else x[:classes]
        wide = lse_dtype(rows.dtype)
        part = torch.cat((rows.sum(dim=0, dtype=wide), rows.new_full((1,), len(rows), dtype=wide)))
        total: Tensor = _SumOverRanks.apply(part, self.comm)  # type: ignore[no-untyped-call]
        return (total[:-1] / total[-1]).to(rows.dtype)[None]

    def take_from_first(self, x: Tensor) -> None:
        """Replace `x`, in place, by that of the first rank."""
        over_ranks().copy_from_rank([x], self.comm)

    def on_first(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return `module(x)`, on every rank of the same `x`; only the first rank's parameters get gradients."""
        first = self.comm.rank == 0
        weights = {name: _OnFirst.apply(weight, first) for name, weight in module.named_parameters()}  # type: ignore[no-untyped-call]
        out: Tensor = torch.func.functional_call(module, weights, (x,))
        return out


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Each computes the same of it, so that the gradient of a part is what it is of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Any) -> Tensor:
        total = part.clone()
        over_ranks().sum_over_ranks([total], comm)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Any, ...]:
        return dtotal, None


class _OnFirst(torch.autograd.Function):
    """`x`; its gradient is 0 but on the first rank, so that a sum over ranks counts it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        return dx if ctx.first else torch.zeros_like(dx), None
