"""What one rank of a job started by `launch.start` runs: `rank.py <launcher> <name> [arguments]`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.exchanges import conform

from dilkit import BlockSparse, GlobalTokens, Pattern, SlidingWindow, Strided, dilated_attention_varlen
from dilkit.comm import Comm, CommError, CommTimeout, MPIComm, PeerLost, TorchComm
from dilkit.comm.transports.mpi import requests
from dilkit.comm.transports.mpi.library import cuda_aware, loaded_library
from dilkit.comm.transports.mpi.progress import threads_may_call_mpi

TIMEOUT = 1.5
"""Seconds that ranks wait for one that does not answer."""
LONG_TIMEOUT = 20.0
"""Seconds that ranks wait for one whose end they notice: on a busy machine a process may take long to end."""
LONG_BYTES = 1 << 20
"""Of a message that no MPI library sends before the other rank is ready."""
ENDS = ("killed", "exits", "raises", "raises_in_a_thread", "gives_up", "disagrees", "another_version")
"""The faults that the others notice before their timeout."""


def timeout_of(fault: str) -> float:
    """Seconds that the other ranks wait."""
    return LONG_TIMEOUT if fault in ENDS else TIMEOUT


def connect(launcher: str, timeout: float) -> Comm:
    """This rank's transport."""
    if launcher != "gloo":
        return MPIComm(timeout=timeout)
    meeting = f"file://{os.environ['DILKIT_TEST_MEETING']}"
    dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    return TorchComm(timeout=timeout)


