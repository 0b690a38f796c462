"""Dilated attention over ranks: transports, and what is sent through them."""

from dilkit.comm.threads import Fault, run_threads
from dilkit.comm.transport import Comm, CommError, CommTimeout, PeerLost, Pending, PlanMismatch

__all__ = ["Comm", "CommError", "CommTimeout", "Fault", "PeerLost", "Pending", "PlanMismatch", "run_threads"]
