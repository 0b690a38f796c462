"""Tables of a problem on a device: made once, and found by all later calls, captured in CUDA graphs or not.

    captured in a graph --keep--> kept --the graph's object ends--> ended --let_go, once its device is idle--> dropped

A graph may be replayed for as long as its `torch.cuda.CUDAGraph` exists; a last replay may still be under way when that ends.
Where torch does not say which graph is being captured, as older versions cannot, things are kept for the life of the process.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from dilkit import environment, plan
from dilkit.device import capturing
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_kept: MutableMapping[object, dict[int, object]] = weakref.WeakKeyDictionary()
"""Objects that a graph points to, by graph and identity."""
_for_good: dict[int, object] = {}
"""Objects of graphs whose end is unknown."""
_ended: list[tuple[torch.device, dict[int, object]]] = []
"""Objects of graphs that have ended, with their device."""


class Kept(ABC):
    """Tensors of one device that kernels read."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[Tensor]: ...

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    def keep_while_used(self) -> None:
        """Keep the memory until the kernels that are now queued have ended, even if the cache drops it before."""
        import torch

        for x in self.tensors:
            if x.is_cuda:
                x.record_stream(torch.cuda.current_stream(x.device))


KeptT = TypeVar("KeptT", bound=Kept)


def kept(key: tuple[object, ...], make: Callable[[], KeptT], problem: Problem, device: torch.device) -> KeptT:
    """Return the tables of `problem` on `device`, made by `make` at the first call with this `key`.

    `key` holds all that the tables depend on, but for the device. Raises RuntimeError where they had to be made while a CUDA
    graph is captured, for then nothing can be copied.
    """

    def made() -> KeptT:
        if capturing(device):
            raise RuntimeError(
                f"the tiles of {problem} are not on {device}, and cannot be copied there while a CUDA graph is captured: make "
                f"the same call once before (if you did, {environment.CACHE_BYTES.name} is too small to keep them)"
            )
        let_go()
        return make()

    prepared = plan.cached((*key, device), made)
    if capturing(device):
        keep(prepared, device)
    return prepared


def expect_room(problem: Problem, need: int, entries: int) -> None:
    """Warn once if the cache cannot keep the `need` bytes, in so many entries, that the calls of `problem` need on the device."""
    limit = environment.cache_bytes()
    if limit and need + entries * plan.ENTRY_BYTES > limit:
        _warn_of_copies(f"seq={problem.seq}, heads={problem.heads}", need, limit)


@lru_cache(maxsize=64)
def _warn_of_copies(what: str, need: int, limit: int) -> None:
    name, enough = environment.CACHE_BYTES.name, 2 ** (2 * need + 2 * plan.ENTRY_BYTES).bit_length()
    text = (
        f"the tiles of {what} take {need:,} bytes on the device; with {name}={limit} they are not kept, but made and copied anew "
        f"by each call: set {name}={enough}"
    )
    warnings.warn(text, stacklevel=2)


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
    """Return the CUDA graph that is being captured; None if torch cannot tell."""
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
