"""`Documents`: a sequence of several texts, each by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

from dilkit.checks import integer, shown
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Runs
from dilkit.pattern.lowering.tables import RunTable
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Documents(Branch):
    """Documents of `lengths` tokens one after the other: a token sees those of its own document.

        i sees j  if  document(i) == document(j)

    The same as dense attention of packed sequences (`dilated_attention_varlen`), as a branch beside others. A sequence may have
    fewer tokens than all documents together, of which it is the first ones, but not more. `heads` is the range (start, stop) of
    query heads that the branch serves; None means all of them. Raises `PatternError` or TypeError.

        >>> from dilkit import Documents, Pattern
        >>> Pattern.of(Documents([1, 2])).count(3, 1)[0].tolist()
        [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    """

    kind: ClassVar[str] = "documents"

    lengths: tuple[int, ...]
    heads: tuple[int, int] | None = None

    def __init__(self, lengths: Iterable[int], heads: range | tuple[int, int] | None = None) -> None:
        if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Iterable):
            raise TypeError(f"lengths={shown(lengths)} must be a sequence of integers, the tokens of each document")
        object.__setattr__(self, "lengths", tuple(integer(f"lengths[{i}]", length) for i, length in enumerate(lengths)))
        object.__setattr__(self, "heads", heads)
        if not self.lengths or min(self.lengths) < 1 or self.max_seq > WHOLE_SEQUENCE:
            raise PatternError(f"lengths={shown(self.lengths)}: one document at least, each of one token at least, is needed")
        self._settle()

    @property
    def max_seq(self) -> int:
        return sum(self.lengths)

    def check_seq(self, seq: int) -> None:
        if seq > self.max_seq:
            raise PatternError(f"seq={seq}: the documents have {self.max_seq} tokens in all; name one for those after them")

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        ends = torch.tensor([*accumulate(self.lengths)], device=rows.device)
        of_rows, of_keys = (torch.searchsorted(ends, x.contiguous(), right=True) for x in (rows, keys))
        return (of_rows[:, None] == of_keys)[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        ends = [min(end, seq) for end in accumulate(self.lengths, initial=0)]
        sizes = [stop - start for start, stop in pairwise(ends)]
        return len(self.served(heads)) * sum(size * (size + 1) // 2 if is_causal else size * size for size in sizes)

    def forms(self, heads: Heads, seq: int) -> Iterable[Runs]:
        import numpy as np

        ends = np.array([min(end, UNBOUNDED) for end in accumulate(self.lengths, initial=0)], np.int64)
        table = RunTable(ends[1:], np.ones(len(self.lengths), np.int64), np.stack((ends[:-1], ends[1:]), axis=1))
        return [Runs(heads=self.range_served(heads), queries=table, keys=table)]

    def __str__(self) -> str:
        count = len(self.lengths)
        which = f"{count:,} documents, {self.max_seq:,} tokens in all" if count > 1 else f"a document of {self.max_seq:,} tokens"
        return f"{which}{self.heads_text()}"
