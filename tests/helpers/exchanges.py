"""Exchanges whose results each rank knows by itself, for every transport."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilkit.comm import Comm, MPIComm, PlanMismatch, TorchComm
from dilkit.comm.transports.mpi import requests
from dilkit.comm.transports.mpi.requests import cuda_aware, loaded_library, threads_may_call_mpi
from dilkit.comm.transports.records import LONGEST_RECORD

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
CHECKS: list[Callable[[Comm], None]] = []


def conform(comm: Comm):
    for check in CHECKS:
        try:
            check(comm)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"rank {comm.rank} of {comm.size}, {check.__name__}: {type(error).__name__}: {error}") from error


def checked(check: Callable[[Comm], None]) -> Callable[[Comm], None]:
    CHECKS.append(check)
    return check


class Traffic:
    def __init__(self, counts: Sequence[Sequence[int]], width: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0):
        self.counts, self.width, self.dtype, self.seed = counts, width, dtype, seed

    def block(self, source: int, target: int) -> Tensor:
        draw = torch.Generator().manual_seed(1 + target + 100 * (source + 100 * self.seed))
        drawn = torch.uint8 if self.dtype == torch.uint8 else torch.int64  # megabytes of them
        values = torch.randint(0, 127, (self.counts[source][target], self.width), generator=draw, dtype=drawn)
        return (values % 2 if self.dtype == torch.bool else values).to(self.dtype)

    def begin(self, comm: Comm) -> Callable[[], None]:
        """Post this rank's part; what waits for it and checks every bit and the count of bytes."""
        peers, me = range(comm.size), comm.rank
        rows = torch.cat([self.block(me, target) for target in peers])
        before = comm.sent_bytes
        pending = comm.exchange(rows, self.counts[me], [self.counts[s][me] for s in peers], f"traffic {self.seed}")
        to_others = sum(self.counts[me][target] for target in peers if target != me)
        assert comm.sent_bytes - before == to_others * self.width * rows.element_size()

        def finish():
            got, expected = pending.wait(), torch.cat([self.block(source, me) for source in peers])
            assert got.dtype == self.dtype
            assert got.shape == expected.shape
            assert torch.equal(got, expected), f"traffic {self.seed}"
            assert pending.wait() is got

        return finish


def uneven(size: int, seed: int = 0) -> list[list[int]]:
    """Counts 0 .. 6, every pair of ranks its own."""
    return [[(3 * source + 5 * target + seed + source * target) % 7 for target in range(size)] for source in range(size)]


@checked
def uneven_counts_of_every_dtype(comm: Comm):
    for number, dtype in enumerate(DTYPES):
        Traffic(uneven(comm.size, number), dtype=dtype, seed=number).begin(comm)()


PATTERNS: dict[str, Callable[[int, int, int], int]] = {
    "nobody sends anything": lambda source, target, size: 0,
    "each to itself": lambda source, target, size: 4 * (source == target),
    "the first to the last": lambda source, target, size: 5 * (source == 0 and target == size - 1),
    "around the ring": lambda source, target, size: 2 * (target == (source + 1) % size),
}


@checked
def rows_for_some_ranks_or_of_no_width(comm: Comm):
    for seed, count in enumerate([*PATTERNS.values(), PATTERNS["around the ring"]]):
        Traffic([[count(s, t, comm.size) for t in range(comm.size)] for s in range(comm.size)], seed=seed).begin(comm)()
    Traffic(uneven(comm.size), width=0).begin(comm)()


@checked
def many_under_way_waited_for_out_of_order(comm: Comm):
    finish = [Traffic(uneven(comm.size, number), width=1 + number, seed=number).begin(comm) for number in range(24)]
    for i in sorted(range(24), key=lambda number: (number * 7 + comm.rank) % 24):
        finish[i]()


@checked
def messages_of_more_than_eight_megabytes(comm: Comm):
    """Two under way; only the message from the last rank to the first is long, 9 MiB and a few bytes."""
    last = comm.size - 1
    counts = [[9 * 1024 + 3 if (s, t) == (last, 0) else 3 for t in range(comm.size)] for s in range(comm.size)]
    first, second = (Traffic(counts, width=1024, dtype=torch.uint8, seed=seed).begin(comm) for seed in range(2))
    second()
    first()


@checked
def special_bits_survive(comm: Comm):
    """NaN payloads, infinities and signed zeros: bytes are moved, not values."""
    bits = torch.tensor([[0x7FC01234, -4194304, 0x7F800000, -(2**31)]], dtype=torch.int32)
    got = comm.exchange(bits.view(torch.float32).repeat(comm.size, 1), [1] * comm.size, [1] * comm.size, "bits").wait()
    assert torch.equal(got.view(torch.int32), bits.repeat(comm.size, 1))


@checked
def rows_that_need_gradients_are_sent_without_them(comm: Comm):
    rows = torch.full((comm.size, 2), float(comm.rank), requires_grad=True)
    got = comm.exchange(rows, [1] * comm.size, [1] * comm.size, "leaf").wait()
    assert not got.requires_grad
    assert got[:, 0].tolist() == [float(rank) for rank in range(comm.size)]


