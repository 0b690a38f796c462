"""The attention pattern: how many times query i of head h sees key j, `count[h, i, j]`, for one softmax.

out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from dilkit.checks import boolean, check_type, integer, one_of
from dilkit.pattern.checks import (
    OFFSETS,
    OVERLAPS,
    WHOLE_SEQUENCE,
    PatternError,
    check_tail,
    head_ranges,
    positive_integers,
    shard_of_heads,
)
from dilkit.pattern.flex.masks import FlexMasks
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.bands import DilatedSegment
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.kinds.registry import READ_WITH_CLASSES, check_branches
from dilkit.pattern.lowering.checks import sees
from dilkit.pattern.presets import Presets
from dilkit.pattern.text import description, fields_of, json_of, text_of

if TYPE_CHECKING:
    from torch import Tensor

_MAX_COUNT_ENTRIES = 2**31
_MAX_HEADS = 2**20  # heads are gone through one by one
_MAX_KEPT_TEXT = 2**14  # characters: layouts of blocks, which may be of many MiB, are not kept for the text that they came from


@dataclass(frozen=True, repr=False)
class Pattern(Presets, FlexMasks):
    """An attention pattern as a count: how many of its branches say that query i of head h sees key j.

        count[h, i, j] = number of branches b in which i sees j

    `Pattern(segment_lengths, dilation_rates)` is LongNet's dilated attention (arXiv 2307.02486, eq. 4-15): every branch cuts the
    sequence into segments, and query and key see each other in

        i // w_b == j // w_b and (i mod w_b) mod r_b == (j mod w_b) mod r_b == o_bh

    Here `w_b = segment_lengths[b]` is in tokens, `r_b = dilation_rates[b]`, and `o_bh` is the offset of head h. `Pattern.of`
    takes branches of any kind: `DilatedSegment`, `SlidingWindow`, `GlobalTokens`, `Strided`,
    `BlockSparse`, `Neighborhood`, `Documents`, `Prefix`, `Intervals`.

    - `segment_lengths`, `dilation_rates`: one positive integer for each branch; a rate is at most its length.
    - `offset`: "modulo" means `o_bh = h mod r_b`, as in the paper; "block" means `h // ceil(H / r_b)`, as in torchscale. H is
      the number of heads. With grouped heads, h and H count key/value heads.
    - `overlap`: "count" means that a key seen by m branches counts m times, as in the paper; "once" caps the count at 1.
    - `heads`: one range or (start, stop) pair of query heads for each branch, which then serves only these heads; None means all.
    - `head_shard=(first, total)`: the tensors hold only some of the `total` key/value heads of a model, from head `first` on, as
      under tensor parallelism. They keep their offsets in the whole model. `heads` counts the heads at hand.
    - `tail`: "exact" pads nothing. "zeros" fills segments up as torchscale does: to a multiple of the rate, and a short last one
      to the length of the others, with keys of score 0 and value 0 (`zero_keys`); so are neighborhoods that edges cut off. Under
      causality no row sees the padding.

    The last segment may be short, and a segment longer than the sequence is the sequence. `offset` and `tail` are rules of
    dilated segments, `tail` of neighborhoods that are cut off too.
    Patterns are hashable values. Raises `PatternError` (a ValueError) or TypeError for arguments that do not fit.

    Example:

        >>> from dilkit import Pattern
        >>> pattern = Pattern(segment_lengths=[4, 8], dilation_rates=[1, 2])
        >>> pattern.count(seq=8, heads=2)[0].tolist()[0]
        [2, 1, 2, 1, 1, 0, 1, 0]
        >>> print(pattern.describe())
        branch 0: segments of 4 tokens, every token
        branch 1: segments of 8 tokens, 1 token in 2
        offset: head mod rate; overlap: a key seen by m branches counts m times
    """

    # A pattern is its branches; those of segments alone have these two lists as well. Only branches are compared.
    segment_lengths: tuple[int, ...] = field(compare=False)
    dilation_rates: tuple[int, ...] = field(compare=False)
    offset: str = "modulo"
    overlap: str = "count"
    heads: tuple[tuple[int, int] | None, ...] | None = field(default=None, compare=False)
    head_shard: tuple[int, int] | None = None
    tail: str = "exact"
    branches: tuple[Branch, ...] = field(init=False)
    """The branches, in the order given."""
    _json: str = field(init=False, compare=False)

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        offset: str = "modulo",
        overlap: str = "count",
        heads: Sequence[range | tuple[int, int] | None] | None = None,
        head_shard: tuple[int, int] | None = None,
        *,
        tail: str = "exact",
    ) -> None:
        lengths = positive_integers("segment_lengths", segment_lengths)
        rates = positive_integers("dilation_rates", dilation_rates)
        if len(lengths) != len(rates):
            sizes = f"{len(lengths)} entries and dilation_rates {len(rates)}"
            raise PatternError(f"segment_lengths has {sizes}; give one rate for each length")
        for i, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
            if rate > length:
                raise PatternError(f"dilation_rates[{i}]={rate} exceeds segment_lengths[{i}]={length}; at most the length")
        ranges = head_ranges(heads, len(lengths)) or (None,) * len(lengths)
        self._settle(tuple(map(DilatedSegment, lengths, rates, ranges)), offset, overlap, head_shard, tail)

    @classmethod
    def of(
        cls,
        *branches: Branch,
        offset: str = "modulo",
        overlap: str = "count",
        head_shard: tuple[int, int] | None = None,
        tail: str = "exact",
    ) -> Pattern:
        """Make the pattern of these branches, of any kinds in any mix; the other arguments are those of `Pattern`.

        Dilated segments alone give `Pattern(segment_lengths, dilation_rates)`. Raises `PatternError` or TypeError.

            >>> from dilkit import DilatedSegment, Pattern, SlidingWindow
            >>> pattern = Pattern.of(DilatedSegment(8, 4), SlidingWindow(2))
            >>> pattern.count(seq=8, heads=1, is_causal=True)[0, 4].tolist()  # query 4 sees key 4 in both branches
            [1, 0, 0, 1, 2, 0, 0, 0]
            >>> Pattern.of(DilatedSegment(8, 4)) == Pattern([8], [4])
            True
        """
        pattern = object.__new__(cls)
        pattern._settle(branches, offset, overlap, head_shard, tail)
        return pattern

    def _settle(
        self, branches: tuple[Branch, ...], offset: str, overlap: str, head_shard: tuple[int, int] | None, tail: str
    ) -> None:
        check_branches(branches)
        one_of("offset", offset, OFFSETS, PatternError)
        one_of("overlap", overlap, OVERLAPS, PatternError)
        check_tail(tail, overlap)
        heads = None if all(branch.heads is None for branch in branches) else tuple(branch.heads for branch in branches)
        values: dict[str, Any] = dict(offset=offset, overlap=overlap, heads=heads)
        values |= dict(head_shard=shard_of_heads(head_shard), tail=tail)
        lists = [(branch.segment_length, branch.dilation_rate) for branch in branches if isinstance(branch, DilatedSegment)]
        if len(lists) == len(branches):
            lengths, rates = zip(*lists, strict=True)
            values = dict(segment_lengths=lengths, dilation_rates=rates, **values)
        # Worked out now, not at first use: torch.compile traces attribute reads but not the lock of a cached property.
        for name, value in dict(**values, branches=branches, _json=json_of(values, branches)).items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash(self._json)  # a text keeps its hash: every call looks its pattern up

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("segment_lengths", "dilation_rates"):
                raise NotSegments(f"{name}: {_other_kinds(self.branches)}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @cached_property
    def is_evaluated(self) -> bool:
        """True if the forms of some branch hold for one length alone."""
        return any(branch.is_evaluated for branch in self.branches)

    @property
    def only_segments(self) -> bool:
        """True if all branches are dilated segments."""
        return all(isinstance(branch, DilatedSegment) for branch in self.branches)

    @property
    def segments(self) -> tuple[DilatedSegment, ...]:
        """The branches of a pattern of dilated segments alone. Raises `PatternError` for a pattern with others."""
        if not self.only_segments:
            raise PatternError(_other_kinds(self.branches))  # an AttributeError of a property would go to __getattr__
        return tuple(branch for branch in self.branches if isinstance(branch, DilatedSegment))

    def __reduce__(self) -> tuple[Callable[[str], Pattern], tuple[str]]:
        return Pattern.from_json, (self._json,)

    @classmethod
    def dense(cls) -> Pattern:
        """Make ordinary attention: one branch with one segment as long as the sequence, every token kept.

        >>> from dilkit import Pattern
        >>> Pattern.dense().count(seq=3, heads=1, is_causal=True).tolist()
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
        """
        return cls((WHOLE_SEQUENCE,), (1,))

    @classmethod
    def head_split(
        cls,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        num_heads: int,
        offset: str = "modulo",
        overlap: str = "count",
    ) -> Pattern:
        """Return the pattern of the older PyTorch implementations: each branch serves its own range of the heads.

        The ranges are equal; the first `num_heads mod len(segment_lengths)` branches serve one head more.

            >>> from dilkit import Pattern
            >>> Pattern.head_split([2048, 4096], [1, 2], num_heads=5).heads
            ((0, 3), (3, 5))
        """
        segment_lengths = positive_integers("segment_lengths", segment_lengths)
        branches, num_heads = len(segment_lengths), integer("num_heads", num_heads)
        if not 0 < branches <= num_heads:
            raise PatternError(f"num_heads={num_heads} cannot be split over {branches} branches; at least one head each")
        cuts = [b * (num_heads // branches) + min(b, num_heads % branches) for b in range(branches + 1)]
        return cls(segment_lengths, dilation_rates, offset, overlap, list(pairwise(cuts)))

    def head_offset(self, dilation_rate: int, kv_head: int, kv_heads: int) -> int:
        """Return the offset of key/value head `kv_head` of `kv_heads`: the place of its first kept row in a segment."""
        return self.among(kv_heads, kv_heads).offset(dilation_rate, kv_head)

    def among(self, heads: int, kv_heads: int | None) -> Heads:
        """Return `heads` query and `kv_heads` key/value heads with their place in the whole model."""
        held = heads if kv_heads is None else kv_heads
        return Heads(heads, held, self.offset, *(self.head_shard or (0, held)))

    def of_kv_heads(self, start: int, stop: int, heads: int, kv_heads: int) -> Pattern | None:
        """Return the pattern of key/value heads `start` to `stop - 1` and their query heads alone; None if none is served.

        They see what they see among `heads` query and `kv_heads` key/value heads.

            >>> from dilkit import Pattern
            >>> print(Pattern([8, 16], [1, 4], heads=[(0, 2), None]).of_kv_heads(2, 4, heads=4, kv_heads=4))
            Pattern([16], [4], head_shard=(2, 4))
        """
        group, (first, total) = heads // kv_heads, self.head_shard or (0, kv_heads)
        served = [branch.within(start * group, stop * group) for branch in self.branches]
        chosen = [branch for branch in served if branch is not None]
        return self.with_branches(*chosen, head_shard=(first + start, total)) if chosen else None

    def with_branches(self, *branches: Branch, **changes: Any) -> Pattern:
        """Return the pattern of other branches by the same rules; `changes` are arguments of `Pattern.of` that differ.

        >>> from dilkit import Pattern, Strided
        >>> Pattern([8], [2], offset="block").with_branches(Strided(4)) == Pattern.of(Strided(4), offset="block")
        True
        """
        rules = dict(offset=self.offset, overlap=self.overlap, head_shard=self.head_shard, tail=self.tail)
        return Pattern.of(*branches, **(rules | changes))

    def check_heads(self, heads: int, kv_heads: int | None = None) -> None:
        """Raise `PatternError` unless this pattern can be applied to `heads` query and `kv_heads` key/value heads."""
        if heads > _MAX_HEADS:
            raise PatternError(f"heads={heads} must be at most {_MAX_HEADS}")
        if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
            raise PatternError(f"kv_heads={kv_heads} must divide heads={heads}")
        held = kv_heads or heads
        first, total = self.head_shard or (0, held)
        if first + held > total:
            raise PatternError(f"head_shard={self.head_shard} leaves {total - first} key/value heads, but there are {held}")
        for i, limits in enumerate(self.heads or ()):
            if limits is not None and limits[1] > heads:
                raise PatternError(f"heads[{i}]={limits} of the pattern reaches past the {heads} heads (0 to {heads - 1})")
        for branch in self.branches:
            branch.check_heads(heads // held * total)

    @property
    def differs_by_head(self) -> bool:
        """True if heads see different keys, so that a part of a model's heads needs their numbers (`head_shard`).

        >>> from dilkit import Pattern
        >>> Pattern([16, 64], [1, 4]).differs_by_head, Pattern.dense().differs_by_head
        (True, False)
        """
        return any(branch.differs_by_head for branch in self.branches)

    @property
    def max_seq(self) -> int:
        """The longest sequence that this pattern can be applied to."""
        return min(branch.max_seq for branch in self.branches)

    def check_seq(self, seq: int) -> None:
        """Raise `PatternError` unless this pattern can be applied to `seq` tokens."""
        for branch in self.branches:
            branch.check_seq(seq)

    def check_tokens(self, seq: int) -> None:
        """Raise `PatternError` where a branch names a token that a whole sequence of `seq` tokens, not causal, lacks."""
        for branch in self.branches:
            branch.check_tokens(seq)

    @property
    def given_branch(self) -> Branch | None:
        """The branch whose pairs a tensor of each call gives, if there is one."""
        return next((branch for branch in self.branches if branch.is_given_by_call), None)

    def count(self, seq: int, heads: int, *, kv_heads: int | None = None, is_causal: bool = False) -> Tensor:
        """Return `count[h, i, j]`, how many times query i of head h sees key j: an int32 tensor `(heads, seq, seq)`.

        For small `seq`. Raises `PatternError` beyond 2**31 entries and for heads that do not fit, TypeError or ValueError for
        sizes that are not integers or too small.
        """
        import torch

        self._check_call(seq, heads, kv_heads, is_causal)
        check_entries(seq, heads, seq)
        return self.count_rows(torch.arange(seq, device="cpu"), seq, heads, kv_heads=kv_heads, is_causal=is_causal)

    def count_rows(
        self,
        rows: Tensor,
        seq: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        is_causal: bool = False,
        span: range | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """Return the rows `rows` (int64, `(m,)`) of `count`: an int32 tensor `(heads, m, seq)` on the device of `rows`.

        `span`: the positions of which the rows are some, if these are not all among the `seq` keys. Before the first key a row is
        in no segment, document or block: there it sees what a window or a stride shows. `given`: the tensor of a call for
        `given_branch`, of one sequence `(heads or 1, ...)`.
        """
        import torch

        self.check_heads(heads, kv_heads)
        outside = span is not None and (span.start < 0 or span.stop > seq)
        self.check_seq(seq if span is None else max(seq, span.stop))
        at_hand, keys = self.among(heads, kv_heads), torch.arange(seq, device=rows.device)
        total = torch.zeros(heads, len(rows), seq, dtype=torch.int32, device=rows.device)
        for branch in self.branches:
            served = branch.served(at_hand)
            if given is not None and branch.is_given_by_call:
                shown = branch.shown_by(given[served.start : served.stop] if len(given) > 1 else given, rows, keys)
            else:
                shown = sees(branch, rows.clamp(min=0) if outside and not branch.goes_by_distance else rows, keys, at_hand)
            if outside and not branch.goes_by_distance:
                shown = shown & (rows >= 0)[:, None]
            total[served.start : served.stop] += shown
        if is_causal:
            total *= rows[:, None] >= keys
        return total.clamp_(max=1) if self.overlap == "once" else total

    def zero_keys(
        self, seq: int, heads: int, *, kv_heads: int | None = None, is_causal: bool = False, rows: Tensor | None = None
    ) -> Tensor:
        """Count the keys of score 0 and value 0 that each query sees: int32 `(heads, seq)`, all 0 for tail="exact".

            zero_keys[h, i] = sum over the branches that keep i for h of ceil(w / r) - tokens in the segment of i that h keeps

        Here w is at most `seq`; a neighborhood that is cut off has one for each missing cell of its window. A row that sees n of
        them has `lse' = log(exp(lse) + n)` and `out' = out * exp(lse - lse')`. `rows` (int64, `(m,)`): of these rows only,
        `(heads, m)` on their device. Raises as `count` does.

            >>> from dilkit import Pattern
            >>> Pattern([4], [2], tail="zeros").zero_keys(seq=7, heads=2)  # head 1 keeps tokens 1, 3, 5 and the padded 7
            tensor([[0, 0, 0, 0, 0, 0, 0],
                    [0, 0, 0, 0, 0, 1, 0]], dtype=torch.int32)
        """
        import torch

        self._check_call(seq, heads, kv_heads, is_causal)
        rows = torch.arange(seq, device="cpu") if rows is None else rows
        if is_causal or self.tail == "exact":
            return torch.zeros(heads, len(rows), dtype=torch.int32, device=rows.device)
        return self.zero_keys_of(rows, torch.tensor(seq, device=rows.device), heads, kv_heads or heads)

    def zero_keys_of(self, rows: Tensor, seq: Tensor, heads: int, kv_heads: int) -> Tensor:
        """Return `zero_keys` with tail="zeros" for sequences of different lengths; `seq`: of each row, or of all."""
        import torch

        total, at_hand = torch.zeros(heads, len(rows), dtype=torch.int32, device=rows.device), self.among(heads, kv_heads)
        for branch in self.branches:
            served = branch.served(at_hand)
            total[served.start : served.stop] += branch.zero_keys(rows, seq, at_hand)
        return total

    def flops(
        self, seq: int, heads: int, head_dim: int, *, batch: int = 1, kv_heads: int | None = None, is_causal: bool = False
    ) -> int:
        """Return nominal forward FLOPs: `4 * head_dim * batch *` the sum over heads and branches of the pairs seen (2 matmuls).

        A key seen by several branches counts each time, and padding by `tail="zeros"` never. A backward pass is nominally 2.5
        times this.

            >>> from dilkit import Pattern
            >>> dense, dilated = Pattern.dense(), Pattern([2048, 8192, 32768], [1, 4, 16])
            >>> dense.flops(65536, 8, 64) // dilated.flops(65536, 8, 64)
            24
        """
        self._check_call(seq, heads, kv_heads, is_causal, head_dim=head_dim, batch=batch)
        self.check_seq(seq)
        at_hand = self.among(heads, kv_heads)
        return 4 * head_dim * batch * sum(branch.pairs(seq, at_hand, is_causal) for branch in self.branches)

    def _check_call(self, seq: int, heads: int, kv_heads: int | None, is_causal: bool, **others: int) -> None:
        for name, size, least in (("seq", seq, 0), ("heads", heads, 1), *((name, size, 0) for name, size in others.items())):
            integer(name, size, at_least=least)
        if kv_heads is not None:
            integer("kv_heads", kv_heads)
        boolean("is_causal", is_causal)
        self.check_heads(heads, kv_heads)

    def describe(self) -> str:
        """Describe the pattern, one line for each branch."""
        return description(self)

    def to_json(self) -> str:
        """Return this pattern as canonical JSON text, as the torch operators and result files hold it.

        >>> from dilkit import Pattern
        >>> pattern = Pattern([512], [2])
        >>> Pattern.from_json(pattern.to_json()) == pattern
        True
        """
        return self._json

    @staticmethod
    def from_json(text: str) -> Pattern:
        """Return the pattern that `to_json` wrote. Raises ValueError or TypeError for any other text."""
        check_type("text", text, str, "a text is needed, as Pattern.to_json() writes it")
        return _from_json(text) if len(text) <= _MAX_KEPT_TEXT else _parsed(text)

    def __str__(self) -> str:
        return "Pattern.dense()" if self == Pattern.dense() else text_of(self)

    def __repr__(self) -> str:
        return text_of(self, full=True)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print for IPython and hypothesis, which would go by fields: patterns of other kinds lack two."""
        printer.text(repr(self))


def _parsed(text: str) -> Pattern:
    fields = fields_of(text)
    if "branches" in fields:
        return Pattern.of(*fields.pop("branches"), **fields)
    return Pattern(**fields)


_from_json = lru_cache(maxsize=256)(_parsed)
READ_WITH_CLASSES.append(_from_json.cache_clear)


def check_entries(rows: int, heads: int, seq: int) -> None:
    """Raise `PatternError` where a count of so many rows has more entries than can be made."""
    if (entries := heads * rows * seq) > _MAX_COUNT_ENTRIES:
        raise PatternError(f"seq={seq} with heads={heads} has {entries:,} entries; at most {_MAX_COUNT_ENTRIES:,}")


class NotSegments(PatternError, AttributeError):
    """A pattern has branches of other kinds than dilated segments: it has no `segment_lengths` and no `dilation_rates`."""


def _other_kinds(branches: tuple[Branch, ...]) -> str:
    kinds = ", ".join(sorted({branch.kind for branch in branches} - {DilatedSegment.kind}))
    return f"the pattern has branches of kind {kinds}, and not segments alone; its branches are in Pattern.branches"
