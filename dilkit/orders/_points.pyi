from collections.abc import Sequence
from typing import Any

from numpy import uint8
from numpy.typing import NDArray

from dilkit.orders.checks import Index
from dilkit.orders.point_arrays import ColumnAddress

def instruction_sets() -> tuple[str, ...]: ...
def built_for() -> tuple[str, ...]: ...
def encode(
    isa: str,
    transitions: NDArray[uint8],
    start: int,
    is_oriented: bool,
    bits: int,
    count: int,
    axes: Sequence[ColumnAddress],
    code: ColumnAddress,
) -> int: ...
def decode(
    isa: str,
    transitions: NDArray[uint8],
    start: int,
    is_oriented: bool,
    bits: int,
    count: int,
    axes: Sequence[ColumnAddress],
    code: ColumnAddress,
) -> int: ...
def argsort(codes: NDArray[Any], perm: Index) -> None: ...
