"""A problem as results describe it: all of it but its length and its device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dilkit.problem import Problem


@dataclass(frozen=True, kw_only=True)
class PatternFacts:
    """A pattern in words, and all that it is made of: lists of dilated segments, or `branches` of any kinds."""

    text: str
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    branches: Any = None
    offset: str = "modulo"
    overlap: str = "count"
    heads: Any = None
    head_shard: Any = None
    tail: str = "exact"


@dataclass(frozen=True, kw_only=True)
class ProblemFacts:
    """What was computed. `backward`: whether a call includes the backward pass."""

    pattern: PatternFacts
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    is_causal: bool
    key_padding_mask: bool
    scale: float | None = None
    backward: bool

    @classmethod
    def of(cls, problem: Problem) -> ProblemFacts:
        """The facts of `problem`."""
        names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "is_causal", "key_padding_mask", "scale")
        pattern = PatternFacts(text=str(problem.pattern), **json.loads(problem.pattern.to_json()))
        return cls(pattern=pattern, **{name: getattr(problem, name) for name in names}, backward=problem.requires_grad)

    def text(self, tokens: str = "tokens") -> str:
        """The passes and the sizes, such as "forward, 1 x tokens x 8 heads x 64, float32, causal"."""
        heads = f"{self.heads} heads" + (f" over {self.kv_heads}" if self.kv_heads != self.heads else "")
        flags = f"{', causal' * self.is_causal}{', masked' * self.key_padding_mask}"
        passes = "forward + backward" if self.backward else "forward"
        return f"{passes}, {self.batch} x {tokens} x {heads} x {self.head_dim}, {self.dtype}{flags}"

    def words(self) -> dict[str, str]:
        """Every fact as text."""
        facts = {name: str(value) for name, value in vars(self).items() if value is not None}
        return facts | dict(pattern=self.pattern.text)
