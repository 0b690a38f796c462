"""Dilated attention over ranks: transports, exchange plans, and the attention itself.

Names are loaded at first use: `import dilkit.comm` needs neither MPI nor torch.distributed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Comm": "transports.base",
    "CommError": "transports.base",
    "CommTimeout": "transports.base",
    "ExchangePlan": "plan.exchange_plan",
    "Fault": "transports.threads",
    "MPIComm": "transports.mpi",
    "PeerLost": "transports.base",
    "Pending": "transports.base",
    "PlanMismatch": "transports.base",
    "RingDilatedAttention": "nn",
    "Rows": "plan.traffic",
    "TorchComm": "transports.torch_dist",
    "copy_from_rank": "reduce",
    "exchange_plan": "plan.exchange_plan",
    "load_shard": "shards",
    "positions": "shards",
    "ring_dilated_attention": "attention",
    "run_threads": "transports.threads",
    "shard": "shards",
    "shard_cuts": "cuts",
    "sum_over_ranks": "reduce",
    "unshard": "shards",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from dilkit.comm.attention import ring_dilated_attention as ring_dilated_attention
    from dilkit.comm.cuts import shard_cuts as shard_cuts
    from dilkit.comm.nn import RingDilatedAttention as RingDilatedAttention
    from dilkit.comm.plan.exchange_plan import ExchangePlan as ExchangePlan
    from dilkit.comm.plan.exchange_plan import exchange_plan as exchange_plan
    from dilkit.comm.plan.traffic import Rows as Rows
    from dilkit.comm.reduce import copy_from_rank as copy_from_rank
    from dilkit.comm.reduce import sum_over_ranks as sum_over_ranks
    from dilkit.comm.shards import load_shard as load_shard
    from dilkit.comm.shards import positions as positions
    from dilkit.comm.shards import shard as shard
    from dilkit.comm.shards import unshard as unshard
    from dilkit.comm.transports.base import Comm as Comm
    from dilkit.comm.transports.base import CommError as CommError
    from dilkit.comm.transports.base import CommTimeout as CommTimeout
    from dilkit.comm.transports.base import PeerLost as PeerLost
    from dilkit.comm.transports.base import Pending as Pending
    from dilkit.comm.transports.base import PlanMismatch as PlanMismatch
    from dilkit.comm.transports.mpi import MPIComm as MPIComm
    from dilkit.comm.transports.threads import Fault as Fault
    from dilkit.comm.transports.threads import run_threads as run_threads
    from dilkit.comm.transports.torch_dist import TorchComm as TorchComm


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dilkit.comm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dilkit.comm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
