"""Records that are damaged on their way, or of another version; contents of other messages are left to the network."""

import pytest
import torch
from helpers.calls import PATTERN

from dilkit import __version__
from dilkit.comm import CommError, PlanMismatch, ring_dilated_attention, run_threads
from dilkit.comm.agreement import agree_on
from dilkit.comm.transports.records import RECORD_BYTES
from dilkit.comm.transports.threads import ThreadComm

TIMEOUT = 5.0


class Damage:
    def __init__(self, monkeypatch):
        self.at, self.record = -1, b""
        send = ThreadComm._send

        def damaged(comm, peer, message, number, faults):
            if comm.rank == 1 and number == 1:
                assert len(message) == RECORD_BYTES
                message, self.record = message.clone(), message.numpy().tobytes()
                if self.at >= 0:
                    message[self.at] ^= 1 << self.at % 8
            send(comm, peer, message, number, faults)

        monkeypatch.setattr(ThreadComm, "_send", damaged)


def attend(comm):
    rows = torch.ones(1, 16, 4, 8)
    try:
        ring_dilated_attention(rows, rows, rows, PATTERN, comm)
    except CommError as error:
        return error
    return None


def test_every_byte_of_the_arguments(monkeypatch):
    damage = Damage(monkeypatch)
    assert run_threads(2, attend, timeout=TIMEOUT) == [None, None]
    length = len(damage.record.rstrip(b"\0"))
    assert length > 300
    for damage.at in range(length):
        here, _ = run_threads(2, attend, timeout=TIMEOUT)
        assert here is not None, damage.at
        assert "the record of rank 1 was damaged on its way" in str(here)
        assert here.ranks == (1,)
    for damage.at in (length + 1, RECORD_BYTES - 1):  # nobody reads these
        assert run_threads(2, attend, timeout=TIMEOUT) == [None, None]


def test_a_transport_is_not_used_after_a_damaged_record(monkeypatch):
    Damage(monkeypatch).at = 8

    def on_rank(comm):
        if comm.rank == 0:
            with pytest.raises(CommError, match="greeting: the record of rank 1 was damaged on its way"):
                comm.share(b"hello", "greeting")
            with pytest.raises(CommError, match="failed before and cannot be used again"):
                comm.share(b"hello", "greeting")
        else:
            comm.share(b"hello", "greeting")

    run_threads(2, on_rank, timeout=TIMEOUT)


def test_facts_of_a_rank_that_lack_what_may_differ():
    def on_rank(comm):
        facts = {"rows": 3} if comm.rank else {"lines": 3}
        with pytest.raises(PlanMismatch, match="the facts of rank 0 cannot be read; do all ranks run the same version"):
            agree_on(comm, lambda: facts, "a step", ("rows",))

    run_threads(2, on_rank, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("sent", "shown"), [(b"0.1.7", "0.1.7"), (b'{"step": "arguments of', "from before records had versions")]
)
def test_another_version_is_named_on_every_rank(sent, shown):
    def on_rank(comm):
        if comm.rank == 2:
            comm._version = sent
        return attend(comm)

    said = f"arguments of ring_dilated_attention: rank 2 runs dilkit {shown}, the others {__version__}; install the same version"
    for error in run_threads(3, on_rank, timeout=TIMEOUT):
        assert isinstance(error, PlanMismatch)
        assert str(error).startswith(said)
        assert error.ranks == (2,)
