from numpy import float32
from numpy.typing import NDArray

from dilkit.backends.native.branches import BranchArrays

class EncodedProblem:
    def __init__(
        self,
        sizes: tuple[int, ...],
        dtype: int,
        causal: int,
        once: int,
        scale: float,
        arrays: BranchArrays,
        scores: tuple[float, int, int, bool, tuple[int, int, int]],
        given: int,
        is_square: int = 1,
    ) -> None: ...
    @property
    def chunks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def instruction_sets() -> tuple[str, ...]: ...
def is_slow(i: int) -> bool: ...
def built_for() -> tuple[str, ...]: ...
def exp2(isa: str, x: NDArray[float32], y: NDArray[float32]) -> None: ...
def multiply_add(isa: str, rounds: int) -> int: ...
