"""Every transport against one list of exchanges; test_faults.py has their failures."""

import signal
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from helpers.exchanges import conform, conformance
from helpers.launch import LAUNCHERS, run
from helpers.project import python

import dilkit.comm
from dilkit import Pattern
from dilkit.comm import (
    CommError,
    CommTimeout,
    Fault,
    MPIComm,
    PeerLost,
    PlanMismatch,
    TorchComm,
    ring_dilated_attention,
    run_threads,
    shard,
    sum_over_ranks,
    unshard,
)
from dilkit.comm.agreement import agree_on
from dilkit.comm.transports import base
from dilkit.comm.transports.mpi import requests
from dilkit.comm.transports.mpi.requests import poll

pytestmark = pytest.mark.surroundings


@pytest.mark.parametrize("size", [1, 2, 3, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5, 6, 7))])
def test_threads_conform(size):
    run_threads(size, conform)


def test_what_was_sent_may_be_overwritten_after_the_wait():
    overwritten = threading.Event()

    def on_rank(comm):
        rows = torch.full((1 - comm.rank, 3), 7)
        pending = comm.exchange(rows, [0, 1 - comm.rank], [comm.rank, 0])
        if comm.rank == 0:
            pending.wait()
            rows.fill_(0)
            overwritten.set()
        assert overwritten.wait(10)
        return pending.wait().flatten().tolist()

    assert run_threads(2, on_rank) == [[], [7, 7, 7]]


SLOW = [(launcher, size) for launcher in LAUNCHERS for size in (2, 3, 4) if (launcher, size) != ("gloo", 3)]


