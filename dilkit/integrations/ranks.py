"""The calls of integrations to a process group. `dilkit.comm`, above the core, announces them as an entry point."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from dilkit.pattern import Pattern

GROUP = "dilkit.over_ranks"


class OverRanks(Protocol):
    """The names of `dilkit.comm` that integrations use; `comm` is a `dilkit.comm.Comm`."""

    def attention_module(self, pattern: Pattern, comm: Any, backend: str | Sequence[str] | None) -> nn.Module:
        """Make the module that attends over ranks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, comm: Any, **options: Any) -> Tensor:
        """Call `ring_dilated_attention`."""

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, comm: Any, cu_seqlens: Tensor, **options: Any
    ) -> Tensor:
        """Call `ring_dilated_attention_varlen`."""

    def transport(self, group: Any) -> Any:
        """Return the `Comm` of a process group of torch.distributed, or of a dimension of a device mesh; a `Comm` itself."""

    def agree_on(
        self, comm: Any, facts: Callable[[], dict[str, Any]], step: str, may_differ: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """Gather the facts of all ranks. Raises on all if `facts` raises on one, or one not in `may_differ` differs."""

    def shard_cuts(self, seq: int, world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
        """Return the first rows of the shards of a sequence, and its end."""

    def packed_cuts(self, lengths: Sequence[int], world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
        """Return the first rows of the shards of packed sequences, and the end of the last."""

    def unshard(self, x: Tensor, comm: Any, dim: int) -> Tensor:
        """Put the shards of all ranks together along `dim`."""

    def sum_over_ranks(self, tensors: Sequence[Tensor], comm: Any) -> None:
        """Replace each tensor, in place, by its sum over ranks."""

    def copy_from_rank(self, tensors: Sequence[Tensor], comm: Any) -> None:
        """Replace each tensor, in place, by that of the first rank."""


@cache
def over_ranks() -> OverRanks:
    """Load the implementation of `OverRanks`, at first use."""
    (entry, *_) = entry_points(group=GROUP)
    return cast(OverRanks, entry.load())


def digest(x: Tensor) -> str:
    """Return a short text that differs where a number of `x` differs, by which ranks compare tensors."""
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
