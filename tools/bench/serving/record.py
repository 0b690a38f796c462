"""The result of `dilkit bench --suite serving`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Case, Measurement, SuiteResult, of_case

PACKED, ALONE, MASKED, PADDED = "packed", "one by one", "padded and masked", "padded"
CACHE, KVCACHE, FULL = "DilatedCache", "dilated_attention_with_kvcache", "torch, full cache"
READ, PAGED, SINGLE = "reading what is kept", "PagedCache", "a DilatedCache each"
OURS, DENSE, REST = "dilkit", "torch, dense", "without attention"
DILATED, DYNAMIC = "dilated_cache()", "DynamicCache, sdpa"


@dataclass(frozen=True, kw_only=True)
class PackedCase(Case):
    """Sequences of these `lengths`, forward and backward: `PACKED`, `ALONE`, `MASKED` and `PADDED`.

    `spread`: how lengths are chosen.
    """

    spread: str
    pattern: str
    lengths: tuple[int, ...]

    @property
    def title(self) -> str:
        """How many sequences there are, and of which lengths."""
        shortest, longest = min(self.lengths), max(self.lengths)
        return f"{len(self.lengths)} sequences of {shortest:,}-{longest:,} tokens, {self.spread}"

    @property
    def label(self) -> str:
        """In short, for drawings."""
        return self.spread


@dataclass(frozen=True, kw_only=True)
class DecodePoint(Case):
    """Steps after `seen` tokens: `CACHE`, and up to the longest full cache `KVCACHE` and `FULL`. A time is that of one step.

    `filled`: the steps end where the segments of all branches are full but for one row, so that there is the most to see.
    `kept_bytes` are those of keys and values that later rows can see, `allocated_bytes` the memory that `CACHE` holds after the
    steps, at most `bound_bytes`; `full_bytes` is what a cache of all tokens has.
    """

    seen: int
    filled: bool
    kept_bytes: int
    allocated_bytes: int
    bound_bytes: int
    full_bytes: int

    @property
    def title(self) -> str:
        """How many tokens were seen."""
        return f"{self.seen:,} tokens{', segments full' * self.filled}"

    @property
    def step_s(self) -> float | None:
        """The median time of a step by `CACHE`; None where it was wrong."""
        time = self.entries[CACHE].time
        return time.median_s if time else None


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Points that were timed in the same rounds, `steps` steps a sample."""

    pattern: str
    heads: int
    head_dim: int
    steps: int
    points: tuple[DecodePoint, ...]

    def after(self, filled: bool = False) -> list[DecodePoint]:
        """The points where segments end, or those where they do not, by the tokens seen."""
        return sorted((point for point in self.points if point.filled == filled), key=lambda point: point.seen)


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Rows kept as `stored` after `seen` tokens. `error`: of a step, over its norm with rows kept as they are."""

    stored: str
    seen: int
    kept_bytes: int
    plain_bytes: int
    error: float


@dataclass(frozen=True, kw_only=True)
class ManySequences(Case):
    """A step for sequences of these `lengths`: all in one call of `PAGED`, and `SINGLE`. `kept_bytes`: of all that is read."""

    pattern: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    kept_bytes: int

    @property
    def title(self) -> str:
        """How many sequences there are, and of which sizes."""
        return (
            f"{len(self.lengths)} sequences of {min(self.lengths):,}-{max(self.lengths):,} tokens, {self.heads} heads over "
            f"{self.kv_heads} x {self.head_dim}"
        )

    @property
    def label(self) -> str:
        """In short, for drawings."""
        return f"{self.kv_heads} key/value heads"


@dataclass(frozen=True, kw_only=True)
class Prefill(Case):
    """A model of Llama's shape on a prompt: its attention by `OURS`, and by `DENSE`, which sees all earlier tokens.

    `REST` has none: no attention could make the model faster.
    """

    pattern: str
    tokens: int
    layers: int
    width: int
    parameters: int

    @property
    def title(self) -> str:
        """The model and the prompt."""
        return f"{self.layers} layers x {self.width}, a prompt of {self.tokens:,} tokens"

    @property
    def label(self) -> str:
        """In short, for drawings."""
        return f"{self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class Generated(Case):
    """`count` tokens that a model of transformers generates after `seen`, whose cache is `DILATED`, or `DYNAMIC`."""

    pattern: str
    seen: int
    count: int
    layers: int
    width: int
    heads: int
    kv_heads: int

    @property
    def title(self) -> str:
        """The model and what it had read."""
        model = f"{self.layers} layers x {self.width}, {self.heads} heads over {self.kv_heads}"
        return f"{model}, {self.count} tokens after {self.seen:,}"

    @property
    def label(self) -> str:
        """In short, for drawings."""
        return f"{self.kv_heads} key/value heads"


@dataclass(frozen=True, kw_only=True)
class ServingResult(SuiteResult):
    """Packed sequences, decoding and prefill on a CPU. `single`: steps on one thread."""

    KIND: ClassVar[str] = "suite-serving"

    isa: str
    thread_count: int
    packed: tuple[PackedCase, ...] = ()
    decoding: tuple[Decoding, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    single: tuple[Decoding, ...] = ()
    stored: tuple[StoredRows, ...] = ()
    many: tuple[ManySequences, ...] = ()
    generated: tuple[Generated, ...] = ()

    def titled(self) -> Iterator[tuple[str, Case]]:
        """Every case, and what it is of."""
        yield from ((case.title, case) for case in self.packed)
        yield from ((point.title, point) for decoding in self.decoding for point in decoding.points)
        yield from ((f"{point.title}, one thread", point) for decoding in self.single for point in decoding.points)
        yield from ((case.title, case) for case in self.many)
        yield from ((case.title, case) for case in self.generated)
        yield from ((case.title, case) for case in self.prefill)

    def measurements(self) -> Iterator[Measurement]:
        for title, case in self.titled():
            yield from of_case(title, case)
