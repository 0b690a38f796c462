"""Objects that captured CUDA graphs point to, kept alive for as long as the graphs may run.

    captured in a graph --keep--> kept --the graph's object ends--> ended --let_go, once its device is idle--> dropped

A graph may be replayed for as long as the `torch.cuda.CUDAGraph` exists that it was captured in; with that object torch lets go
of the memory of the graph's own pool as well. A last replay may still be under way then. Where torch does not say which graph is
being captured, as older versions cannot, things are kept for the life of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_kept: MutableMapping[object, dict[int, object]] = weakref.WeakKeyDictionary()
"""By graph, what it points to, by identity."""
_for_good: dict[int, object] = {}
"""What graphs point to of which nobody knows when they end."""
_ended: list[tuple[torch.device, dict[int, object]]] = []
"""What graphs pointed to that have ended, and where."""


def keep(thing: object, device: torch.device) -> None:
    """Keep `thing` for the graph that the current stream of `device` is captured in."""
    graph = _graph(device)
    if graph is None:
        _for_good[id(thing)] = thing
        return
    things = _kept.get(graph)
    if things is None:
        things = _kept[graph] = {}
        weakref.finalize(graph, _ended.append, (device, things)).atexit = False
    things[id(thing)] = thing


def let_go() -> None:
    """Drop what ended graphs pointed to. Waits for their devices, so nothing may be captured now."""
    import torch

    while _ended:
        device, things = _ended.pop()
        torch.cuda.synchronize(device)
        things.clear()


def _graph(device: torch.device) -> object | None:
    """The object of the graph that is being captured; None where torch does not know it."""
    import torch

    current = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
    if current is None or device.type != "cuda":
        return None
    with torch.cuda.device(device):
        try:
            graph = current()
        except RuntimeError:  # captured by others than torch
            return None
    # Anything else is an object made just now, for a graph that lives in C++: it would end at once.
    return graph if isinstance(graph, torch.cuda.CUDAGraph) else None