@checked
def share_brings_every_record(comm: Comm):
    def record(rank):
        return (b"", b"\0\0", bytes(range(256)), b"x" * LONGEST_RECORD)[rank % 4]

    before = comm.sent_bytes
    assert comm.share(record(comm.rank)) == [record(rank) for rank in range(comm.size)]
    with pytest.raises(ValueError, match="record has"):
        comm.share(b"x" * (LONGEST_RECORD + 1))
    assert comm.sent_bytes == before


@checked
def agree_names_who_differs_on_every_rank(comm: Comm):
    comm.agree(b"the same")
    if comm.size < 3:
        return
    odd = comm.size - 1
    with pytest.raises(PlanMismatch, match=f"the plan: rank {odd} of {comm.size} differs") as caught:
        comm.agree(b"one" if comm.rank == odd else b"another", "the plan")
    assert caught.value.ranks == (odd,)
    assert caught.value.step == "the plan"


@checked
def wrong_rows_are_refused_before_anything_is_sent(comm: Comm):
    ones = [1] * comm.size
    with pytest.raises(TypeError, match="rows is a list"):
        comm.exchange([1.0], ones, ones)
    with pytest.raises(ValueError, match="contiguous"):
        comm.exchange(torch.zeros(2, 2 * comm.size).t(), [2] * comm.size, [2] * comm.size)
    with pytest.raises(ValueError, match="one count"):
        comm.exchange(torch.zeros(comm.size, 2), ones, [*ones, 1])
    with pytest.raises(ValueError, match="add up to"):
        comm.exchange(torch.zeros(comm.size + 1, 2), ones, ones)
    to_itself = [int(rank == comm.rank) for rank in range(comm.size)]
    with pytest.raises(ValueError, match=f"differ about what rank {comm.rank} sends to itself: 1 rows, or 2"):
        comm.exchange(torch.zeros(1, 2), to_itself, [2 * count for count in to_itself])
    comm.agree(b"still usable")


def conformance(comm: Comm):
    crossing(comm)
    while_one_computes(comm)
    for other in (comm, *(of_torch(comm) if isinstance(comm, TorchComm) else of_mpi(comm))):
        conform(other)


def of_torch(comm: Comm) -> Iterator[Comm]:
    """Yield a group without rank 0, whose ranks differ from global ones; and one with collective exchanges."""
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
    staged._reads = lambda device: False
    yield staged


def of_mpi(comm: Comm) -> Iterator[Comm]:
    """Ranks in reverse; bytes through other memory, as for a GPU; and messages in many pieces."""
    from mpi4py import MPI

    yield MPIComm(MPI.COMM_WORLD.Split(0, -comm.rank), timeout=60.0)
    assert loaded_library() is not None
    assert cuda_aware() is False
    staged = MPIComm(timeout=60.0)
    staged._reads = lambda device: False
    yield staged
    requests.PIECE_BYTES = 1 << 16
    yield comm
    own = MPI.COMM_WORLD.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    for wrong in (*([] if comm.rank == 0 else [own]), "world", MPI.COMM_SELF.Get_group()):
        with pytest.raises(TypeError, match="no intracommunicator of mpi4py that this rank is in"):
            MPIComm(wrong)
    assert not requests.in_progress


def crossing(first: Comm):
    """Odd ranks use two transports in the other order: each gets its own messages."""
    second = MPIComm(timeout=60.0) if isinstance(first, MPIComm) else TorchComm(timeout=60.0)
    ones = [1] * first.size
    tens = {10: first, 20: second}
    order = sorted(tens, reverse=first.rank % 2 == 1)
    pending = {ten: tens[ten].exchange(torch.full((first.size, 4), ten + first.rank), ones, ones, f"the {ten}s") for ten in order}
    for ten, rows in pending.items():
        assert rows.wait()[:, 0].tolist() == [ten + rank for rank in range(first.size)]


def while_one_computes(comm: Comm):
    """Rank 0 leaves the transport alone until all others have received long messages, some of its own."""
    if isinstance(comm, MPIComm) and not threads_may_call_mpi():
        return
    folder = Path(comm.share(tempfile.mkdtemp().encode() if comm.rank == 0 else b"", "a folder")[0].decode())
    pending = comm.exchange(torch.zeros(comm.size, 2**20, dtype=torch.uint8), [1] * comm.size, [1] * comm.size, "long")
    arrived, gives_up = [folder / str(rank) for rank in range(1, comm.size)], time.monotonic() + 20.0
    while comm.rank == 0 and not all(path.exists() for path in arrived) and time.monotonic() < gives_up:
        time.sleep(0.001)
    assert comm.rank or all(path.exists() for path in arrived), "long messages wait for a rank that computes"
    pending.wait()
    if comm.rank:
        (folder / str(comm.rank)).touch()
    else:
        shutil.rmtree(folder)
