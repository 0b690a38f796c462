from numpy import int64
from numpy.typing import NDArray

from dilkit.plan import Index

def fill_segments(
    rows: Index, pointers: Index, offsets: NDArray[int64], seq: int, segment_length: int, dilation_rate: int
) -> None: ...