@pytest.mark.parametrize(("launcher", "size"), [("gloo", 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_processes_conform(launcher, size):
    run(launcher, size, conformance)


def finalizes(comm):
    from mpi4py import MPI

    comm.share(b"", "before the end")
    comm.share = lambda record, step: [record]  # type: ignore[method-assign]  # that of the end of the job
    MPI.Finalize()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_a_program_may_end_mpi_itself(launcher):
    run(launcher, 2, finalizes)


def exchanges_of_one(comm):
    """A job of one rank, and how an exchange of it fails: with itself, and with a rank that does not exist."""
    from mpi4py import MPI

    assert (comm.rank, comm.size, comm.share(b"record")) == (0, 1, [b"record"])
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


def test_one_process_without_mpirun_is_a_job_of_one_rank():
    run("alone", 1, exchanges_of_one)


def test_the_list_notices_a_corrupted_message():
    with pytest.raises(AssertionError, match="uneven_counts_of_every_dtype"):
        run_threads(3, conform, timeout=5, faults=[Fault("corrupt", rank=1, number=4)])


@pytest.mark.usefixtures("ctrl_c")
def test_threads_end_after_ctrl_c():
    died = []

    def on_rank(comm):
        try:
            comm.share(b"all are there")
            if comm.rank == 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while True:
                comm.share(b"again")
        except CommError as error:
            died.append(str(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        run_threads(3, on_rank, timeout=60)
    end = time.monotonic() + 20
    while len(died) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(died) == 3
    assert all("KeyboardInterrupt" in text or "gave up" in text for text in died)


def test_importing_the_transports_loads_neither_mpi_nor_torch(tmp_path):
    loaded = python("import sys, dilkit.comm; print([m for m in ('torch', 'mpi4py') if m in sys.modules])", tmp_path)
    assert loaded == "[]"


def test_every_name_is_there():
    for name in dilkit.comm.__all__:
        assert getattr(dilkit.comm, name).__name__ == name
        assert name in dir(dilkit.comm)
    with pytest.raises(AttributeError, match="no attribute 'Ring'"):
        _ = dilkit.comm.Ring


def test_torch_distributed_must_be_initialized():
    with pytest.raises(RuntimeError, match=r"not initialized: start the ranks with torchrun and call.*init_process_group"):
        TorchComm()
    with pytest.raises(TypeError, match=r"group=2 is a int; a process group or a DeviceMesh"):
        TorchComm(2)


@pytest.fixture
def one_process():
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch is built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_tensors_that_are_spread_over_ranks_already_are_refused(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    whole = distribute_tensor(torch.ones(1, 4, 2, 8), mesh, [Shard(1)])
    plain, pattern, comm = torch.ones(1, 4, 2, 8), Pattern([4], [1]), TorchComm(timeout=5.0)
    calls = {
        "x": lambda: shard(whole, comm),
        "x ": lambda: unshard(whole, comm),
        "one of tensors": lambda: sum_over_ranks([whole], comm),
        "rows": lambda: comm.exchange(whole, [1], [1]),
        "key": lambda: ring_dilated_attention(plain, whole, plain, pattern, comm),
        "sink": lambda: ring_dilated_attention(plain, plain, plain, pattern, comm, sink=whole),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()} is a DTensor of shape \(1, 4, 2, 8\); .*\.to_local\(\)"):
            call()


def test_a_device_mesh_is_a_group_and_errors_name_its_dimension(one_process):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    comm = TorchComm(mesh["cp"])
    assert (comm.rank, comm.size, comm._group) == (0, 1, mesh.get_group("cp"))
    with pytest.raises(ValueError, match=r"has 2 dimensions; name the one that the sequence is cut along, such as mesh\['cp'\]"):
        TorchComm(mesh)
    with pytest.raises(KeyError, match="sp"):
        TorchComm(mesh["sp"])
    comm.share = lambda record, step: [record, record.replace(b'"1"', b'"2"')]
    with pytest.raises(PlanMismatch, match=r"^arguments along 'cp': .*rank 1"):
        agree_on(comm, lambda: dict(number="1"), step="arguments")
    with pytest.raises(TypeError, match=r"group='cp' is a str; a process group or a DeviceMesh of one dimension is needed"):
        TorchComm("cp")


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    requests.mpi.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'dilkit\[mpi\]'"):
        MPIComm()


@pytest.mark.parametrize(
    ("loaded", "aware"),
    [
        (None, False),
        (types.SimpleNamespace(), False),
        (types.SimpleNamespace(MPIX_Query_cuda_support=lambda: 0), False),
        (types.SimpleNamespace(MPIX_Query_cuda_support=lambda: 1), True),
    ],
    ids=["not-found", "silent", "no", "yes"],
)
def test_mpi_is_cuda_aware_if_the_library_says_so(loaded, aware, monkeypatch):
    monkeypatch.setattr(requests, "loaded_library", lambda: loaded)
    assert requests.cuda_aware.__wrapped__() is aware
    monkeypatch.setattr("dilkit.comm.transports.mpi.comm.cuda_aware", lambda: aware)
    reads = [MPIComm._reads(object.__new__(MPIComm), torch.device(name)) for name in ("cpu", "cuda:1", "meta")]
    assert reads == [True, aware, False]


def test_staged_bytes_are_copies():
    part = torch.arange(5, dtype=torch.uint8)
    ((peer, copy),) = base.host_copies([(3, part)], part.device)
    assert peer == 3
    assert torch.equal(copy, part)
    assert copy.data_ptr() != part.data_ptr()
    finish = base.staged(lambda send, recv: lambda: recv[0][1].fill_(7), [], [(3, part)], part.device)
    finish()
    assert part.tolist() == [7] * 5


@pytest.mark.parametrize("folder", ["/usr/lib", "/home folder/müller/.venv/lib"])
@pytest.mark.parametrize("name", ["libmpi.so.40.30.8", "libmpi_abi.so.0"])
def test_the_mpi_library_is_found_wherever_it_lies(folder, name):
    line = "7f31c2a00000-7f31c2a2f000 r-xp 0002f000 fe:00 2105417                    "
    maps = f"{line}{folder}/libmpi4py.so\n{line}{folder}/{name}\n{line}[stack]\n"
    assert requests.library_in(maps) == f"{folder}/{name}"
    assert requests.library_in(f"{line}[heap]\n") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="staging through pinned memory needs a CUDA device")
def test_bytes_of_a_gpu_are_staged_through_pinned_memory():
    part = torch.arange(5, dtype=torch.uint8, device="cuda")
    ((_, copy),) = base.host_copies([(0, part)], part.device)
    assert copy.is_pinned()
    assert copy.tolist() == [0, 1, 2, 3, 4]
    base.staged(lambda send, recv: lambda: recv[0][1].copy_(copy + 1), [], [(0, part)], part.device)()
    assert part.tolist() == [1, 2, 3, 4, 5]


class TestPoll:
    """With a clock that only `sleep` and `sched_yield` move."""

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch):
        self.now, self.naps = 0.0, []

        def pass_time(seconds):
            self.naps.append(seconds)
            self.now += seconds or 1e-5

        fake_time = types.SimpleNamespace(monotonic=lambda: self.now, sleep=pass_time)
        monkeypatch.setattr("dilkit.comm.transports.mpi.requests.time", fake_time)
        monkeypatch.setattr("dilkit.comm.transports.mpi.requests.os", types.SimpleNamespace(sched_yield=lambda: pass_time(0)))

    def test_it_looks_until_nothing_is_left_or_the_time_is_over(self):
        left = iter([2, 1, 0])
        assert poll(lambda: next(left), 1.0)
        assert self.naps == [0, 0]
        self.now = 0.0
        assert not poll(lambda: 1, 0.5)
        assert 0.5 <= self.now < 0.502

    def test_a_long_wait_naps(self):
        poll(lambda: 1, 10.0)
        assert sum(nap > 0 for nap in self.naps) / 10.0 < 1010, "looks per second"
        assert max(self.naps) == 0.001

    def test_no_nap_as_long_as_something_moves(self):
        assert poll(lambda: max(0, 100 - int(self.now / 0.01)), 10.0)
        assert max(self.naps) == 0
