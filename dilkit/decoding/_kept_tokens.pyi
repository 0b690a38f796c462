import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dilkit.pattern import Branch, Pattern
from dilkit.pattern.heads import Heads

class KeptTokens:
    branch: Branch
    place: int
    head: int
    head_step: int
    heads: int
    total: int
    masked: bool
    by_pairs: bool
    unserved: Tensor | None
    listed: Tensor | None

    def before(self, token: int) -> int: ...
    def tokens(self, indices: range) -> range | NDArray[np.int64]: ...
    def seen(self, row: int) -> range: ...
    def needed(self, row: int) -> int: ...
    def needed_after_crop(self, row: int) -> int: ...

def kept_tokens(pattern: Pattern, given: Heads) -> tuple[KeptTokens, ...]: ...
