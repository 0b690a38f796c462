"""`dilkit bench --suite serving`: packed sequences, decoding and prefill, fp32, on a CPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Any

from dilkit.pattern import Pattern
from dilkit.threads import torch_threads
from dilkit.tools.bench.configuration import divided
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import Target, Values, each, stored, time_ratio
from dilkit.tools.bench.workloads import llama, serving_calls as calls
from dilkit.tools.bench.workloads.serving_calls import ALONE, CACHE, FULL, KVCACHE, MASKED, PACKED, PADDED, PAGED, READ, SINGLE
from dilkit.tools.bench.workloads.ways import PLACE, times
from dilkit.tools.measure.case import CaseFields
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis
from dilkit.tools.results.rows import ResultRow, RowsResult, rows_of

DECODING, ONE_THREAD, MEMORY = "decoding", "one thread", "memory of a cache"
MANY, GENERATED, SPREAD = "many sequences", "generated", "geometrically spaced"
MOST_ROUNDS = 3
HEADS, HEAD_DIM, KV_HEADS = 8, 64, (8, 2)
PACKED_PATTERN, PACKED_LENGTHS = Pattern([1024, 2048, 4096], [1, 2, 4]), (64, 64, 4096)
"""Number of sequences, and their shortest and longest length."""
DECODED_PATTERN = Pattern([2048, 8192, 32768], [1, 4, 16])
SEEN, FULL_LENGTH, STEPS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000), 131_072, 64
"""Tokens before steps of decoding; rows of a cache of all keys; steps of a sample."""
KEPT_PATTERN, FEW, THOUSAND = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]), 16, 1_000
SERVED_LENGTHS = 32, 100, 30_000
GENERATED_PATTERN, READ_TOKENS, WRITTEN = Pattern.streaming_llm(window=1024, sinks=4), 16_384, 32
PREFILLED_PATTERN, PROMPT, CHECKED = Pattern([1024, 4096, 16384], [1, 4, 16]), 16_384, 1024


@dataclass(frozen=True)
class ServingSizes(SuiteSizes):
    """Sizes of the `model` that gets a prompt, and writes."""

    threads: int = field(default=4, kw_only=True)
    model: Mapping[str, int] = field(default_factory=lambda: llama.SIZES)


def _padded(result: RowsResult) -> Values:
    ratios = (time_ratio("packed", way, PACKED, f"{{spread}}, {way}")(result) for way in (MASKED, PADDED))
    return {name: value for values in ratios for name, value in values.items()}


def _growth(result: RowsResult) -> Values:
    cases = [case for case in result.cases(DECODING, filled=False) if case.timed(CACHE)]
    if len(cases) < 2:
        return {}
    few, many = cases[0], cases[-1]
    name = f"{many.case['seen']:,} and {few.case['seen']:,} tokens"
    return {name: many.rows[CACHE].median_s / few.rows[CACHE].median_s}


def _bandwidth(result: RowsResult) -> Values:
    """Time of reading over that of a step, which reads as much."""
    cases = [case for case in result.cases(ONE_THREAD) if case.timed(READ, CACHE)]
    return {f"{case.rows[READ].values['kept_bytes'] / 1e6:,.1f} MB": case.ratio(READ, CACHE) for case in cases}


def _refused(result: RowsResult) -> str | None:
    return next((row.reasons[0] for row in result.rows if row.table == "prefill" and row.verdict == "refused"), None)


AFTER, OF_KV_HEADS = "{seen:,} tokens", "{kv_heads} key/value heads"
ON_ONE_THREAD = "time over that of DilatedCache, one thread"
TARGETS = (
    Target(
        "packed sequences, forward + backward: time over one by one", 1.0, 0.8,
        time_ratio("packed", PACKED, ALONE, "{spread}"), lower=True,
    ),
    Target("the same, padded to the longest: time over packed", 2.0, 3.0, _padded),
    Target("a step of DilatedCache: time after a million tokens over that after a thousand", 1.5, 1.1, _growth, lower=True),
    Target(
        "a step over a full cache by torch: time over that of DilatedCache", 20.0, 50.0,
        time_ratio(DECODING, FULL, CACHE, AFTER, filled=True),
    ),
    Target(
        "memory of DilatedCache over its bound", 1.0, None,
        each(MEMORY, stored(CACHE, ("allocated_bytes", "bound_bytes"), truediv)), unit="", lower=True, exact=True,
    ),
    Target("a step on one thread: share of the bandwidth at which memory is read", 0.5, 0.8, _bandwidth, unit=""),
    Target(
        "a step on one thread after a few tokens", 60.0, 30.0,
        each(ONE_THREAD, lambda case: 1e6 * case.rows[CACHE].median_s if case.timed(CACHE) else None, AFTER, after="few"), " us",
        lower=True,
    ),
    Target(
        f"torch over a full cache of a thousand tokens: {ON_ONE_THREAD}", 1.0, 2.0,
        time_ratio(ONE_THREAD, FULL, CACHE, AFTER, after="thousand"),
    ),
    Target(
        f"torch over a full cache of 131,007 tokens: {ON_ONE_THREAD}", 150.0, 500.0,
        time_ratio(ONE_THREAD, FULL, CACHE, AFTER, after="full"),
    ),
    Target(
        f"dilated_attention_with_kvcache: {ON_ONE_THREAD}", 1.3, 1.1, time_ratio(ONE_THREAD, KVCACHE, CACHE, AFTER), lower=True
    ),
    Target(
        "a step of 32 sequences in one call: time over steps of one each", 0.7, 0.4,
        time_ratio(MANY, PAGED, SINGLE, OF_KV_HEADS), lower=True,
    ),
    Target(
        "tokens of a model of transformers after 16K: time with its own cache over that with dilated_cache()", 3.0, 8.0,
        time_ratio(GENERATED, llama.DYNAMIC, llama.DILATED, OF_KV_HEADS),
    ),
    Target(
        "prefill of a Llama-shaped model: time of torch's dense attention over dilkit's", 3.0, 6.0,
        time_ratio("prefill", llama.DENSE, llama.OURS), missing=_refused,
    ),
)  # fmt: skip


def _steps(title: str, table: str) -> views.ResultTable:
    step = views.Column("time of a step", views.TIME.cell)
    columns = views.fact("what", "seen"), views.WHO, step, views.QUARTILES, views.SAMPLES, views.over(CACHE)
    return views.ResultTable(title, table, columns, note="{problem}")


PEAK = views.value("peak_bytes", "peak memory", "bytes")
PATTERN = "dilkit's attention: {pattern}"
STEPS_AXES = Axis("tokens seen", "tokens"), views.SECONDS
SIZES = dict(kept_bytes="kept", allocated_bytes="allocated", bound_bytes="bound", full_bytes="a full cache")
HELD = [views.value(name, header, "bytes") for name, header in SIZES.items()]
SAVED = views.Column("full / allocated", lambda row, case: f"{row.values['full_bytes'] / row.values['allocated_bytes']:.3g}")
REPORT = views.Report(
    place=PLACE,
    tables=(
        times("Packed sequences, causal, forward and backward", "packed", PACKED, PEAK, note=PATTERN),
        _steps("Decoding", DECODING),
        views.ResultTable(f"Memory of a {CACHE}", MEMORY, (views.fact("what", "seen"), *HELD, SAVED), timed=False),
        _steps("Decoding on one thread", ONE_THREAD),
        times("A step of many sequences, one thread", MANY, PAGED, note=PATTERN),
        times("Tokens of a model of transformers, one thread", GENERATED, llama.DILATED, note=PATTERN),
        times("Prefill", "prefill", llama.OURS, PEAK, note=PATTERN),
    ),
    plots=(
        views.PlotView("Time of a step of decoding", DECODING, "seen", views.time, STEPS_AXES, "lines", where=dict(filled=False)),
    ),
    sentences={
        TARGETS[0].name: "packed sequences take {} as long as one by one",
        TARGETS[3].name: "a step of decoding by torch over a full cache takes {} as long as with a DilatedCache",
        TARGETS[2].name: "a step with a DilatedCache takes {} as long after a million tokens as after a thousand",
        TARGETS[12].name: "prefill of a Llama-shaped model takes {} as long with torch's dense attention as with dilkit",
    },
    method="fp32; times are medians of samples taken in turns. Before it is timed, everyone is compared with another way to "
    "compute the same. Packed: sequences one by one get a call each, cut out before; those padded to the longest get a mask, or "
    "none: under causality no row sees the padding behind it. Decoding: a sample is several steps in a row, taken back "
    "afterwards; all points are timed in the same rounds. torch's attention sees all keys, in a cache of its own layout; "
    "dilated_attention_with_kvcache sees those of the pattern. Segments are full one token after the steps, in all branches: "
    "there a row sees the most. Memory of a DilatedCache is compared with the bound of docs/decoding.md. Reading what is kept is "
    "torch's sum over as many bytes; a step reads a row that several branches keep once. A model of "
    "transformers, with random weights, had read all tokens but one, which is not timed. Prefill: the same model, up to the "
    "logits of the last token; dense attention computes another function. Peak memory is the most that a call held beside "
    "weights and inputs, by the high-water mark of the process.",
)


@dataclass(frozen=True)
class ServingSuite(Suite):
    NAME = "serving"
    SUMMARY = "packed sequences, decoding and prefill, each beside what it replaces"
    TARGETS = TARGETS

    sizes: ServingSizes = field(default_factory=ServingSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        yield SuiteStep("prefill", "prefill of a model of Llama's shape", self.prefill, 4)
        yield SuiteStep(DECODING, "steps of decoding", self.decoding, 8)
        yield SuiteStep(ONE_THREAD, "steps on one thread, beside reading what is kept", self.single, 3)
        for kv_heads in KV_HEADS:
            yield SuiteStep(MANY, f"a step of many sequences, {kv_heads} key/value heads", partial(self.many, kv_heads), 2)
        for kv_heads in KV_HEADS:
            what = f"tokens of a model of transformers, {kv_heads} key/value heads"
            yield SuiteStep(GENERATED, what, partial(self.generated, kv_heads), 6)
        yield SuiteStep("packed", f"sequences of lengths that are {SPREAD}", self.packed, 4)

    @property
    def rounds(self) -> int:
        return min(self.repeats, MOST_ROUNDS)

    @property
    def model(self) -> str:
        return "{num_hidden_layers} layers x {hidden_size}".format(**self.sizes.model)

    def shorter(self, size: int) -> int:
        """Return a number of tokens; with --quick, divided."""
        return max(1, size // self.divisor)

    def shortened(self, pattern: Pattern) -> Pattern:
        """Return `pattern`; with --quick, its segments shortened."""
        return Pattern(divided(pattern.segment_lengths, pattern.dilation_rates, self.divisor), pattern.dilation_rates)

    def text(self, pattern: Pattern) -> calls.Text:
        return calls.Text(self.shortened(pattern), HEADS, HEAD_DIM)

    def lengths(self, count: int, shortest: int, longest: int) -> tuple[int, ...]:
        return calls.lengths_of(count, self.shorter(shortest), self.shorter(longest))

    def prefill(self) -> list[ResultRow]:
        pattern, prompt = self.shortened(PREFILLED_PATTERN), self.shorter(PROMPT)
        measured = llama.prefill(self.sizes.model, KV_HEADS[1], pattern, prompt, self.shorter(CHECKED), self.rounds)
        what = f"{self.model}, a prompt of {prompt:,} tokens"
        return _rows("prefill", dict(what=what, tokens=prompt), pattern, measured)

    def decoding(self) -> list[ResultRow]:
        text, count, limit = self.text(DECODED_PATTERN), self.shorter(STEPS), self.shorter(FULL_LENGTH)
        seen = [self.shorter(tokens) for tokens in SEEN]
        filled = [text.filled(most, count) for most in (limit, seen[-1])]
        full = calls.FullCache(text, limit)
        points = [
            calls.Steps(text, n, count, cache, full if n + count <= limit else None, n in filled)
            for n, cache in text.caches(sorted({*seen, *filled}))
        ]
        return calls.rows_of_steps(DECODING, points, self.repeats) + [one.memory(MEMORY) for one in points]

    def single(self) -> list[ResultRow]:
        """Measure steps on one thread: after a few tokens, after a thousand, and where all branches are full."""
        text, count, limit = self.text(KEPT_PATTERN), self.shorter(STEPS), self.shorter(FULL_LENGTH)
        full = calls.FullCache(text, limit)
        places = dict(few=self.shorter(FEW), thousand=self.shorter(THOUSAND), full=text.filled(limit, count))
        with torch_threads(1):
            caches = zip(places, text.caches([*places.values()]), strict=True)
            points = [calls.Steps(text, n, count, cache, full, at == "full", after=at) for at, (n, cache) in caches]
            points[-1].read_kept()
            return calls.rows_of_steps(ONE_THREAD, points, self.repeats)

    def many(self, kv_heads: int) -> list[ResultRow]:
        pattern, lengths = self.shortened(KEPT_PATTERN), self.lengths(*SERVED_LENGTHS)
        with torch_threads(1):
            measured = calls.many_sequences(pattern, lengths, HEADS, kv_heads, HEAD_DIM, self.rounds)
        case = dict(what=f"{_sequences(lengths)}, {HEADS} heads over {kv_heads} x {HEAD_DIM}", kv_heads=kv_heads)
        return _rows(MANY, case, pattern, measured)

    def generated(self, kv_heads: int) -> list[ResultRow]:
        read, written = self.shorter(READ_TOKENS), self.shorter(WRITTEN)
        with torch_threads(1):
            measured = llama.generated(self.sizes.model, kv_heads, GENERATED_PATTERN, read, written, self.rounds)
        heads = f"{self.sizes.model['num_attention_heads']} heads over {kv_heads}"
        case = dict(what=f"{self.model}, {heads}, {written} tokens after {read:,}", kv_heads=kv_heads)
        return _rows(GENERATED, case, GENERATED_PATTERN, measured)

    def packed(self) -> list[ResultRow]:
        pattern, lengths = self.shortened(PACKED_PATTERN), self.lengths(*PACKED_LENGTHS)
        measured = calls.packed_sequences(lengths, pattern, HEADS, HEAD_DIM, self.rounds)
        return _rows("packed", dict(what=f"{_sequences(lengths)}, {SPREAD}", spread=SPREAD), pattern, measured)


def _rows(table: str, case: dict[str, Any], pattern: Pattern, measured: CaseFields) -> list[ResultRow]:
    return rows_of(table, case, measured, {who: dict(pattern=str(pattern)) for who in measured["entries"]})


def _sequences(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} sequences of {min(lengths):,}-{max(lengths):,} tokens"
