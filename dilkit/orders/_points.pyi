from collections.abc import Sequence
from typing import Any

from numpy import uint8
from numpy.typing import NDArray

from dilkit.orders.checks import Index
from dilkit.orders.point_arrays import ColumnAddress

def instruction_sets() -> tuple[str, ...]: ...
def convert(
    isa: str,
    decoding: bool,
    transitions: NDArray[uint8],
    start: int,
    is_oriented: bool,
    bits: int,
    count: int,
    axes: Sequence[ColumnAddress],
    code: ColumnAddress,
) -> int: ...
def argsort(codes: NDArray[Any], perm: Index) -> None: ...
