import numpy as np
from numpy.typing import NDArray
from torch import Tensor

class Lines:
    def __init__(self, rows: Tensor, number: int, heads: slice, stored: slice, every: int = 1, apart: int = 1) -> None: ...

class StepTables:
    spans: NDArray[np.int64]
    writes: NDArray[np.int64]
    positions: tuple[Tensor, ...]
    unseen: tuple[Tensor, ...]

    def __init__(self, stores: int) -> None: ...
    def begin(self) -> None: ...
    def write(self, number: int, lines: Lines, slot: int) -> None: ...
    def see(self, number: int, lines: Lines, seen: int, query: int, token: int, slot: int = 0, arc: int = 0) -> None: ...
    def see_part(
        self,
        number: int,
        stored: Tensor,
        heads: slice,
        query: int,
        tokens: range | Tensor,
        unseen: Tensor | None,
    ) -> None: ...
    def place(self, number: int, positions: Tensor) -> None: ...
    def leave_out(self, number: int, unseen: Tensor) -> None: ...
