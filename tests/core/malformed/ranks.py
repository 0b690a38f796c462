"""Malformed calls over ranks: cuts, plans, shards, collective operations, faults. `tests/comm/test_misuse.py` has attention's."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core.malformed.case import Case, P, Q, made

from dilkit import Pattern, comm, order
from dilkit.comm import (
    ExchangePlan,
    Fault,
    PackedPlan,
    RingDilatedAttention,
    Rows,
    exchange_plan,
    packed_cuts,
    run_threads,
    shard_cuts,
    share_sequences,
)
from dilkit.comm.simulation.delivery import Topology
from dilkit.comm.simulation.simulation import Stragglers

ONES, SHARED = [torch.ones(2)], torch.ones(1).expand(3)
ONE = P, (0, 4), 4, 4
ONCE = Pattern([2, 8], [1, 2], overlap="once")
CUTS, GROW = [(), (0,), (0, 0), (1, 4), (0, 5, 3), (0, 4, 4, 8), (0, 0, 2, 2, 3)], "must start at 0 and grow"
STARTS = [(0, 5), (1, 20), (0, 30, 20), ()]


def on_rank(name: str, *args, **options) -> Callable[[], Any]:
    call = getattr(comm, name)
    return lambda: run_threads(1, lambda one: call(args[0], one, *args[1:], **options), timeout=5)


def plan(*args, **options) -> Callable[[], Any]:
    return made(ExchangePlan, *args, **options)


def routed(pattern=P, **options) -> Callable[[], Any]:
    return made(exchange_plan, pattern, (0, 4, 8), 4, **options)


def packed(**options) -> Callable[[], Any]:
    return made(PackedPlan, **dict(pattern=P, cuts=(0, 10, 20), starts=(0, 10, 20), heads=4, kv_heads=2) | options)


def shared(lengths=(5, 5), ranks=2, pattern=P, **heads) -> Callable[[], Any]:
    return made(share_sequences if heads else packed_cuts, lengths, ranks, pattern, **heads)


def asked(method: str, *args, **options) -> Callable[[], Any]:
    return lambda: getattr(ExchangePlan(P, (0, 4, 8), 4, 4), method)(*args, **options)


def threads(*args, **options) -> Callable[[], Any]:
    return made(run_threads, *args, **options)


def module(**options) -> Callable[[], Any]:
    return threads(1, lambda one: RingDilatedAttention(P, one, **options))


def load(name, dtype=None, **options) -> Callable[[], Any]:
    def run():
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder, "tokens.npy"), np.arange(6))
            Path(folder, "odd.bin").write_bytes(b"123")
            path = Path(folder, name) if isinstance(name, str) else name
            run_threads(1, lambda one: comm.load_shard(path, one, dtype=dtype, **options), timeout=5)

    return run


PLANS = {
    "cuts of too few tokens": Case(lambda: shard_cuts(2, 3), ValueError, "seq=2", "world_size=3", "one token"),
    "cuts of a text": Case(lambda: shard_cuts("8", 2), TypeError, "seq='8'", "integer"),
    "cuts for too many ranks": Case(lambda: shard_cuts(10**12, 10**12), ValueError, "world_size=", "at most 1,048,576"),
    "cuts are None": Case(lambda: exchange_plan(P, None, 4), TypeError, "cuts=None", "shard_cuts"),
    "cuts of a fraction": Case(plan(P, (0, 4.0, 8), 4, 4), TypeError, "cuts[1]=4.0", "integer"),
    "no heads": Case(plan(P, (0, 4), 0, 4), ValueError, "heads=0", "at least 1"),
    "unknown to keep": Case(plan(*ONE, keep="all"), ValueError, "keep='all'", "'nothing'"),
    "causality is a number": Case(plan(*ONE, is_causal=1), TypeError, "is_causal=1", "True or False"),
    "too many tokens": Case(plan(P, (0, 2**61), 4, 4), ValueError, "seq=", "64 bits"),
    "pattern of a plan": Case(plan([4], (0, 4), 4, 4), TypeError, "pattern=[4]", "dilkit.Pattern"),
    "work of the last rank as -1": Case(asked("work", -1), ValueError, "rank=-1", "0 to 1"),
    "work of a text": Case(asked("work", "0"), TypeError, "rank='0'", "integer"),
    "bytes of no phase": Case(asked("bytes", 0, "both", head_dim=8, dtype="float32"), ValueError, "phase='both'", "'backward'"),
    "bytes of no dtype": Case(asked("bytes", 0, "forward", head_dim=8, dtype="int8"), ValueError, "dtype='int8'", "'float16'"),
    "positions of no rank": Case(asked("positions", 2), ValueError, "rank=2", "0 to 1"),
    "rows of no width": Case(lambda: Rows(0, "float32"), ValueError, "head_dim=0", "at least 1"),
    "rows of no batch": Case(lambda: Rows(8, "float32", 0), ValueError, "batch=0", "at least 1"),
    "rows of other roles": Case(made(Rows, 8, "float32", gradients="qx"), ValueError, "gradients='qx'"),
    "rows of a mask": Case(lambda: Rows(8, "float32", 1, "yes"), TypeError, "key_padding_mask='yes'", "True or False"),
    **{f"cuts {cuts}": Case(made(exchange_plan, P, cuts, 1), ValueError, "cuts=", GROW) for cuts in CUTS},
    "partial results apart": Case(
        routed(schedule="gather", fuse_branches=False), ValueError, "schedule='gather' sums", "'scatter'"
    ),
    "partial results, once": Case(routed(ONCE, schedule="ring"), ValueError, "schedule='ring' sums", "use schedule='scatter'"),
    "fusion of a text": Case(routed(fuse_branches="no"), TypeError, "fuse_branches='no' is a str"),
    "no kv heads": Case(routed(kv_heads=0), ValueError, "kv_heads=0 must"),
    "heads that are not there": Case(routed(Pattern([4], [1], heads=[(0, 6)])), ValueError, "reaches past the 4 heads"),
    **{f"starts {x}": Case(packed(starts=x), ValueError, f"starts={x}", "must grow from 0 to the 20 rows") for x in STARTS},
    "packed, cuts that decrease": Case(packed(cuts=(0, 30, 20)), ValueError, "cuts=(0, 30, 20)", GROW),
    "packed, kv heads": Case(packed(kv_heads=3), ValueError, "kv_heads=3 must divide heads=4"),
    "packed, a schedule": Case(packed(schedule="fastest"), ValueError, "schedule='fastest' is not known"),
    "packed, once": Case(packed(schedule="ring", pattern=ONCE), ValueError, "schedule='ring' sums the results of branches"),
    "packed, sequences of no rank": Case(lambda: packed()().whole(2), ValueError, "rank=2 is no rank of this plan"),
    "bandwidth of 0": Case(made(Topology, 0.0), ValueError, "bandwidth=0.0 must be above 0"),
    "hosts of nothing": Case(made(Topology, 1.0, ranks_per_host=0), ValueError, "ranks_per_host"),
    "uplinks too fast": Case(made(Topology, 1.0, oversubscription=0.5), ValueError, "oversubscription=0.5 must be at least 1"),
    "too many stragglers": Case(made(Stragglers(5).slower, 4), ValueError, "5 of 4 ranks"),
    "stragglers too fast": Case(made(Stragglers(1, 0.5).slower, 4), ValueError, "slowdown=0.5 must be at least 1"),
}
for name, of in (("cuts", {}), ("shares", dict(heads=4))):
    PLANS |= {
        f"{name} of lengths of a text": Case(shared("55", **of), TypeError, "lengths='55' is a str"),
        f"{name} of a length below 0": Case(shared([5, -1], **of), ValueError, "lengths[1]=-1 must be at least 0"),
        f"{name} of half a token": Case(shared([5, 2.0], **of), TypeError, "lengths[1]=2.0 is a float"),
        f"{name} over no ranks": Case(shared(ranks=0, **of), ValueError, "world_size=0 must be at least 1"),
        f"{name} of a list": Case(shared(pattern=[8], **of), TypeError, "a dilkit.Pattern is needed"),
    }

SHARDS = {
    "of a list": Case(on_rank("shard", [1, 2]), TypeError, "x is a list", "torch.Tensor"),
    "without ranks": Case(lambda: comm.shard(Q, None), TypeError, "comm=None", "dilkit.comm.Comm"),
    "along no dimension": Case(on_rank("shard", Q, dim=9), ValueError, "dim=9", "(2, 6, 4, 8)"),
    "along a name": Case(on_rank("shard", Q, dim="seq"), TypeError, "dim='seq'", "integer"),
    "along a list": Case(on_rank("shard", Q, [4]), TypeError, "pattern=[4]", "dilkit.Pattern"),
    "in the order of a name": Case(on_rank("shard", Q, order="hilbert"), TypeError, "order='hilbert'", "TokenOrder"),
    "together along no dimension": Case(on_rank("unshard", Q, dim=9), ValueError, "dim=9", "(2, 6, 4, 8)"),
    "together, sparse": Case(on_rank("unshard", Q.to_sparse()), TypeError, "x has layout", "sparse", "to_dense"),
    "together without ranks": Case(lambda: comm.unshard(Q, None), TypeError, "comm=None", "dilkit.comm.Comm"),
    "together in the order of a name": Case(on_rank("unshard", Q, order="x"), TypeError, "order='x'", "TokenOrder"),
    "together in another order": Case(on_rank("unshard", Q, order=order((4, 4))), ValueError, "6 tokens", "order is of 16"),
    "of no file": Case(load(None), TypeError, "path=None", "a path"),
    "of a file that is not there": Case(load("none.npy"), OSError, "none.npy", "No such file"),
    "of a file without a dtype": Case(load("odd.bin"), ValueError, "odd.bin", "dtype='uint16'"),
    "of a file of half a number": Case(load("odd.bin", "uint16"), ValueError, "odd.bin", "uint16", "multiple"),
    "of an unknown dtype": Case(load("odd.bin", "float99"), TypeError, "dtype='float99'", "'uint16'"),
    "of a dtype too many": Case(load("tokens.npy", "int64"), ValueError, "dtype='int64'", "raw files"),
    "of a file in no order": Case(load("tokens.npy", order="x"), TypeError, "order='x'", "TokenOrder"),
    "positions of too many": Case(on_rank("positions", 2**70), ValueError, "rows=", "at most 2**62"),
    "positions elsewhere": Case(on_rank("positions", 3, device="tpu"), ValueError, "device='tpu'", "cuda"),
    "positions without ranks": Case(lambda: comm.positions(3, None), TypeError, "comm=None", "dilkit.comm.Comm"),
}

RANKS = {
    "sums of a tensor": Case(on_rank("sum_over_ranks", ONES[0]), TypeError, "tensors is a Tensor", "list"),
    "sums, sparse": Case(on_rank("sum_over_ranks", [torch.ones(2).to_sparse()]), TypeError, "tensors", "sparse", "plain"),
    "sums into one number": Case(on_rank("sum_over_ranks", [SHARED]), ValueError, "tensors", "(3,)", "contiguous()"),
    "sums without ranks": Case(lambda: comm.sum_over_ranks(ONES, None), TypeError, "comm=None", "dilkit.comm.Comm"),
    "copies from a text": Case(on_rank("copy_from_rank", ONES, source="0"), TypeError, "source='0'", "integer"),
    "copies of a state_dict": Case(on_rank("copy_from_rank", {"weight": ONES[0]}), TypeError, "tensors", "str"),
    "copies without ranks": Case(lambda: comm.copy_from_rank(ONES, None), TypeError, "comm=None", "dilkit.comm.Comm"),
    "no ranks at all": Case(made(comm.ring_dilated_attention, Q, Q, Q, P, "nccl"), TypeError, "comm='nccl'", "dilkit.comm.Comm"),
    "module of a list": Case(lambda: RingDilatedAttention([4], None), TypeError, "pattern=[4]", "dilkit.Pattern"),
    "module without ranks": Case(lambda: RingDilatedAttention(P, None), TypeError, "comm=None", "dilkit.comm.Comm"),
    "module of a schedule": Case(module(schedule="fast"), ValueError, "schedule='fast'", "'ring'"),
    "module of a number": Case(module(backend=3), TypeError, "backend=3", "int", "name"),
    "module of what to keep": Case(module(keep="all"), ValueError, "keep='all' is not known"),
    "module of a fusion": Case(module(fuse_branches=1), TypeError, "fuse_branches=1 is a int"),
    "module of a scale": Case(module(scale="1"), TypeError, "scale='1' is a str"),
    "module of two orders": Case(module(order=order((2, 3)), orders=[order((2, 3))]), ValueError, "both given"),
}

FAULTS = {
    "no ranks": Case(threads(0, print), ValueError, "world_size=0", "at least 1"),
    "ranks of a text": Case(threads("2", print), TypeError, "world_size='2'", "integer"),
    "no function": Case(threads(2, None), TypeError, "function=None", "function of a Comm"),
    "timeout of 0": Case(threads(1, print, timeout=0), ValueError, "timeout=0", "greater than 0"),
    "timeout of a text": Case(threads(1, print, timeout="5"), TypeError, "timeout='5'", "number"),
    "faults of a name": Case(threads(1, print, faults=["kill"]), TypeError, "faults=['kill']", "Fault"),
    "unknown kind": Case(lambda: Fault("explode", 0, 1), ValueError, "kind='explode'", "'kill'"),
    "rank below 0": Case(lambda: Fault("kill", -1, 1), ValueError, "rank=-1", "at least 0"),
    "exchange 0": Case(lambda: Fault("kill", 0, 0), ValueError, "number=0", "at least 1"),
    "delay below 0": Case(lambda: Fault("delay", 0, 1, seconds=-1), ValueError, "seconds=-1", "at least 0"),
    "delay of a text": Case(lambda: Fault("delay", 0, 1, seconds="2"), TypeError, "seconds='2'", "number"),
    "peer of a text": Case(lambda: Fault("drop", 0, 1, peer="1"), TypeError, "peer='1'", "integer"),
}
