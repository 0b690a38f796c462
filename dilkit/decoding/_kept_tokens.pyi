import numpy as np
from numpy.typing import NDArray

from dilkit.pattern import Branch, Pattern
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering import Segments

class KeptTokens:
    branch: Branch
    place: int
    head: int
    head_step: int
    heads: int
    masked: bool

    def before(self, token: int) -> int: ...
    def tokens(self, indices: range) -> range | NDArray[np.int64]: ...
    def seen(self, row: int) -> range: ...
    def needed(self, row: int) -> int: ...

class OfSegments(KeptTokens):
    length: int
    rate: int
    offset: int

class OfBand(KeptTokens):
    def __init__(self, branch: Branch, place: int, heads: range, masked: bool, first: int, back: int, rate: int) -> None: ...

class OfGlobal(KeptTokens):
    def __init__(
        self, branch: Branch, place: int, heads: range, masked: bool, columns: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None: ...

def kept_tokens(pattern: Pattern, given: Heads) -> tuple[tuple[KeptTokens, ...], ...]: ...
def kept_of_segments(form: Segments, group: int, branch: Branch | None = None, place: int = 0) -> tuple[OfSegments, ...]: ...
