"""The suite of serving: packed sequences, decoding and prefill, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dilkit.pattern import Pattern
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.cpu.suite import instruction_set
from dilkit.tools.bench.serving import llama, targets
from dilkit.tools.bench.serving.cases import ServingSizes
from dilkit.tools.bench.serving.decoding import FullCache, Steps, Text
from dilkit.tools.bench.serving.entries import checked, timed
from dilkit.tools.bench.serving.generated import generated
from dilkit.tools.bench.serving.kept import many_sequences, read_kept, stored_rows
from dilkit.tools.bench.serving.packed import lengths_of, ways
from dilkit.tools.bench.serving.record import (
    ALONE,
    DENSE,
    OURS,
    REST,
    Decoding,
    Generated,
    ManySequences,
    PackedCase,
    Prefill,
    ServingResult,
    StoredRows,
)
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.measure.single_call import agreement, call_once
from dilkit.tools.results.record import Entries, Entry

MOST_ROUNDS = 3


@dataclass(frozen=True)
class ServingSuite(Suite[ServingResult]):
    """The shortest measurements first."""

    NAME = "serving"
    SUMMARY = "packed sequences, decoding and prefill, each beside what it replaces"
    RECORD = ServingResult
    TARGETS = targets.TARGETS

    sizes: ServingSizes = field(default_factory=ServingSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        yield Step("prefill", "prefill of a model of Llama's shape", self.prefill, 4)
        yield Step("decoding", "steps of decoding", self.decoding, 8)
        yield Step("single", "steps on one thread, beside reading what is kept", self.single, 3)
        yield Step("stored", "steps with rows kept as int8", partial(self.stored, "int8"), 1)
        for kv_heads in self.sizes.kv_heads:
            yield Step("many", f"a step of many sequences, {kv_heads} key/value heads", partial(self.many, kv_heads), 2)
        for kv_heads in self.sizes.kv_heads:
            what = f"tokens of a model of transformers, {kv_heads} key/value heads"
            yield Step("generated", what, partial(self.generated, kv_heads), 6)
        for spread, weight in (("geometrically spaced", 4), ("evenly spaced", 8)):
            yield Step("packed", f"sequences of lengths that are {spread}", partial(self.packed, spread), weight)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(min(self.sizes.threads, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count)

    def wrong(self, result: ServingResult) -> bool:
        """Whether a check failed, or a cache holds more than it may."""
        verdicts = {entry.verdict for _, case in result.titled() for entry in case.entries.values()}
        return "wrong" in verdicts or super().wrong(result)

    def shortened(self, pattern: Pattern) -> Pattern:
        """`pattern`; with --quick, its segments shortened."""
        pairs = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
        return Pattern([max(length // self.divisor, rate) for length, rate in pairs], pattern.dilation_rates)

    def prefill(self) -> Prefill:
        """A model of Llama's shape on a prompt, with either attention. It is checked on the beginning of the prompt."""
        config, pattern = self.sizes.model, self.shortened(self.sizes.prefilled)
        model, tokens = llama.Llama(config), torch.randint(config.vocabulary, (1, self.sizes.prompt // self.divisor))
        beginning = tokens[:, : self.sizes.checked // self.divisor]
        pairs = {
            OURS: (llama.dilated(pattern), llama.dilated(pattern, "reference")),
            DENSE: (llama.dense, llama.dilated(Pattern.dense())),
        }
        calls = {name: partial(model.prefill, tokens, attend) for name, (attend, _) in pairs.items()}
        entries: Entries = {}
        for name, both in pairs.items():
            logits, same = (model.prefill(beginning, attend) for attend in both)
            entries[name] = checked(agreement(name, logits, same, beginning.shape[1]), call_once(calls[name]))
        calls[REST], entries[REST] = partial(model.prefill, tokens, llama.without), Entry()
        entries_timed = timed(entries, calls, min(self.repeats, MOST_ROUNDS))
        parameters = sum(weight.numel() for weight in model.parameters())
        sizes = dict(tokens=tokens.shape[1], layers=config.layers, width=config.width, parameters=parameters)
        return Prefill(pattern=str(pattern), **sizes, **entries_timed)

    def decoding(self) -> Decoding:
        """Steps after more and more tokens, all in the same rounds."""
        text = Text(self.shortened(self.sizes.decoded), self.sizes.heads, self.sizes.head_dim)
        count, limit = max(1, self.sizes.steps // self.divisor), self.sizes.full // self.divisor
        seen = [n // self.divisor for n in self.sizes.seen]
        filled = [text.filled(most, count) for most in (limit, seen[-1])]
        full = FullCache(text, limit)
        points = [
            Steps(text, n, count, cache, full if n + count <= limit else None)
            for n, cache in text.caches(sorted({*seen, *filled}))
        ]
        return self._timed(text, points, count, filled)

    def _timed(self, text: Text, points: Sequence[Steps], count: int, filled: Collection[int]) -> Decoding:
        """All steps in the same rounds, taken back between samples."""
        entries = {name: entry for one in points for name, entry in one.entries.items()}
        calls = {name: call for one in points for name, call in one.calls.items()}

        def take_back() -> None:
            for one in points:
                one.cache.crop(one.seen)

        entries_timed = timed(entries, calls, self.repeats, before=take_back)
        rows = tuple(one.point(entries_timed, one.seen in filled) for one in points)
        return Decoding(pattern=str(text.pattern), heads=text.heads, head_dim=text.head_dim, steps=count, points=rows)

    def single(self) -> Decoding:
        """Steps on one thread: after a few tokens, after a thousand, and where all branches are full."""
        text, count = self._kept_text(), max(1, self.sizes.steps // self.divisor)
        limit = self.sizes.full // self.divisor
        full, filled = FullCache(text, limit), text.filled(limit, count)
        seen = [max(1, self.sizes.few // self.divisor), self.sizes.thousand // self.divisor, filled]
        with torch_threads(1):
            points = [Steps(text, n, count, cache, full) for n, cache in text.caches(seen)]
            read_kept(points[-1])
            return self._timed(text, points, count, {filled})

    def stored(self, dtype: str) -> StoredRows:
        """Rows kept in fewer bytes, where all branches have some."""
        text = self._kept_text()
        return stored_rows(text, text.period - 1, dtype)

    def many(self, kv_heads: int) -> ManySequences:
        """Sequences of geometrically spaced lengths, on one thread."""
        sizes = self.sizes
        shortest, longest = max(1, sizes.served_shortest // self.divisor), sizes.served_longest // self.divisor
        lengths = lengths_of(sizes.served, shortest, longest, geometric=True)
        with torch_threads(1):
            return many_sequences(
                self._kept_text().pattern, lengths, sizes.heads, kv_heads, sizes.head_dim, min(self.repeats, MOST_ROUNDS)
            )

    def generated(self, kv_heads: int) -> Generated:
        """Tokens after a long text, on one thread."""
        sizes = self.sizes
        read, written = sizes.read // self.divisor, max(1, sizes.written // self.divisor)
        with torch_threads(1):
            return generated(sizes.model, kv_heads, sizes.generated, read, written, min(self.repeats, MOST_ROUNDS))

    def _kept_text(self) -> Text:
        return Text(self.shortened(self.sizes.kept), self.sizes.heads, self.sizes.head_dim)

    def packed(self, spread: str) -> PackedCase:
        """Sequences packed, one by one and padded; the results of all ways are compared first."""
        geometric = spread.startswith("geometrically")
        shortest, longest = self.sizes.shortest // self.divisor, self.sizes.longest // self.divisor
        lengths, pattern = lengths_of(self.sizes.sequences, shortest, longest, geometric), self.shortened(self.sizes.packed)
        implementations = ways(lengths, pattern, self.sizes.heads, self.sizes.head_dim)
        alone = implementations[ALONE].joined(implementations[ALONE].call())
        entries: Entries = {}
        for name, way in implementations.items():
            one = call_once(way.call)
            entries[name] = checked(agreement(name, way.joined(one.result), alone, max(lengths)), one)
        del alone, one
        case = timed(entries, {name: way.call for name, way in implementations.items()}, min(self.repeats, MOST_ROUNDS))
        return PackedCase(spread=spread, pattern=str(pattern), lengths=lengths, **case)
