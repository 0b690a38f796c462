"""The lifetime of memory that captured CUDA graphs point to."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from dilkit.backends.tiles import counters, kept as captured
from dilkit.backends.tiles.counters import Counters

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Graph:
    capturing: Graph | None = None

    @classmethod
    def get_currently_capturing_graph(cls):
        if cls.capturing is None:
            raise RuntimeError("The current stream is not capturing.")
        return cls.capturing


class Thing:
    """An object that a graph points to."""


@pytest.fixture
def waits(monkeypatch):
    """The devices that are waited for; torch's graphs are substitutes."""
    found = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    monkeypatch.setattr(Graph, "capturing", None)
    captured.let_go()
    found.clear()
    return found


def test_things_live_as_long_as_the_graphs_that_were_captured_with_them(waits):
    Graph.capturing, thing = Graph(), Thing()
    other, ends = Graph(), []
    weakref.finalize(thing, ends.append, "gone")
    captured.keep(thing, FIRST)
    captured.keep(thing, FIRST)
    Graph.capturing, first = other, Graph.capturing
    captured.keep(thing, SECOND)
    Graph.capturing = None
    del thing, first
    gc.collect()
    assert (ends, waits) == ([], []), "a last replay may be under way"
    captured.let_go()
    assert (ends, waits) == ([], [FIRST])
    del other
    gc.collect()
    captured.let_go()
    assert (ends, waits) == (["gone"], [FIRST, SECOND])


@pytest.mark.parametrize("graph", [None, SimpleNamespace(), "no such function"])
def test_things_of_graphs_that_torch_does_not_know_are_kept_for_good(waits, monkeypatch, graph):
    monkeypatch.setattr(captured, "_for_good", {})
    if graph == "no such function":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(Graph, "capturing", graph)
    thing = Thing()
    captured.keep(thing, FIRST)
    assert list(captured._for_good.values()) == [thing]


@pytest.fixture
def numbers(monkeypatch):
    found = {}
    monkeypatch.setattr(counters, "cuda_stream_number", lambda stream: found.get(stream, stream))
    return found


@pytest.fixture
def own(monkeypatch, numbers):
    """Make counters on pretended devices, in CPU memory; the captured graph is unknown."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    monkeypatch.setattr(captured, "keep", lambda thing, device: None)
    return Counters()


def value(address):
    return ctypes.c_int32.from_address(address).value


def test_each_stream_of_each_device_has_one(own):
    streams = [(device, stream) for device in (FIRST, SECOND) for stream in (0, 4096, 8192)]
    found = [own.address(*where, capturing=False) for where in streams]
    assert len(set(found)) == len(streams)
    assert [own.address(*where, capturing=False) for where in streams] == found
    assert {value(address) for address in found} == {0}


def test_a_stream_with_the_handle_of_one_that_was_destroyed_has_its_own(own, numbers):
    """A kernel of the first may still run; streams of threads share a handle."""
    found = [own.address(FIRST, 4096, capturing=False)]
    numbers[4096] = 5
    found += [own.address(FIRST, 4096, capturing=False) for _ in range(2)]
    assert found[0] != found[1] == found[2]


def test_the_stream_that_is_always_there_needs_no_number(own, numbers):
    default = own.address(FIRST, 0, capturing=False)
    numbers[4096] = 0
    assert own.address(FIRST, 4096, capturing=False) != default == own.address(FIRST, 0, capturing=False)


def test_streams_without_end_are_forgotten_but_their_counters_never_used_again(own, monkeypatch):
    monkeypatch.setattr(counters, "PAGE", 8)
    monkeypatch.setattr(counters, "MOST_STREAMS", 3)
    found = [own.address(FIRST, stream, capturing=False) for stream in (*range(1, 20), 1, 2)]
    assert len(set(found)) == len(found)
    assert len(own._of_stream) <= 3
    torch.zeros(8, dtype=torch.int64).fill_(7)
    assert {value(address) for address in found} == {0}


def test_threads_that_share_a_stream_share_its_counter(own):
    found = []
    threads = [threading.Thread(target=lambda: found.append(own.address(FIRST, 4096, capturing=False))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_each_captured_launch_has_one_and_launches_make_room_for_more(own, monkeypatch):
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
