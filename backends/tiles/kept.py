"""Tables of a problem on a device: made once, and found by all later calls, captured in CUDA graphs or not."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from dilkit import environment, plan
from dilkit.backends.tiles import captured
from dilkit.device import capturing
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Kept(ABC):
    """Tensors of one device that kernels read."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """All of them."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
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

    `key` holds all that the tables depend on, but for the device. The first call waits until they are made. While a CUDA graph is
    captured nothing can be copied: then raises RuntimeError for tables that are not there.
    """
    prepared = plan.cached((*key, device), partial(_made, make, problem, device))
    if capturing(device):
        captured.keep(prepared, device)
    return prepared


def _made(make: Callable[[], KeptT], problem: Problem, device: torch.device) -> KeptT:
    if capturing(device):
        raise RuntimeError(
            f"the tiles of {problem} are not on {device}, and cannot be copied there while a CUDA graph is captured: make the "
            f"same call once before (if you did, {environment.CACHE_BYTES.name} is too small to keep them)"
        )
    captured.let_go()
    return make()


def expect_room(problem: Problem, need: int, entries: int) -> None:
    """Warn once if the cache cannot keep the `need` bytes, in so many entries, that the calls of `problem` need on the device."""
    limit = environment.cache_bytes()
    if limit and need + entries * plan.ENTRY_BYTES > limit:
        _warn_of_copies(f"seq={problem.seq}, heads={problem.heads}", need, limit)


@lru_cache(maxsize=64)
def _warn_of_copies(what: str, need: int, limit: int) -> None:
    """Say once for each kind of call that its tables are made anew each time, and what to do."""
    name, enough = environment.CACHE_BYTES.name, 2 ** (2 * need + 2 * plan.ENTRY_BYTES).bit_length()
    text = (
        f"the tiles of {what} take {need:,} bytes on the device; with {name}={limit} they are not kept, but made and copied anew "
        f"by each call: set {name}={enough}"
    )
    warnings.warn(text, stacklevel=2)
