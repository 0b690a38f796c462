"""The pool of pages, and attention of packed rows over it: checks of a call, and prompts as packed sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import real, shown
from dilkit.decoding._streams import PagedStream, pages_for
from dilkit.decoding.layout import Layout, check_no_gradient, decoded, encoded, name_of
from dilkit.decoding.protocol import DecodingBackend, decoding_backend
from dilkit.decoding.sequence_rows import SequenceRows
from dilkit.inputs import Inputs
from dilkit.op.arguments import call_of, check_inputs
from dilkit.op.boundary import lse_dtype
from dilkit.op.operators import attend
from dilkit.op.scores import Scores, scores_of
from dilkit.packed.attention import batch_of_one
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select


class PoolFullError(ValueError):
    """ValueError of a call that needs more pages than are free; nothing has been changed.

    Example:

        >>> import torch
        >>> from dilkit import PagedCache, Pattern, PoolFullError
        >>> cache = PagedCache(Pattern.dense(), heads=1, kv_heads=1, head_dim=4, nbytes=4096)  # 8 pages of 16 tokens
        >>> rows = torch.zeros(3, 129, 1, 4).unbind()
        >>> try:
        ...     cache.attend(*rows, [cache.add()], [129])
        ... except PoolFullError as error:
        ...     print(error)
        9 pages are needed and 8 of 8 are free (4096 bytes in all); drop sequences, or make a PagedCache of more bytes (nbytes=)
    """


class PagePool:
    """Pages of keys and values, `rows` `(2, pages, numbers)`; each is free, or held by streams that began as one."""

    def __init__(self, pages: int, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = numbers
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            self.rows = torch.zeros(2, pages, numbers, dtype=dtype, device=device)
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def pages(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def check_free(self, needed: int) -> None:
        if needed > self.free:
            raise PoolFullError(
                f"{needed} pages are needed and {self.free} of {self.pages} are free ({self.nbytes} bytes in all); drop "
                "sequences, or make a PagedCache of more bytes (nbytes=)"
            )

    def take(self) -> int:
        self.check_free(1)
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from these pages; without any they are free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def own(self, page: int) -> int:
        copy = self.take()
        self.rows[:, copy] = self.rows[:, page]
        self.release((page,))
        return copy


class PagedRows(SequenceRows[PagedStream]):
    """A sequence in pages, which it may share with others."""

    def pages_for(self, count: int) -> int:
        """Count the pages that must be free for `count` rows more, one after the other."""
        return pages_for(self.streams, self.seen + count)

    def pages_for_prompt(self, count: int) -> int:
        """Count those for `append_prompt`, without pages that are given back before."""
        total = 0
        for stream, indices, begins in self.prompt_rows(count):
            if not begins:
                total += pages_for((stream,), self.seen + count)
            elif indices:
                total += -(-indices.stop // stream.room) - indices.start // stream.room
        return total

    def fork(self) -> PagedRows:
        return PagedRows([stream.fork() for stream in self.streams], self.rollback, self.seen, self.longest)


Rows = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, `(rows, heads, head_dim)`."""


class PackedCall(NamedTuple):
    """Options that all rows of a call share. `backend`, `problem`: of its step; `asked`: the backends of its prompts."""

    backend: DecodingBackend
    problem: Problem
    scores: Scores
    sink: Tensor | None
    asked: str | Sequence[str] | None


def prepare_call(
    rows: Rows,
    pattern: Pattern,
    layout: Layout,
    most: int,
    *,
    sink: Tensor | None,
    scale: float | None,
    bias: Bias | None,
    softcap: float | None,
    backend: str | Sequence[str] | None,
) -> PackedCall:
    """Check the options of a call whose sequences have `most` tokens at most. Raises as `PagedCache.attend` does."""
    if isinstance(bias, Bias) and bias.by_row:
        raise ValueError(
            f"bias={shown(bias)} goes by coordinates of rows, which a PagedCache does not keep; use a DilatedCache a sequence"
        )
    scores = scores_of(bias, softcap, rows[0][None], pattern, layout.kv_heads, most)
    check_no_gradient(*rows, sink, scores.tensors[0])
    factor = layout.head_dim**-0.5 if scale is None else real("scale", scale)
    facts: dict[str, Any] = dict(scale=factor, softcap=scores.softcap, bias=scores.form, stored=name_of(layout.stored))
    problem = Problem.of(rows[0][None, :1], rows[1][None, :1], pattern, is_causal=True, **facts)
    return PackedCall(decoding_backend(select(problem, requested_backends(backend))), problem, scores, sink, backend)


def check_rows(rows: Rows, pattern: Pattern, layout: Layout, sink: Tensor | None) -> None:
    if torch._C._are_functorch_transforms_active():
        raise ValueError("a cache cannot keep the rows of vmap and other transforms")
    query, key, value = (batch_of_one(name, x) for name, x in zip(("query", "key", "value"), rows, strict=True))
    check_inputs(Inputs(query, key, value, sink=sink), pattern)
    for name, x, heads in (("query", query, layout.heads), ("key", key, layout.kv_heads), ("value", value, layout.kv_heads)):
        if (*x.shape[2:], x.dtype, x.device) != (heads, layout.head_dim, layout.dtype, layout.device):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape[1:])} on {x.device}, but the cache is of {layout.dtype} (rows, {heads}, "
                f"{layout.head_dim}) on {layout.device}; it needs another cache"
            )


def attend_prompts(
    prompts: Sequence[tuple[slice, int]], rows: Rows, out: Tensor, pattern: Pattern, layout: Layout, call: PackedCall
) -> None:
    """Write into `out` the attention of prompts, which see no rows before: rows of `rows`, and the token of the first of them."""
    query, key, value = (torch.cat([x[part] for part, _ in prompts])[None] for x in rows)
    if layout.stored != layout.dtype:
        wide = lse_dtype(query.dtype)
        query, key, value = query.to(wide), *(decoded(encoded(x, layout.stored), wide) for x in (key, value))
    counts = [part.stop - part.start for part, _ in prompts]
    cu_seqlens = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=query.device)
    places = [torch.arange(token, token + count, device=query.device) for (_, token), count in zip(prompts, counts, strict=True)]
    scores = call.scores.of_rows(torch.cat(places))
    inputs = Inputs(query, key, value, cu_seqlens=cu_seqlens, sink=call.sink)
    computed = attend(*call_of(inputs, pattern, True, call.problem.scale, call.asked, scores=scores))[0][0]
    for (part, _), of_prompt in zip(prompts, torch.split(computed, counts), strict=True):
        out[part] = of_prompt
