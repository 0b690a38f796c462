from numpy import int32, int64
from numpy.typing import NDArray

def tiles(
    branches: NDArray[int32],
    offsets: NDArray[int32],
    heads: NDArray[int32],
    heads_at_once: int,
    heads_per_kv_head: int,
    seq: int,
    steps: NDArray[int64],
    tile_rows: int,
    every_row: bool,
) -> tuple[NDArray[int32], NDArray[int64]]: ...
