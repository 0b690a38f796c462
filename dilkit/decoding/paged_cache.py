"""`PagedCache`: the keys and values that many sequences still need, in one pool of fixed bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import integer, integers, one_of, shown
from dilkit.decoding._kept_tokens import kept_tokens
from dilkit.decoding._streams import PagedStream
from dilkit.decoding.layout import Layout, name_of
from dilkit.decoding.paged_attention import (
    PackedCall,
    PagedRows,
    PagePool,
    Rows,
    attend_prompts,
    check_rows,
    prepare_call,
)
from dilkit.decoding.sequence_rows import StepSpans, once_branches
from dilkit.decoding.stores import check_decodable
from dilkit.op.arguments import check_pattern
from dilkit.op.autocast import in_given_dtypes
from dilkit.pattern import WHOLE_SEQUENCE, Pattern
from dilkit.problem import DTYPES, STORED


@dataclass(frozen=True)
class Piece:
    sequence: PagedRows
    rows: slice
    count: int
    is_prompt: bool


class PagedCache:
    """Keys and values that later rows of causal sequences can still see, in pages of one pool, and attention over them.

        attend: row t of sequence s gets  dilated_attention(all q, k, v of s, pattern, is_causal=True)[t]

    Sequences come and go, each of its own length. A call takes new rows of any of them: whole prompts, chunks and single steps
    beside one another. The rows that a `DilatedCache` would keep are in pages: new ones come at the end of a queue, and pages
    that no later row sees go back to the pool. A forked sequence shares its pages until one of both writes to them.

    - `pattern`: as of `DilatedCache`. `heads`, `kv_heads`, `head_dim`: sizes of the rows, in `dtype` on `device`.
    - `nbytes`: bytes of the pool, at least a page; none are allocated later. A call that needs more than is free raises
      `PoolFullError` (a ValueError), and nothing has changed.
    - `page_rows`: tokens of a page of a branch that all key/value heads keep; pages of fewer heads have more. For such a pattern
      `pool.rows[0]` and `[1]` viewed as `(pages, page_rows, kv_heads, head_dim)` are what other libraries have.
    - `rollback`: how many tokens `crop` can always take back.
    - `stored`: the dtype of what is kept, as of `DilatedCache`.

    Raises TypeError or ValueError for arguments that do not fit.

    Example, a prompt of 9 tokens, which is continued in two ways, beside another of 4:

        >>> import torch
        >>> from dilkit import PagedCache, Pattern
        >>> cache = PagedCache(Pattern([4, 16], [1, 2]), heads=4, kv_heads=2, head_dim=8, nbytes=1 << 20)
        >>> first, second = cache.add(), cache.add()
        >>> q, k, v = torch.randn(13, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
        >>> out = cache.attend(q, k, v, [first, second], [9, 4])
        >>> other = cache.fork(first)
        >>> step = cache.attend(q[:3], k[:3], v[:3], [first, other, second])
        >>> step.shape, [cache.seen(one) for one in (first, other, second)]
        (torch.Size([3, 4, 8]), [10, 10, 5])
        >>> cache.drop(first)
    """

    def __init__(
        self,
        pattern: Pattern,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        nbytes: int,
        page_rows: int = 16,
        rollback: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        stored: str | None = None,
    ) -> None:
        check_pattern(pattern)
        check_decodable(pattern)
        self.pattern, self.rollback = pattern, integer("rollback", rollback, at_least=0)
        self.layout = _layout(heads, kv_heads, head_dim, dtype, device, stored)
        heads, kv_heads = self.layout.heads, self.layout.kv_heads
        pattern.check_heads(heads, kv_heads)
        self._given = pattern.among(heads, kv_heads)
        self._kept = kept_tokens(pattern, self._given)
        lengths = [branch.forgets_every for branch in pattern.branches]
        self._period = WHOLE_SEQUENCE if WHOLE_SEQUENCE in lengths else math.lcm(*lengths)
        numbers = integer("page_rows", page_rows, at_least=1) * kv_heads * self.layout.width
        page_bytes = 2 * numbers * self.layout.stored.itemsize
        pages = integer("nbytes", nbytes, at_least=page_bytes) // page_bytes
        self.pool = PagePool(pages, numbers, self.layout.stored, self.layout.device)
        self._stored = tuple(self.pool.rows.unbind())
        self._sequences: dict[int, PagedRows] = {}
        self._next = 0

    def __repr__(self) -> str:
        used = self.pool.pages - self.pool.free
        return f"PagedCache({self.pattern}, {len(self._sequences)} sequences, {used} of {self.pool.pages} pages)"

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of all sequences, in the order in which they came."""
        return tuple(self._sequences)

    def seen(self, sequence: int) -> int:
        """Return the tokens of a sequence so far. Raises TypeError or ValueError for an unknown one, as all methods do."""
        return self._of(sequence).seen

    def add(self) -> int:
        """Return the number of a new sequence, which has no tokens yet and takes no pages."""
        return self._number(PagedRows([PagedStream(kept, self.pool, self.layout.width) for kept in self._kept], self.rollback))

    def fork(self, sequence: int) -> int:
        """Return the number of a new sequence with the tokens of this one, in the same pages."""
        return self._number(self._of(sequence).fork())

    def drop(self, sequence: int) -> None:
        """Forget a sequence; its pages are free, but for those that others hold."""
        self._of(sequence).clear()
        del self._sequences[integer("sequence", sequence)]

    def crop(self, sequence: int, length: int) -> None:
        """Forget all tokens of a sequence but the first `length`.

        `rollback` tokens can always be taken back, counted from the longest length there has been, more only where no key is
        needed that is not kept any more. Raises ValueError where it is not; the cache is then as it was.
        """
        rows, length = self._of(sequence), integer("length", length, at_least=0)
        if length > rows.seen:
            raise ValueError(f"length={length} exceeds the {rows.seen} tokens of sequence {sequence}")
        if rows.lacking(length) is not None:
            raise ValueError(
                f"length={length} needs keys that sequence {sequence} has dropped after {rows.longest} tokens; a cache with "
                f"rollback={rows.longest - length} does"
            )
        rows.crop(length)

    def reorder(self, sequences: Sequence[int], indices: Sequence[int]) -> None:
        """Make `sequences[i]` what `sequences[indices[i]]` was: the beams that go on, with the same numbers."""
        which, numbers = integers("indices", indices, at_least=0), integers("sequences", sequences)
        if len(which) != len(numbers) or any(index >= len(numbers) for index in which):
            raise ValueError(
                f"indices={shown(which)} must be {len(numbers)} numbers from 0 to {len(numbers) - 1}, one a sequence"
            )
        before = self._named_once(numbers)
        after = [before[index].fork() for index in which]
        for sequence, old, new in zip(numbers, before, after, strict=True):
            old.clear()
            self._sequences[sequence] = new

    @in_given_dtypes
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        sink: Tensor | None = None,
        scale: float | None = None,
        bias: Bias | None = None,
        softcap: float | None = None,
        backend: str | Sequence[str] | None = None,
    ) -> Tensor:
        """Attend with the next rows of these sequences, `(rows, heads, head_dim)` like `query`; keep their keys and values.

        - `query` `(rows, heads, head_dim)`, `key` and `value` `(rows, kv_heads, head_dim)`: first the rows of `sequences[0]`,
          `counts[0]` of them, then those of the next, as in `dilated_attention_varlen`. Without `counts` one a sequence. A
          sequence is named once.
        - `sink`, `scale`, `bias`, `softcap`: those of `dilated_attention`, the same at each call; a bias goes by the places of
          tokens in their sequence, not by coordinates.

        Rows that see none before them, such as a prompt, are computed together as packed sequences, all others in one step
        against the pages, for which a chunk takes pages for all its rows. There are no gradients.

        Raises TypeError or ValueError for arguments that do not fit, `PoolFullError` where pages lack, `NoBackendError` where
        nobody can compute it; the cache is then as it was.
        """
        rows = query, key, value
        check_rows(rows, self.pattern, self.layout, sink)
        pieces = self._pieces(sequences, counts, len(query))
        most = max([piece.sequence.seen + piece.count for piece in pieces], default=0)
        self.pattern.check_seq(most)
        sizes = self.pattern, self.layout, most
        call = prepare_call(rows, *sizes, sink=sink, scale=scale, bias=bias, softcap=softcap, backend=backend)
        prompts = [piece for piece in pieces if piece.is_prompt]
        steps = [piece for piece in pieces if piece.count and not piece.is_prompt]
        needed = sum([piece.sequence.pages_for_prompt(piece.count) for piece in prompts])
        self.pool.check_free(needed + sum([piece.sequence.pages_for(piece.count) for piece in steps]))
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if prompts:
            attend_prompts([(piece.rows, piece.sequence.seen) for piece in prompts], rows, out, self.pattern, self.layout, call)
        if steps:
            of_steps = self._attend_steps(steps, rows, call)
            for piece in steps if prompts else ():
                out[piece.rows] = of_steps[piece.rows]
            out = out if prompts else of_steps
        for piece in prompts:  # nothing can fail any more
            piece.sequence.append_prompt(key[piece.rows], value[piece.rows])
        for piece in pieces:
            piece.sequence.forget()
        return out

    def _attend_steps(self, pieces: Sequence[Piece], rows: Rows, call: PackedCall) -> Tensor:
        spans = StepSpans(self._given, once_branches(self.pattern), self.layout.device, self.pool.numbers)
        before = [piece.sequence.seen for piece in pieces]
        try:
            for piece in pieces:
                spans.add(piece.sequence, piece.count, piece.rows.start)
            query, key, value = [x.resolve_neg()[:, None] for x in rows]
            step = spans.step(query, key, value, call.sink, call.scores.bias, self._stored)
            return call.backend.attend_stored(step, call.problem)[0][:, 0]
        except BaseException:
            for piece, seen in zip(pieces, before, strict=True):
                piece.sequence.go_back(seen)
            raise

    def _pieces(self, sequences: Sequence[int], counts: Sequence[int] | None, rows: int) -> list[Piece]:
        numbers = integers("sequences", sequences)
        lengths = [1] * len(numbers) if counts is None else integers("counts", counts, at_least=0)
        if len(lengths) != len(numbers) or sum(lengths) != rows:
            raise ValueError(
                f"counts={shown(lengths)} of {len(numbers)} sequences are {sum(lengths)} rows, and query has {rows}; a count for "
                "each sequence is needed, and as many rows as they say"
            )
        pieces, start = [], 0
        for sequence, count in zip(self._named_once(numbers), lengths, strict=True):
            is_prompt = count > 1 and sequence.seen % self._period == 0
            pieces.append(Piece(sequence, slice(start, start + count), count, is_prompt))
            start += count
        return pieces

    def _named_once(self, sequences: Sequence[int]) -> list[PagedRows]:
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"sequences={shown(sequences)}: a call names a sequence once")
        return [self._of(sequence) for sequence in sequences]

    def _number(self, rows: PagedRows) -> int:
        self._sequences[self._next] = rows
        self._next += 1
        return self._next - 1

    def _of(self, sequence: int) -> PagedRows:
        number = integer("sequence", sequence)
        if number not in self._sequences:
            raise ValueError(f"sequence={number} is none of this cache, which has {shown(list(self._sequences))}")
        return self._sequences[number]


def _layout(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, stored: str | None
) -> Layout:
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    checked = {name: integer(name, size, at_least=1) for name, size in sizes.items()}
    name = name_of(dtype)
    one_of("dtype", name, DTYPES)
    kept_as = name if stored is None else stored
    one_of("stored", kept_as, (name, *STORED[name]))
    return Layout(1, **checked, dtype=dtype, device=torch.device(device), stored=getattr(torch, kept_as))
