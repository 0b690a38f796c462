"""Functions of a process group for the integrations of the core: the entry point of `dilkit.integrations.ranks.over_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dilkit.comm.agreement import agree_on as agree_on
from dilkit.comm.attention import ring_dilated_attention
from dilkit.comm.collectives import copy_from_rank as copy_from_rank, sum_over_ranks as sum_over_ranks
from dilkit.comm.cuts import shard_cuts as shard_cuts
from dilkit.comm.nn import RingDilatedAttention
from dilkit.comm.packed.attention import ring_dilated_attention_varlen
from dilkit.comm.packed.plan import packed_cuts as packed_cuts
from dilkit.comm.shards import unshard as unshard
from dilkit.comm.transports.base import Comm
from dilkit.pattern import Pattern


def attention_module(pattern: Pattern, comm: Comm, backend: str | Sequence[str] | None) -> nn.Module:
    return RingDilatedAttention(pattern, comm, backend=backend)


attend, attend_packed = ring_dilated_attention, ring_dilated_attention_varlen


def transport(group: Any) -> Comm:
    """Make the `Comm` of a process group or of one dimension of a device mesh; a `Comm` is returned as it is."""
    if isinstance(group, Comm):
        return group
    from dilkit.comm.transports.torch_dist import TorchComm

    return TorchComm(group)
