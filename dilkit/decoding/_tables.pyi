from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dilkit.decoding._kept_tokens import KeptTokens
from dilkit.pattern.lowering import Form

class Slots:
    rows: Tensor
    count: int
    latest: int

    def __init__(
        self,
        kept: tuple[KeptTokens, ...] = (),
        unseen: tuple[Tensor | None, ...] = (),
        length: int = 0,
        most: int = 0,
        places: Tensor | None = None,
    ) -> None: ...
    def lay_out(self, rows: Tensor) -> None: ...

class StepTables:
    spans: NDArray[np.int64]
    writes: NDArray[np.int64]
    positions: tuple[Tensor, ...]
    unseen: tuple[Tensor, ...]

    def __init__(self, stores: int) -> None: ...
    def begin(self) -> None: ...
    def go_on(self, stores: list[Slots], number: int, stop: int, seen: int) -> int: ...
    def add(self, number: int, slots: Slots, seen: int) -> bool: ...
    def see_part(
        self, number: int, stored: Tensor, heads: slice, query: int, tokens: range | Tensor, unseen: Tensor | None
    ) -> None: ...

class LastRows:
    def tables(self, lengths: list[int], written: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

def last_rows_of(
    forms: Sequence[Form], group: int, kv_heads: int, strides: tuple[tuple[int, ...], tuple[int, ...]]
) -> LastRows | None: ...
