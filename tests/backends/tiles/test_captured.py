"""What captured CUDA graphs point to: it lives as long as they do, by stand-ins for torch's graphs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilkit.backends.tiles import captured

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Graph:
    """A graph of torch's."""

    capturing: Graph | None = None

    @classmethod
    def get_currently_capturing_graph(cls) -> Graph | None:
        if cls.capturing is None:
            raise RuntimeError("The current stream is not capturing.")
        return cls.capturing


class Thing:
    """What a graph points to."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that are waited for; torch's graphs are stand-ins."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    monkeypatch.setattr(Graph, "capturing", None)
    captured.let_go()
    found.clear()
    return found


def test_things_live_as_long_as_the_graphs_that_were_captured_with_them(waits: list[Any]) -> None:
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
def test_things_of_graphs_that_torch_does_not_know_are_kept_for_good(
    waits: list[Any], monkeypatch: pytest.MonkeyPatch, graph: Any
) -> None:
    monkeypatch.setattr(captured, "_for_good", {})
    if graph == "no such function":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(Graph, "capturing", graph)
    thing = Thing()
    captured.keep(thing, FIRST)
    assert list(captured._for_good.values()) == [thing]
