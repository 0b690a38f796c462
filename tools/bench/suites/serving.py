"""`dilkit bench --suite serving`: packed sequences, decoding and prefill, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Any

from dilkit.pattern import Pattern
from dilkit.threads import torch_threads
from dilkit.tools.bench.configuration import divided
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import Target, Values, each, stored, time_ratio
from dilkit.tools.bench.workloads import llama
from dilkit.tools.bench.workloads import serving_calls as calls
from dilkit.tools.bench.workloads.serving_calls import ALONE, CACHE, FULL, KVCACHE, MASKED, PACKED, PADDED, PAGED, READ, SINGLE
from dilkit.tools.bench.workloads.ways import PLACE, times
from dilkit.tools.measure.case import CaseFields
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis, Plot, Series
from dilkit.tools.report.points import plain
from dilkit.tools.results.rows import Row, RowsResult, rows_of

DECODING, ONE_THREAD, MEMORY, INT8 = "decoding", "one thread", "memory of a cache", "rows kept as int8"
MANY, GENERATED = "many sequences", "generated"
MOST_ROUNDS = 3
PACKED_PATTERN = Pattern([1024, 2048, 4096], [1, 2, 4])
DECODED_PATTERN = Pattern([2048, 8192, 32768], [1, 4, 16])
KEPT_PATTERN = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
GENERATED_PATTERN = Pattern.streaming_llm(window=1024, sinks=4)
PREFILLED_PATTERN = Pattern([1024, 4096, 16384], [1, 4, 16])


@dataclass(frozen=True)
class ServingSizes(SuiteSizes):
    """So many `sequences` of `shortest` to `longest` tokens are packed.

    On one thread, steps of the pattern `kept` follow on `few` tokens, a `thousand` and `full`; `served` sequences of such lengths
    have a step together, with so many `kv_heads`. A model of transformers, with as many, whose layers see `generated`, writes so
    many tokens (`written`) after `read`.

    So many `steps` of decoding are a sample; before them, tokens were `seen`; a cache of all keys is as long as `full`. A `model`
    gets a `prompt` of so many tokens, and is `checked` on so many of its beginning.
    """

    heads: int = 8
    head_dim: int = 64
    threads: int = field(default=4, kw_only=True)
    packed: Pattern = PACKED_PATTERN
    sequences: int = 64
    shortest: int = 64
    longest: int = 4096
    decoded: Pattern = DECODED_PATTERN
    steps: int = 64
    full: int = 131_072
    seen: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
    kept: Pattern = KEPT_PATTERN
    few: int = 16
    thousand: int = 1_000
    served: int = 32
    served_shortest: int = 100
    served_longest: int = 30_000
    kv_heads: tuple[int, ...] = (8, 2)
    generated: Pattern = GENERATED_PATTERN
    read: int = 16_384
    written: int = 32
    prefilled: Pattern = PREFILLED_PATTERN
    model: llama.LlamaConfig = field(default_factory=llama.LlamaConfig)
    prompt: int = 16_384
    checked: int = 1024


def _padded(result: RowsResult) -> Values:
    ratios = (time_ratio("packed", way, PACKED, f"{{spread}}, {way}")(result) for way in (MASKED, PADDED))
    return {name: value for values in ratios for name, value in values.items()}


def _growth(result: RowsResult) -> Values:
    """The step after the most tokens over that after the fewest."""
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


SEEN, KV_HEADS = "{seen:,} tokens", "{kv_heads} key/value heads"
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
        time_ratio(DECODING, FULL, CACHE, SEEN, filled=True),
    ),
    Target(
        "memory of DilatedCache over its bound", 1.0, None,
        each(MEMORY, stored(CACHE, ("allocated_bytes", "bound_bytes"), truediv)), unit="", lower=True, exact=True,
    ),
    Target("a step on one thread: share of the bandwidth at which memory is read", 0.5, 0.8, _bandwidth, unit=""),
    Target(
        "a step on one thread after a few tokens", 60.0, 30.0,
        each(ONE_THREAD, lambda case: 1e6 * case.rows[CACHE].median_s if case.timed(CACHE) else None, SEEN, after="few"), " us",
        lower=True,
    ),
    Target(
        f"torch over a full cache of a thousand tokens: {ON_ONE_THREAD}", 1.0, 2.0,
        time_ratio(ONE_THREAD, FULL, CACHE, SEEN, after="thousand"),
    ),
    Target(
        f"torch over a full cache of 131,007 tokens: {ON_ONE_THREAD}", 150.0, 500.0,
        time_ratio(ONE_THREAD, FULL, CACHE, SEEN, after="full"),
    ),
    Target(
        f"dilated_attention_with_kvcache: {ON_ONE_THREAD}", 1.3, 1.1, time_ratio(ONE_THREAD, KVCACHE, CACHE, SEEN), lower=True
    ),
    Target(
        "a step of 32 sequences in one call: time over steps of one each", 0.7, 0.4,
        time_ratio(MANY, PAGED, SINGLE, KV_HEADS), lower=True,
    ),
    Target(
        "tokens of a model of transformers after 16K: time with its own cache over that with dilated_cache()", 3.0, 8.0,
        time_ratio(GENERATED, llama.DYNAMIC, llama.DILATED, KV_HEADS),
    ),
    Target(
        "rows kept as int8: memory over float32's", 0.27, None,
        each(INT8, stored(CACHE, ("kept_bytes", "plain_bytes"), truediv)), unit="", lower=True,
    ),
    Target(
        "rows kept as int8: error of a step, relative", 0.01, None,
        each(INT8, stored(CACHE, ("error",), float)), unit="", lower=True,
    ),
    Target(
        "prefill of a Llama-shaped model: time of torch's dense attention over dilkit's", 3.0, 6.0,
        time_ratio("prefill", llama.DENSE, llama.OURS),
    ),
)  # fmt: skip


def _steps(title: str, table: str) -> views.TableView:
    step = views.Column("time of a step", views.TIME.cell)
    columns = views.fact("what", "seen"), views.WHO, step, views.QUARTILES, views.SAMPLES, views.over(CACHE)
    return views.TableView(title, table, columns, note="{problem}")


def _memory_plot(result: RowsResult) -> Iterator[Plot]:
    """Memory over the tokens seen."""
    cases = result.cases(MEMORY, filled=False)

    def line(name: str, key: str, dashed: bool = False) -> Series:
        return Series(name, tuple(plain(case.case["seen"], case.rows[CACHE].values[key]) for case in cases), dashed)

    lines = line(CACHE, "allocated_bytes"), line("a full cache", "full_bytes"), line("the bound", "bound_bytes", dashed=True)
    yield Plot("Memory of a cache", "lines", lines, (TOKENS_SEEN, Axis("memory", "bytes")))


PEAK = views.value("peak_bytes", "peak memory", "bytes")
PATTERN = "dilkit's attention: {pattern}"
TOKENS_SEEN = Axis("tokens seen", "tokens")
STEPS_AXES = TOKENS_SEEN, views.SECONDS
SIZES = dict(kept_bytes="kept", allocated_bytes="allocated", bound_bytes="bound", full_bytes="a full cache")
HELD = [views.value(name, header, "bytes") for name, header in SIZES.items()]
SAVED = views.Column("full / allocated", lambda row, case: f"{row.values['full_bytes'] / row.values['allocated_bytes']:.3g}")
REPORT = views.Report(
    place=PLACE,
    tables=(
        times("Packed sequences, causal, forward and backward", "packed", PACKED, PEAK, note=PATTERN),
        _steps("Decoding", DECODING),
        views.TableView(f"Memory of a {CACHE}", MEMORY, (views.fact("what", "seen"), *HELD, SAVED), timed=False),
        _steps("Decoding on one thread", ONE_THREAD),
        times("A step of many sequences, one thread", MANY, PAGED, note=PATTERN),
        times("Tokens of a model of transformers, one thread", GENERATED, llama.DILATED, note=PATTERN),
        times("Prefill", "prefill", llama.OURS, PEAK, note=PATTERN),
    ),
    plots=(
        views.PlotView("Time of a step of decoding", DECODING, "seen", views.time, STEPS_AXES, "lines", where=dict(filled=False)),
        _memory_plot,
        views.PlotView("Time of packed sequences", "packed", "{spread}"),
        views.PlotView("Time of prefill", "prefill", "{tokens:,} tokens"),
    ),
    sentences={
        TARGETS[0].name: "packed sequences take {} as long as one by one",
        TARGETS[3].name: "a step of decoding by torch over a full cache takes {} as long as with a DilatedCache",
        TARGETS[2].name: "a step with a DilatedCache takes {} as long after a million tokens as after a thousand",
        TARGETS[14].name: "prefill of a Llama-shaped model takes {} as long with torch's dense attention as with dilkit",
    },
    method="fp32; times are medians of samples taken in turns. Before it is timed, everyone is compared with another way to "
    "compute the same. Packed: sequences one by one get a call each, and no time is spent on cutting them out; those "
    "padded to the longest get a mask, or none: under causality no row sees the padding behind it. Decoding: a sample is "
    "several steps in a row, all points are timed in the same rounds, and the steps are taken back between samples. Every "
    "token seen was attended to, in rows of random numbers. torch's attention sees all keys, in a cache of its own layout "
    "to which new ones are written in place; dilated_attention_with_kvcache sees those of the pattern. Segments are full "
    "where they end, in all branches, one token after the steps: there a row sees the most. Memory of a DilatedCache is "
    "compared with the bound of docs/decoding.md. On one thread: reading what is kept is torch's sum over as many bytes, "
    "again and again, as steps read them; a step may take less, because it reads a row that several branches keep once. "
    "Steps of many sequences are of one more token each time. A model of transformers, with random weights, had read all "
    "tokens but one, which is not timed; its own cache keeps them all. Prefill: a model of Llama's shape with random "
    "weights, up to the logits of the last token; dense attention in the place of dilkit's computes another function, and "
    "without attention it is the time of all else. Peak memory is the most that a call held beside weights and inputs, by "
    "the high-water mark of the process.",
)


@dataclass(frozen=True)
class ServingSuite(Suite):
    """The shortest measurements first."""

    NAME = "serving"
    SUMMARY = "packed sequences, decoding and prefill, each beside what it replaces"
    TARGETS = TARGETS

    sizes: ServingSizes = field(default_factory=ServingSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        yield SuiteStep("prefill", "prefill of a model of Llama's shape", self.prefill, 4)
        yield SuiteStep(DECODING, "steps of decoding", self.decoding, 8)
        yield SuiteStep(ONE_THREAD, "steps on one thread, beside reading what is kept", self.single, 3)
        yield SuiteStep(INT8, "steps with rows kept as int8", self.stored, 1)
        for kv_heads in self.sizes.kv_heads:
            yield SuiteStep(MANY, f"a step of many sequences, {kv_heads} key/value heads", partial(self.many, kv_heads), 2)
        for kv_heads in self.sizes.kv_heads:
            what = f"tokens of a model of transformers, {kv_heads} key/value heads"
            yield SuiteStep(GENERATED, what, partial(self.generated, kv_heads), 6)
        for spread, weight in (("geometrically spaced", 4), ("evenly spaced", 8)):
            yield SuiteStep("packed", f"sequences of lengths that are {spread}", partial(self.packed, spread), weight)

    @property
    def rounds(self) -> int:
        """Samples of long calls."""
        return min(self.repeats, MOST_ROUNDS)

    @property
    def steps_of_a_sample(self) -> int:
        """Steps of decoding in a sample."""
        return max(1, self.sizes.steps // self.divisor)

    def shortened(self, pattern: Pattern) -> Pattern:
        """`pattern`; with --quick, its segments shortened."""
        return Pattern(divided(pattern.segment_lengths, pattern.dilation_rates, self.divisor), pattern.dilation_rates)

    def text(self, pattern: Pattern) -> calls.Text:
        """Random rows for a pattern, shortened with --quick."""
        return calls.Text(self.shortened(pattern), self.sizes.heads, self.sizes.head_dim)

    def prefill(self) -> list[Row]:
        """A model of Llama's shape on a prompt, with either attention. It is checked on the beginning of the prompt."""
        config, pattern = self.sizes.model, self.shortened(self.sizes.prefilled)
        prompt = self.sizes.prompt // self.divisor
        measured = llama.prefill(config, pattern, prompt, self.sizes.checked // self.divisor, self.rounds)
        what = f"{config.layers} layers x {config.width}, a prompt of {prompt:,} tokens"
        return _rows("prefill", dict(what=what, tokens=prompt), pattern, measured)

    def decoding(self) -> list[Row]:
        """Steps after more and more tokens, all in the same rounds."""
        text, count, limit = self.text(self.sizes.decoded), self.steps_of_a_sample, self.sizes.full // self.divisor
        seen = [n // self.divisor for n in self.sizes.seen]
        filled = [text.filled(most, count) for most in (limit, seen[-1])]
        full = calls.FullCache(text, limit)
        points = [
            calls.Steps(text, n, count, cache, full if n + count <= limit else None)
            for n, cache in text.caches(sorted({*seen, *filled}))
        ]
        cases = [_case_of(one.seen, one.seen in filled) for one in points]
        steps = calls.rows_of_steps(DECODING, points, cases, self.repeats)
        return steps + [one.memory(MEMORY, case) for one, case in zip(points, cases, strict=True)]

    def single(self) -> list[Row]:
        """Steps on one thread: after a few tokens, after a thousand, and where all branches are full."""
        text, count, limit = self.text(self.sizes.kept), self.steps_of_a_sample, self.sizes.full // self.divisor
        full = calls.FullCache(text, limit)
        places = dict(few=max(1, self.sizes.few // self.divisor), thousand=self.sizes.thousand // self.divisor)
        places["full"] = text.filled(limit, count)
        with torch_threads(1):
            points = [calls.Steps(text, n, count, cache, full) for n, cache in text.caches([*places.values()])]
            points[-1].read_kept()
            cases = [_case_of(seen, after == "full") | dict(after=after) for after, seen in places.items()]
            return calls.rows_of_steps(ONE_THREAD, points, cases, self.repeats)

    def stored(self) -> list[Row]:
        """Rows kept in fewer bytes, where all branches have some."""
        text = self.text(self.sizes.kept)
        values = calls.stored_rows(text, text.period - 1, "int8")
        return [Row(table=INT8, case=dict(what="int8"), who=CACHE, values=values)]

    def many(self, kv_heads: int) -> list[Row]:
        """Sequences of geometrically spaced lengths, on one thread."""
        pattern, heads, dim = self.shortened(self.sizes.kept), self.sizes.heads, self.sizes.head_dim
        shortest, longest = max(1, self.sizes.served_shortest // self.divisor), self.sizes.served_longest // self.divisor
        lengths = calls.lengths_of(self.sizes.served, shortest, longest, geometric=True)
        with torch_threads(1):
            measured = calls.many_sequences(pattern, lengths, heads, kv_heads, dim, self.rounds)
        case = dict(what=f"{_sequences(lengths)}, {heads} heads over {kv_heads} x {dim}", kv_heads=kv_heads)
        return _rows(MANY, case, pattern, measured)

    def generated(self, kv_heads: int) -> list[Row]:
        """Tokens after a long text, on one thread."""
        config, pattern = self.sizes.model, self.sizes.generated
        read, written = self.sizes.read // self.divisor, max(1, self.sizes.written // self.divisor)
        with torch_threads(1):
            measured = llama.generated(config, kv_heads, pattern, read, written, self.rounds)
        model = f"{config.layers} layers x {config.width}, {config.heads} heads over {kv_heads}"
        case = dict(what=f"{model}, {written} tokens after {read:,}", kv_heads=kv_heads)
        return _rows(GENERATED, case, pattern, measured)

    def packed(self, spread: str) -> list[Row]:
        """Sequences packed, one by one and padded."""
        geometric, pattern = spread.startswith("geometrically"), self.shortened(self.sizes.packed)
        shortest, longest = self.sizes.shortest // self.divisor, self.sizes.longest // self.divisor
        lengths = calls.lengths_of(self.sizes.sequences, shortest, longest, geometric)
        measured = calls.packed_sequences(lengths, pattern, self.sizes.heads, self.sizes.head_dim, self.rounds)
        return _rows("packed", dict(what=f"{_sequences(lengths)}, {spread}", spread=spread), pattern, measured)


def _rows(table: str, case: dict[str, Any], pattern: Pattern, measured: CaseFields) -> list[Row]:
    """Rows of a case, each with the pattern of dilkit's attention."""
    return rows_of(table, case, measured, {who: dict(pattern=str(pattern)) for who in measured["entries"]})


def _case_of(seen: int, filled: bool) -> dict[str, Any]:
    return dict(what=f"{seen:,} tokens{', segments full' * filled}", seen=seen, filled=filled)


def _sequences(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} sequences of {min(lengths):,}-{max(lengths):,} tokens"
