"""Dilated attention over the ranks of a process group: each rank holds a shard of the sequence.

One forward pass, step by step, with the file of each step:

    rank t holds the rows cuts[t] .. cuts[t + 1] - 1             cuts.py, shards.py
      |
      |  all ranks agree on their arguments                       agreement.py, arguments.py, rank_attention.py
      |  exchange plan: which rank computes what                  plan/exchange_plan.py
      |  messages: which rows go from rank to rank                plan/segments.py, of branches without segments plan/kinds/
      |  index tables: where these rows lie in messages           passes/index_tables.py
      v
    send rows of queries, keys, values ------------+              passes/all_to_all.py, transports/
      |                                            |
      |  local segments: nothing to send           |              passes/attention_op.py
      |                                            v
      |                         small problems with received rows passes/problem_stacks.py, passes/attention_op.py
      |                                            |
      |  ring schedule: key/value blocks rotate    |              passes/ring.py
      v                                            |
    merge partial results (out, lse) <-- send back-+              passes/attention_op.py, passes/autograd.py
      |
      v
    return the rows of out and lse that belong to this rank       attention.py

The backward pass is the same the other way round. With a token order, rows travel to their places along it and back
(`reorder.py`). What training needs besides (`sum_over_ranks`, `copy_from_rank`) is in `collectives.py`, labels and losses of
sharded sequences (`roll`, `sum_by_sequence`) in `labels.py`. Under `torch.compile` a call is one operator (`operators/`).

Names are loaded at first use: `import dilkit.comm` needs neither MPI nor torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_NAMES = {
    "attention": "ring_dilated_attention",
    "collectives": "copy_from_rank sum_over_ranks",
    "cuts": "shard_cuts",
    "labels": "roll sum_by_sequence",
    "nn": "RingDilatedAttention",
    "packed.attention": "ring_dilated_attention_varlen",
    "packed.plan": "PackedPlan packed_cuts share_sequences",
    "plan.exchange_plan": "ExchangePlan exchange_plan",
    "plan.traffic": "Rows",
    "shards": "load_shard positions shard unshard",
    "transports.base": "Comm Pending",
    "transports.errors": "CommError CommTimeout PeerLost PlanMismatch",
    "transports.mpi.comm": "MPIComm",
    "transports.threads": "Fault run_threads",
    "transports.torch_dist": "TorchComm",
}

__all__ = sorted(" ".join(_NAMES.values()).split())

if TYPE_CHECKING:
    from dilkit.comm.attention import ring_dilated_attention as ring_dilated_attention
    from dilkit.comm.collectives import copy_from_rank as copy_from_rank, sum_over_ranks as sum_over_ranks
    from dilkit.comm.cuts import shard_cuts as shard_cuts
    from dilkit.comm.labels import roll as roll, sum_by_sequence as sum_by_sequence
    from dilkit.comm.nn import RingDilatedAttention as RingDilatedAttention
    from dilkit.comm.packed.attention import ring_dilated_attention_varlen as ring_dilated_attention_varlen
    from dilkit.comm.packed.plan import PackedPlan as PackedPlan, packed_cuts as packed_cuts, share_sequences as share_sequences
    from dilkit.comm.plan.exchange_plan import ExchangePlan as ExchangePlan, exchange_plan as exchange_plan
    from dilkit.comm.plan.traffic import Rows as Rows
    from dilkit.comm.shards import load_shard as load_shard, positions as positions, shard as shard, unshard as unshard
    from dilkit.comm.transports.base import Comm as Comm, Pending as Pending
    from dilkit.comm.transports.errors import (
        CommError as CommError,
        CommTimeout as CommTimeout,
        PeerLost as PeerLost,
        PlanMismatch as PlanMismatch,
    )
    from dilkit.comm.transports.mpi.comm import MPIComm as MPIComm
    from dilkit.comm.transports.threads import Fault as Fault, run_threads as run_threads
    from dilkit.comm.transports.torch_dist import TorchComm as TorchComm

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
