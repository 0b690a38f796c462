from collections.abc import Callable, Sequence

from numpy import float32
from numpy.typing import NDArray
from torch import Tensor

from dilkit.backends.native.backend import GivenTables
from dilkit.backends.native.branches import BranchArrays
from dilkit.bias.form import LoweredBias
from dilkit.op.dropout import Dropout

class EncodedProblem:
    def __init__(
        self,
        sizes: tuple[int, ...],
        dtype: int,
        causal: int,
        once: int,
        scale: float,
        arrays: BranchArrays,
        scores: tuple[float, int, int, bool, tuple[int, int, int]] = ...,
        given: int = ...,
    ) -> None: ...
    @property
    def chunks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def instruction_sets() -> tuple[str, ...]: ...
def is_slow(i: int) -> bool: ...
def built_for() -> tuple[str, ...]: ...
def forward(
    encoded: EncodedProblem,
    isa: str,
    threads: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    starts: Tensor | None = None,
    dropout: Dropout | None = None,
    bias: LoweredBias | None = None,
    given: GivenTables | None = None,
) -> tuple[Tensor, Tensor]: ...
def forward_last(
    encoded: EncodedProblem,
    isa: str,
    threads: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    bias: LoweredBias | None = None,
) -> tuple[Tensor, Tensor]: ...
def backward(
    encoded: EncodedProblem,
    isa: str,
    threads: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    starts: Tensor | None = None,
    dropout: Dropout | None = None,
    bias: LoweredBias | None = None,
    given: GivenTables | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...
def tasks(
    encoded: EncodedProblem, backward: bool, starts: Tensor | None = None
) -> list[tuple[int, int, Sequence[int], Sequence[int], tuple[int, ...]]]: ...
def timed_tasks(isa: str, call: Callable[[], object]) -> list[tuple[int, float, float]]: ...
def exp2(isa: str, x: NDArray[float32], y: NDArray[float32]) -> None: ...
def multiply_add(isa: str, rounds: int) -> int: ...
