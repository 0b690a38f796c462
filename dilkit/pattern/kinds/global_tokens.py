"""`GlobalTokens`: tokens that all tokens see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dilkit.checks import integer, one_of
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError, positive
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Global
from dilkit.pattern.runs import UNBOUNDED, Positions

if TYPE_CHECKING:
    from torch import Tensor

DIRECTIONS = ("both", "read")

MOST_POSITIONS = 2**20
"""Positions that are listed, at most: they are a part of every call."""


@dataclass(frozen=True)
class GlobalTokens(Branch):
    """Some tokens are seen by all and, with `direction="both"`, see all.

        "both": i sees j  if  i or j is a global token        "read": i sees j  if  j is one

    - `tokens`: how many there are, the first ones of the sequence, or their positions in it. A position that a call's sequence
      does not have is refused, but under causality, in caches, and in the shorter ones of packed sequences. With a number, all
      tokens of a shorter sequence are global.
    - `direction`: "both" is Longformer's global attention (arXiv 2004.05150), "read" the attention sinks of StreamingLLM
      (arXiv 2309.17453). Under causality no query sees a global token after itself.
    - `heads`: the query heads (start, stop) that it serves; None means all.

    A pair of two global tokens counts once. Positions are kept in ascending order, and `[0, 1, 2]` is the same as 3. Raises
    `PatternError` for positions that are negative or there twice, and TypeError for what are no integers.

        >>> from dilkit import GlobalTokens, Pattern
        >>> Pattern.of(GlobalTokens([2])).count(4, 1)[0].tolist()
        [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0]]
        >>> Pattern.of(GlobalTokens(1, direction="read")).count(4, 1, is_causal=True)[0, 3].tolist()
        [1, 0, 0, 0]
    """

    kind: ClassVar[str] = "global_tokens"

    tokens: int | tuple[int, ...]
    direction: str = "both"
    heads: tuple[int, int] | None = None

    def __init__(
        self, tokens: int | Iterable[int], direction: str = "both", heads: range | tuple[int, int] | None = None
    ) -> None:
        one_of("direction", direction, DIRECTIONS, PatternError)
        self._set(tokens=_checked(tokens), direction=direction, heads=heads)
        self._settle()

    @property
    def positions(self) -> range | tuple[int, ...]:
        """The positions of the global tokens, in ascending order."""
        return range(self.tokens) if isinstance(self.tokens, int) else self.tokens

    def check_tokens(self, seq: int) -> None:
        if not isinstance(self.tokens, int) and 0 < seq <= self.tokens[-1]:
            way = f"positions from 0 to {seq - 1} are needed, or is_causal=True"
            raise PatternError(f"seq={seq}: tokens has position {self.tokens[-1]}; {way}")

    def of_tokens(self, seq: int) -> GlobalTokens | None:
        if isinstance(self.tokens, int):
            return self
        tokens = tuple(token for token in self.tokens if token < seq)
        return replace(self, tokens=tokens) if tokens else None

    def count(self, seq: int) -> int:
        """Count the global tokens of a sequence of `seq` tokens."""
        return min(self.tokens, seq) if isinstance(self.tokens, int) else sum(token < seq for token in self.tokens)

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        are_global = self._among(keys)
        if self.direction == "read":
            return are_global.expand(1, len(rows), len(keys))
        return (self._among(rows)[:, None] | are_global)[None]

    def _among(self, positions: Tensor) -> Tensor:
        import torch

        if isinstance(self.tokens, int):
            return positions < self.tokens
        return torch.isin(positions, torch.tensor(self.tokens, device=positions.device))

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        count = self.count(seq)
        if self.direction == "both":  # under causality, of each token that is global those before it, those after it, and itself
            pairs = count * (seq + 1) - count * (count + 1) // 2 if is_causal else count * (2 * seq - count)
        elif isinstance(self.tokens, int) or not is_causal:
            pairs = count * seq - (count * (count - 1) // 2 if is_causal else 0)
        else:
            pairs = sum(seq - token for token in self.tokens if token < seq)
        return len(self.served(heads)) * pairs

    def forms(self, heads: Heads, seq: int) -> Iterable[Global]:
        tokens = self.runs()
        return [Global(heads=self.range_served(heads), rows=tokens if self.direction == "both" else tokens[:0], columns=tokens)]

    def runs(self) -> Positions:
        """Return the global tokens as runs of positions `(n, 2)`, start and stop."""
        if isinstance(self.tokens, int):
            return np.array([[0, min(self.tokens, UNBOUNDED - 1)]])
        tokens = np.array(self.positions, np.int64)
        gaps = np.flatnonzero(np.diff(tokens) > 1)
        return np.stack((tokens[np.append(0, gaps + 1)], tokens[np.append(gaps, len(tokens) - 1)] + 1), axis=1)

    def __str__(self) -> str:
        what = "seen by all, and seeing all" if self.direction == "both" else "seen by all"
        if isinstance(self.tokens, int):
            which = "the first token" if self.tokens == 1 else f"the first {self.tokens:,} tokens"
        else:
            shown = ", ".join(map(str, self.tokens[:8])) + (", ..." if len(self.tokens) > 8 else "")
            which = f"token{'s' if len(self.tokens) > 1 else ''} {shown}"
        return f"{which}, {what}{self.heads_text()}"


def _checked(tokens: Any) -> int | tuple[int, ...]:
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable) or getattr(tokens, "ndim", 1) == 0:
        return positive("tokens", tokens, ", or a list of positions")
    listed = list(islice(tokens, MOST_POSITIONS + 1))
    if len(listed) > MOST_POSITIONS:
        raise PatternError(f"tokens has more than {MOST_POSITIONS:,} positions; give fewer, or the number of the first ones")
    positions = sorted(integer(f"tokens[{i}]", token) for i, token in enumerate(listed))
    if not positions:
        raise PatternError("tokens is empty; give the positions of at least one global token, or their number")
    if positions[0] < 0 or positions[-1] >= WHOLE_SEQUENCE:
        bad = positions[0] if positions[0] < 0 else positions[-1]
        raise PatternError(f"tokens has position {bad}; positions are from 0 to 2**63 - 2, counted from the sequence's start")
    if len(set(positions)) < len(positions):
        twice = next(a for a, b in pairwise(positions) if a == b)
        raise PatternError(f"tokens has position {twice} twice; a token is global or not, give each position once")
    return len(positions) if positions[-1] == len(positions) - 1 else tuple(positions)
