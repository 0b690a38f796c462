"""What integrations ask of a process group. `dilkit.comm`, above the core, announces it as an entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dilkit.pattern import Pattern

GROUP = "dilkit.over_ranks"


class OverRanks(Protocol):
    """The names of `dilkit.comm` that integrations use; `comm` is a `dilkit.comm.Comm`."""

    def attention_module(self, pattern: Pattern, comm: Any, backend: str | Sequence[str] | None) -> nn.Module:
        """The module that attends over ranks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, comm: Any, **options: Any) -> Tensor:
        """`ring_dilated_attention`."""

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, comm: Any, cu_seqlens: Tensor, **options: Any
    ) -> Tensor:
        """`ring_dilated_attention_varlen`."""

    def transport(self, group: Any) -> Any:
        """The `Comm` of a process group of torch.distributed, or of a dimension of a device mesh; a `Comm` itself."""

    def agree_on(
        self, comm: Any, facts: Callable[[], dict[str, Any]], step: str, may_differ: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """The facts of all ranks. Raise on all where `facts` raises on one, or where they differ in one not in `may_differ`."""

    def shard_cuts(self, seq: int, world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
        """Where the shards of a sequence begin, and its end."""

    def packed_cuts(self, lengths: Sequence[int], world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
        """Where the shards of packed sequences begin, and the end of the last."""

    def unshard(self, x: Tensor, comm: Any, dim: int) -> Tensor:
        """The shards of all ranks put together along `dim`."""

    def sum_over_ranks(self, tensors: Sequence[Tensor], comm: Any) -> None:
        """Replace each tensor, in place, by its sum over ranks."""

    def copy_from_rank(self, tensors: Sequence[Tensor], comm: Any) -> None:
        """Replace each tensor, in place, by that of the first rank."""


@cache
def over_ranks() -> OverRanks:
    """What computes over ranks. It is loaded here, where it is needed."""
    (entry, *_) = entry_points(group=GROUP)
    return cast(OverRanks, entry.load())
