from typing import Any

from numpy import int64
from numpy.typing import NDArray

def expand_runs(rows: NDArray[int64], runs: NDArray[int64], batch: int) -> None: ...
def merge(out: NDArray[Any], lse: NDArray[Any], rows: NDArray[int64], more: NDArray[Any], more_lse: NDArray[Any]) -> None: ...
