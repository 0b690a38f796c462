"""Counters of launches: no two launches that may be under way at once have the same."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from dilkit.backends.tiles import counters
from dilkit.backends.tiles.counters import PER_THREAD, Counters

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Counters:
    """Counters on devices that are not there, in memory of the CPU."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    return Counters()


def value(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def test_each_stream_of_each_device_has_one(own: Counters) -> None:
    streams = [(device, stream) for device in (FIRST, SECOND) for stream in (0, 4096, 8192)]
    found = [own.address(*where, capturing=False) for where in streams]
    assert len(set(found)) == len(streams)
    assert [own.address(*where, capturing=False) for where in streams] == found
    assert {value(address) for address in found} == {0}


def test_the_stream_of_each_thread_has_one(own: Counters) -> None:
    def ask() -> None:
        found.append(own.address(FIRST, PER_THREAD, capturing=False))

    found: list[int] = []
    ask()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(set(found)) == 2


def test_threads_that_share_a_stream_share_its_counter(own: Counters) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(own.address(FIRST, 4096, capturing=False))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_each_captured_launch_has_one_and_launches_make_room_for_more(own: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "PAGE", 8)
    with pytest.raises(RuntimeError, match=r"no counter is left on cuda:0 .* make the same call once before"):
        own.address(FIRST, 0, capturing=True)
    usual = own.address(FIRST, 0, capturing=False)
    found = [own.address(FIRST, 0, capturing=True) for _ in range(7)]
    with pytest.raises(RuntimeError, match="no counter is left"):
        own.address(FIRST, 0, capturing=True)
    assert own.address(FIRST, 0, capturing=False) == usual
    found += [own.address(FIRST, 0, capturing=True) for _ in range(8)]
    assert len({usual, *found}) == 16
    assert {value(address) for address in found} == {0}
