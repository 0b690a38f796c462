"""What a call of a `PagedCache` computes: the rows of each sequence, and what is the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit.backend import Backend
from dilkit.bias.base import Bias
from dilkit.checks import integers, real, shown
from dilkit.decoding.gradients import check_no_gradient
from dilkit.decoding.layout import Layout
from dilkit.decoding.paged.sequence import SequenceRows
from dilkit.op.arguments import check_inputs
from dilkit.op.scores import Scores, scores_of
from dilkit.packed.attention import batch_of_one
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select

Rows = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, `(rows, heads, head_dim)`."""


@dataclass(frozen=True)
class Piece:
    """The rows of one sequence in a call; `is_prompt`: they see none of those before, and are worth a kernel of their own."""

    sequence: SequenceRows
    rows: slice
    is_prompt: bool

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self.rows.stop - self.rows.start)

    @property
    def pages(self) -> int:
        """Pages that must be free for it."""
        return self.sequence.pages_for_prompt(self.count) if self.is_prompt else self.sequence.pages_for(self.count)


class Call(NamedTuple):
    """Facts that all rows of a call share. `backend`, `problem`: of its steps; `asked`: the backends of its prompts."""

    backend: Backend
    problem: Problem
    scores: Scores
    sink: Tensor | None
    asked: str | Sequence[str] | None

    @classmethod
    def of(cls, rows: Rows, pattern: Pattern, layout: Layout, most: int, options: dict[str, Any]) -> Call:
        """Of sequences that have `most` tokens at most. Raises as `PagedCache.attend` does."""
        bias, scale, sink = options["bias"], options["scale"], options["sink"]
        if isinstance(bias, Bias) and bias.by_row:
            raise ValueError(
                f"bias={shown(bias)} goes by coordinates of rows, which a PagedCache does not keep; use a DilatedCache a sequence"
            )
        scores = scores_of(bias, options["softcap"], rows[0][None], pattern, layout.kv_heads, most)
        check_no_gradient(*rows, sink, scores.tensors[0])
        factor = layout.head_dim**-0.5 if scale is None else real("scale", scale)
        stored = str(layout.stored).removeprefix("torch.")
        facts: dict[str, Any] = dict(scale=factor, softcap=scores.softcap, bias=scores.form, stored=stored)
        problem = Problem.of(rows[0][None, :1], rows[1][None, :1], pattern, is_causal=True, **facts)
        return cls(select(problem, requested_backends(options["backend"])), problem, scores, sink, options["backend"])


def check_rows(rows: Rows, pattern: Pattern, layout: Layout, sink: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the rows are those of a cache with this layout."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError("a cache cannot keep the rows of vmap and other transforms")
    query, key, value = (batch_of_one(name, x) for name, x in zip(("query", "key", "value"), rows, strict=True))
    check_inputs(query, key, value, pattern, sink=sink)
    for name, x, heads in (("query", query, layout.heads), ("key", key, layout.kv_heads), ("value", value, layout.kv_heads)):
        if (*x.shape[2:], x.dtype, x.device) != (heads, layout.head_dim, layout.dtype, layout.device):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape[1:])} on {x.device}, but the cache is of {layout.dtype} (rows, {heads}, "
                f"{layout.head_dim}) on {layout.device}; it needs another cache"
            )


def ends_of(counts: Sequence[int] | None, sequences: int, rows: int) -> list[int]:
    """Where the rows of each sequence end. Raises TypeError or ValueError unless `counts` are those of so many `rows`."""
    own = [1] * sequences if counts is None else integers("counts", counts, at_least=0)
    if len(own) != sequences or sum(own) != rows:
        raise ValueError(
            f"counts={shown(own)} of {sequences} sequences are {sum(own)} rows, and query has {rows}; a count for each sequence "
            "is needed, and as many rows as they say"
        )
    return list(accumulate(own))
