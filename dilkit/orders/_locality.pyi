from numpy import int64
from numpy.typing import NDArray

def nearest_kept(
    cells: NDArray[int64],
    starts: NDArray[int64],
    places: NDArray[int64],
    lows: NDArray[int64],
    sizes: NDArray[int64],
    rate: int,
    offset: int,
) -> tuple[float, float, int]: ...
def active_blocks(
    cells: NDArray[int64], starts: NDArray[int64], block_of: NDArray[int64], reach: NDArray[int64], blocks: int
) -> int: ...