def say(line: str) -> None:
    """Print `line` in one piece: ranks write to the same place."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def conformance(comm: Comm) -> None:
    """The whole list on this transport, and on what else its class can be made from."""
    crossing(comm)
    while_one_computes(comm)
    for other in (comm, *(of_torch(comm) if isinstance(comm, TorchComm) else of_mpi(comm))):
        conform(other)
    say(f"rank {comm.rank} of {comm.size} conforms")


def of_torch(comm: Comm) -> Iterator[Comm]:
    """A group without rank 0, so that its ranks are others than the global ones; and one collective operation per exchange."""
    group = dist.new_group(range(1, comm.size))
    if comm.rank:
        yield TorchComm(group, timeout=60.0)
    else:
        with pytest.raises(ValueError, match="process 0 is not in it"):
            TorchComm(group)
    together = TorchComm(timeout=60.0)
    together._backends = {"cpu": "as nccl"}
    yield together
    with pytest.raises(ValueError, match=r"rows are on meta, but the group has as nccl for cpu only"):
        TorchComm._post(together, [], [], torch.device("meta"), 0, "rows")
    staged = TorchComm(timeout=60.0)
    staged._reads = lambda device: False  # type: ignore[method-assign]
    yield staged


def of_mpi(comm: Comm) -> Iterator[Comm]:
    """Ranks in reverse; bytes through other memory, as those of a GPU; and messages in many pieces."""
    from mpi4py import MPI

    yield MPIComm(MPI.COMM_WORLD.Split(0, -comm.rank), timeout=60.0)
    assert loaded_library() is not None
    assert cuda_aware() is False
    staged = MPIComm(timeout=60.0)
    staged._reads = lambda device: False  # type: ignore[method-assign]
    yield staged
    requests.PIECE_BYTES = 1 << 16
    yield comm
    own = MPI.COMM_WORLD.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    for wrong in (*([] if comm.rank == 0 else [own]), "world", MPI.COMM_SELF.Get_group()):
        with pytest.raises(TypeError, match="no intracommunicator of mpi4py that this rank is in"):
            MPIComm(wrong)
    assert not requests.in_progress


def crossing(first: Comm) -> None:
    """Two transports of the same ranks, which odd ranks use in the other order: each gets its own messages."""
    second = MPIComm(timeout=60.0) if isinstance(first, MPIComm) else TorchComm(timeout=60.0)
    ones = [1] * first.size
    tens = {10: first, 20: second}
    order = sorted(tens, reverse=first.rank % 2 == 1)
    pending = {ten: tens[ten].exchange(torch.full((first.size, 4), ten + first.rank), ones, ones, f"the {ten}s") for ten in order}
    for ten, rows in pending.items():
        assert rows.wait()[:, 0].tolist() == [ten + rank for rank in range(first.size)]
    say(f"rank {first.rank} of {first.size} took nothing for something else")


def while_one_computes(comm: Comm) -> None:
    """Rank 0 calls nothing of the transport until all others have received long messages, of which it sends some too."""
    if isinstance(comm, MPIComm) and not threads_may_call_mpi():
        return
    folder = Path(comm.share(tempfile.mkdtemp().encode() if comm.rank == 0 else b"", "a folder")[0].decode())
    pending = comm.exchange(torch.zeros(comm.size, LONG_BYTES, dtype=torch.uint8), [1] * comm.size, [1] * comm.size, "long")
    arrived, gives_up = [folder / str(rank) for rank in range(1, comm.size)], time.monotonic() + LONG_TIMEOUT
    while comm.rank == 0 and not all(path.exists() for path in arrived) and time.monotonic() < gives_up:
        time.sleep(0.001)
    assert comm.rank or all(path.exists() for path in arrived), "long messages wait for a rank that computes"
    pending.wait()
    if comm.rank:
        (folder / str(comm.rank)).touch()
    else:
        shutil.rmtree(folder)


def finalizes(comm: MPIComm) -> None:
    """Ends MPI itself, and lives on."""
    from mpi4py import MPI

    everyone(comm, "before the end")
    MPI.Finalize()
    say(f"rank {comm.rank} has ended MPI")


def packed(comm: Comm) -> None:
    """Sequences that are packed, of which one is cut over all ranks: this rank's rows and gradients are those of the whole.

    By segments, and by branches of all kinds that ranks compute in parts.
    """
    from dilkit.comm import ring_dilated_attention_varlen  # loads torch's compiler, which takes as long as torch

    other_kinds = SlidingWindow(9), GlobalTokens([0, 30]), BlockSparse.local_global(6, 16), Strided(7)
    cu_seqlens = torch.tensor([0, 5, 5, 85, 90], dtype=torch.int32)
    whole = [torch.randn(90, 4, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    rows = slice(90 * comm.rank // comm.size, 90 * (comm.rank + 1) // comm.size)
    for pattern, is_causal in ((Pattern([8, 24], [1, 3]), True), (Pattern.of(*other_kinds), False)):
        want = [x.clone().requires_grad_() for x in whole]
        mine = [x[rows].clone().requires_grad_() for x in whole]
        out = ring_dilated_attention_varlen(*mine, pattern, comm, cu_seqlens, is_causal=is_causal)
        right = dilated_attention_varlen(*want, pattern, cu_seqlens, is_causal=is_causal)
        found = [out, *torch.autograd.grad(out.sin().sum(), mine)]  # type: ignore[union-attr]
        for got, x in zip(found, [right, *torch.autograd.grad(right.sin().sum(), want)], strict=True):  # type: ignore[union-attr]
            torch.testing.assert_close(got, x[rows], rtol=1e-11, atol=1e-11)
    say(f"rank {comm.rank} of {comm.size} has its rows of the packing")


def one_process(comm: MPIComm) -> None:
    """A job of one rank, and how an exchange of it fails: with itself, and with a rank that is not there."""
    from mpi4py import MPI

    say(f"{comm.rank} {comm.size} {comm.share(b'record')}")
    own, three, five = comm._comm, torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    assert own.Get_errhandler() == MPI.ERRORS_RETURN
    late = requests.MPIExchange(own, 1, "keys")
    late.post([], [(0, three)])
    with pytest.raises(CommTimeout, match=r"^exchange 1 \(keys\): nothing came from rank 0 within 0.01 s$") as caught:
        late.wait(0.01)
    assert (caught.value.ranks, requests.unfinished_exchanges()) == ((0,), [late])
    late.post([(0, three + 1)], [])
    late.wait(20.0)
    assert three.tolist() == [1, 1, 1]
    assert not requests.in_progress
    short = requests.MPIExchange(own, 2, "keys")
    short.post([(0, three)], [(0, five)])
    with pytest.raises(PeerLost, match=r"^exchange 2 \(keys\): rank 0 sent 3 bytes where 5 were expected$"):
        short.wait(20.0)
    with pytest.raises(PeerLost, match=r"^exchange 3 \(keys\): MPI cannot reach rank 7: ."):
        requests.MPIExchange(own, 3, "keys").post([(7, three)], [])
    say("fails as it should")


def everyone(comm: Comm, step: str) -> None:
    """Everyone sends to everyone."""
    comm.exchange(torch.zeros(comm.size, 8), [1] * comm.size, [1] * comm.size, step).wait()


def conformance_and_fault(comm: Comm, kind: str) -> None:
    """One job for both: to start the ranks of `mpirun` takes most of its time."""
    conformance(MPIComm(timeout=60.0))
    fault(comm, kind)


def fault(comm: Comm, kind: str) -> None:
    """All goes well once; then rank 1 fails before it takes part in the step "keys"."""
    everyone(comm, "warming up")
    if comm.rank == 1:
        FAULTS[kind](comm)
    if kind in ("disagrees", "another_version"):
        comm.agree(b"one", "the plan")
    began = time.monotonic()
    try:
        everyone(comm, "keys")
    except CommError as error:
        say(f"rank {comm.rank} knows after {time.monotonic() - began:.2f} s: {type(error).__name__}: {error}")
        raise


def raises(comm: Comm) -> None:
    raise ZeroDivisionError("this one's own fault")


def raises_in_a_thread(comm: Comm) -> None:
    thread = threading.Thread(target=raises, args=(comm,))
    thread.start()
    thread.join()
    time.sleep(100)


def gives_up(comm: Comm) -> None:
    comm.abort(ZeroDivisionError("this one's own fault"))
    time.sleep(100)


def another_version(comm: Comm) -> None:
    comm._version = b"0.1.7"


FAULTS = {
    "killed": lambda comm: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": lambda comm: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda comm: time.sleep(100),
    "raises": raises,
    "raises_in_a_thread": raises_in_a_thread,
    "gives_up": gives_up,
    "exits": lambda comm: sys.exit(3),
    "disagrees": lambda comm: comm.agree(b"another", "the plan"),
    "another_version": another_version,
}

if __name__ == "__main__":
    launcher, name, *arguments = sys.argv[1:]
    globals()[name](connect(launcher, timeout_of(arguments[0]) if arguments else 60.0), *arguments)
