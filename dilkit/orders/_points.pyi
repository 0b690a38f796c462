from collections.abc import Sequence
from typing import Any

from numpy import uint8
from numpy.typing import NDArray

from dilkit.orders.checks import Index
from dilkit.orders.columns import Place

def instruction_sets() -> tuple[str, ...]: ...
def encode(
    isa: str, turns: NDArray[uint8], start: int, turning: bool, bits: int, count: int, axes: Sequence[Place], code: Place
) -> int: ...
def decode(
    isa: str, turns: NDArray[uint8], start: int, turning: bool, bits: int, count: int, axes: Sequence[Place], code: Place
) -> int: ...
def argsort(codes: NDArray[Any], perm: Index) -> None: ...
