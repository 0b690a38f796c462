"""`MPIComm`: the ranks of an MPI job as a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dilkit.comm.transports.base import DEFAULT_TIMEOUT, Comm, PeerBytes
from dilkit.comm.transports.errors import CommTimeout
from dilkit.comm.transports.mpi.job_end import end_job, end_job_on_failure, leave_together
from dilkit.comm.transports.mpi.library import cuda_aware, mpi
from dilkit.comm.transports.mpi.requests import MPIExchange, poll
from dilkit.comm.transports.rank_errors import print_error
from dilkit.comm.transports.staging import staged


class MPIComm(Comm):
    """The ranks of an mpi4py intracommunicator, by default of `MPI.COMM_WORLD`. `timeout` is in seconds.

    All ranks of the communicator make theirs: it is duplicated. It works under `mpirun` with plain `python`: from then on an
    exception that nobody catches is printed, marked with the rank in `MPI.COMM_WORLD`, and ends the job; so does a rank that
    ends, by `sys.exit` too, while others send to it. CUDA tensors go through host memory unless the MPI library is CUDA-aware.

    Raises ImportError without mpi4py or an MPI library, TypeError for other communicators, `CommTimeout` if ranks do not join.

        >>> import subprocess, sys
        >>> program = "from dilkit.comm import MPIComm; comm = MPIComm(timeout=60.0); print(f'rank {comm.rank} of {comm.size}')"
        >>> print(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
        rank 0 of 1

    Without `mpirun`, as here, the process is a job of one rank; `mpirun -n 4 python -c "$program"` prints four lines.
    """

    def __init__(self, communicator: Any = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        parent = mpi().COMM_WORLD if communicator is None else communicator
        if not isinstance(parent, mpi().Intracomm) or parent == mpi().COMM_NULL:
            raise TypeError(
                f"communicator={communicator!r} is no intracommunicator of mpi4py that this rank is in; give MPI.COMM_WORLD, "
                "what Split returned for this rank, or None"
            )
        super().__init__(parent.Get_rank(), parent.Get_size(), timeout)
        if self.size > 1:
            end_job_on_failure()
        self._comm = self._duplicate(parent)
        if self.size > 1:
            leave_together(self._comm, timeout)

    def abort(self, why: BaseException) -> None:
        """Show `why`, marked with this rank, and end all processes of the job, this one too."""
        print_error(why, mpi().COMM_WORLD.Get_rank())
        end_job()

    def _duplicate(self, given: Any) -> Any:
        duplicate, request = given.Idup()
        if not poll(lambda: not request.Test(), self.timeout):
            raise CommTimeout(
                f"not all of the {self.size} ranks have made their MPIComm within {self.timeout:g} s", step="MPIComm"
            )
        duplicate.Set_errhandler(mpi().ERRORS_RETURN)
        return duplicate

    def _post(self, send: PeerBytes, recv: PeerBytes, device: torch.device, number: int, step: str) -> Callable[[], None]:
        def post(send: PeerBytes, recv: PeerBytes) -> Callable[[], None]:
            exchange = MPIExchange(self._comm, number, step)
            exchange.post(send, recv)
            return lambda: exchange.wait(self.timeout)

        if not self._reads(device):
            return staged(post, send, recv, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # MPI knows nothing of streams
        return post(send, recv)

    def _reads(self, device: torch.device) -> bool:
        return device.type == "cpu" or (device.type == "cuda" and cuda_aware())
