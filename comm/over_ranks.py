"""What the integrations of the core ask of a process group (`dilkit.integrations.ranks.OverRanks`), an entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dilkit.comm import agreement
from dilkit.comm.attention import ring_dilated_attention
from dilkit.comm.collectives import copy_from_rank as copy_from_rank
from dilkit.comm.collectives import sum_over_ranks as sum_over_ranks
from dilkit.comm.cuts import shard_cuts as shard_cuts
from dilkit.comm.nn import RingDilatedAttention
from dilkit.comm.transports.base import Comm
from dilkit.pattern import Pattern


def attention_module(pattern: Pattern, comm: Comm, backend: str | Sequence[str] | None) -> nn.Module:
    """The module that attends over ranks."""
    return RingDilatedAttention(pattern, comm, backend=backend)


def attend(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, comm: Comm, **options: Any) -> Tensor:
    """`ring_dilated_attention`, of which `out` alone is wanted."""
    out: Tensor = ring_dilated_attention(query, key, value, pattern, comm, **options)  # type: ignore[assignment]
    return out


def transport(group: Any) -> Comm:
    """The `Comm` of a process group of torch.distributed."""
    from dilkit.comm.transports.torch_dist import TorchComm

    return TorchComm(group)


def agree_on(comm: Comm, facts: Callable[[], dict[str, Any]], step: str) -> None:
    """Raise on all ranks where `facts` raises on one, or where ranks differ in them."""
    agreement.agree_on(comm, facts, step=step)
