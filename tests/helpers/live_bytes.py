"""Peak bytes of the tensors of a computation, counted as they are made."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counter of bytes of operators' results; `peak`: the most at once, without the memory of `given`."""

    def __init__(self, *given: Tensor):
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()).data_ptr() not in self.given:
                self.held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return found

    def now(self) -> int:
        self.held = {place: (held, size) for place, (held, size) in self.held.items() if not held.expired()}
        return sum(size for _, size in self.held.values())

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        with _disable_current_modes():
            yield
