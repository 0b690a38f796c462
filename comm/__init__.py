"""Dilated attention over ranks: transports, exchange plans, and the attention itself.

Names are loaded at first use: `import dilkit.comm` needs neither MPI nor torch.distributed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Comm": "transport",
    "CommError": "transport",
    "CommTimeout": "transport",
    "ExchangePlan": "plan",
    "Fault": "threads",
    "MPIComm": "mpi",
    "PeerLost": "transport",
    "Pending": "transport",
    "PlanMismatch": "transport",
    "RingDilatedAttention": "nn",
    "Rows": "traffic",
    "TorchComm": "torch_dist",
    "copy_from_rank": "reduce",
    "exchange_plan": "plan",
    "load_shard": "shards",
    "positions": "shards",
    "ring_dilated_attention": "attention",
    "run_threads": "threads",
    "shard": "shards",
    "shard_cuts": "cuts",
    "sum_over_ranks": "reduce",
    "unshard": "shards",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from dilkit.comm.attention import ring_dilated_attention as ring_dilated_attention
    from dilkit.comm.cuts import shard_cuts as shard_cuts
    from dilkit.comm.mpi import MPIComm as MPIComm
    from dilkit.comm.nn import RingDilatedAttention as RingDilatedAttention
    from dilkit.comm.plan import ExchangePlan as ExchangePlan
    from dilkit.comm.plan import exchange_plan as exchange_plan
    from dilkit.comm.reduce import copy_from_rank as copy_from_rank
    from dilkit.comm.reduce import sum_over_ranks as sum_over_ranks
    from dilkit.comm.shards import load_shard as load_shard
    from dilkit.comm.shards import positions as positions
    from dilkit.comm.shards import shard as shard
    from dilkit.comm.shards import unshard as unshard
    from dilkit.comm.threads import Fault as Fault
    from dilkit.comm.threads import run_threads as run_threads
    from dilkit.comm.torch_dist import TorchComm as TorchComm
    from dilkit.comm.traffic import Rows as Rows
    from dilkit.comm.transport import Comm as Comm
    from dilkit.comm.transport import CommError as CommError
    from dilkit.comm.transport import CommTimeout as CommTimeout
    from dilkit.comm.transport import PeerLost as PeerLost
    from dilkit.comm.transport import Pending as Pending
    from dilkit.comm.transport import PlanMismatch as PlanMismatch


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dilkit.comm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dilkit.comm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
