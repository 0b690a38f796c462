from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilkit.pattern.lowering import Form

class LastRows:
    def tables(self, lengths: list[int], written: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

def last_rows_of(
    forms: Sequence[Form], group: int, kv_heads: int, strides: tuple[tuple[int, ...], tuple[int, ...]]
) -> LastRows | None: ...
