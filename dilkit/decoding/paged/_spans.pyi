import numpy as np
from numpy.typing import NDArray

from dilkit.decoding.paged._stream import Stream

class SpanTables:
    spans: NDArray[np.int64]
    writes: NDArray[np.int64]
    pages: NDArray[np.int64]

    def __init__(self, page: int, once: bool) -> None: ...
    def add(self, streams: tuple[Stream, ...], token: int, row: int, count: int) -> list[tuple[int, Stream, int]]: ...
    def place(self, span: int, positions: int) -> None: ...
    def leave_out(self, span: int, unseen: int) -> None: ...
