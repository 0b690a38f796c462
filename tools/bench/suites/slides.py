"""`dilkit bench --suite slides`: GigaPath's slide encoder with random weights, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dilkit import attention_mass
from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import GIB, Target, each, memory_ratio, stored, time_ratio
from dilkit.tools.bench.workloads.slide_calls import mass_check, published_embedding, shorter, slide
from dilkit.tools.bench.workloads.ways import PLACE
from dilkit.tools.measure.case import admit, agreeing, call_once, checked, compare, in_turns
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis, Table
from dilkit.tools.report.targets import number
from dilkit.tools.results.record import Entry, Samples
from dilkit.tools.results.rows import CaseRows, Row, RowsResult, row_of, rows_of

PUBLISHED, OURS, BATCH, ALONE = "published procedure", "dilkit", "one batch", "one by one"
ONE, SEVERAL, LONG, LAYER = "one slide", "several slides", "long slides", "attention of a layer"
FORWARD, TRAINED, MASS = "forward", "forward and backward", "attention_mass"
ARCHITECTURE, BACKENDS = "gigapath_slide_enc12l768d", ("native", "sdpa")
MOST_ROUNDS = 3
GUESSED_FLOPS_PER_S = 40e9


@dataclass(frozen=True)
class SlidesSizes(SuiteSizes):
    """Slides of so many `tiles`, a `long` one, and `several` in one batch, for an encoder of `several_depth` layers.

    `matmul`: rows of the matrices of the yardstick.
    """

    model: SlideEncoderConfig = ARCHITECTURES[ARCHITECTURE]
    tiles: int = 10_000
    long: int = 100_000
    several: tuple[int, ...] = (2_000, 5_000, 9_000, 20_000)
    several_depth: int = 3
    head_dims: tuple[int, ...] = (48, 64)
    matmul: int = 4096
    threads: int = field(default=4, kw_only=True)


HELD = stored(OURS, ("held_bytes", "peak_bytes"), lambda held, peak: (held + peak) / GIB)
"""Measure the memory of a call with weights and inputs, in GiB."""
IN_QUERIES = stored(OURS, ("held_bytes", "peak_bytes"), lambda held, peak: peak / (held // 2))
"""Measure the memory of a call beside its inputs, in tensors as large as the queries: the inputs are two of them."""
OF_PROCEDURE = "of the published procedure over dilkit's"
TARGETS = (
    Target(f"one slide, forward: time {OF_PROCEDURE}", 1.5, 2.5, time_ratio(ONE, PUBLISHED, OURS, "{tiles}")),
    Target(f"one slide, forward: peak memory {OF_PROCEDURE}", 1.5, 3.0, memory_ratio(ONE, PUBLISHED, OURS, "{tiles}")),
    Target(
        "a long slide: memory in all", 24.0, None, each(LONG, HELD, "{passes}, {tiles}", passes=FORWARD), " GiB", lower=True
    ),
    Target(
        "the same, with gradients and activation checkpointing", None, 24.0,
        each(LONG, HELD, "{passes}, {tiles}", passes=TRAINED), " GiB", lower=True,
        missing=lambda result: None if result.cases(LONG, passes=TRAINED) else "it takes long, and goes with --full",
    ),
    Target(
        "several slides: time of one batch over that of one by one", 1.1, 1.0,
        time_ratio(SEVERAL, BATCH, ALONE, "{tiles}"), lower=True,
    ),
    Target(
        "attention_mass: extra memory, in tensors as large as the queries", 4.0, 2.0,
        each(LONG, IN_QUERIES, "{tiles}", passes=MASS), unit="", lower=True,
    ),
)  # fmt: skip


def _by_head_dim(result: RowsResult) -> Iterator[Table]:
    """Backends by head_dim, each beside its rate at the largest one."""
    cases = result.cases(LAYER)
    largest = max(cases, key=lambda case: case.case["head_dim"], default=None)

    def share(row: Row, case: CaseRows) -> str:
        return number(row.gflops / largest.rows[row.who].gflops) if largest and largest.timed(row.who) else "-"

    columns = (views.Column("backend", views.WHO.cell), views.fact("head_dim"), views.TIME, views.GFLOPS, views.OF_MATMUL)
    relative = views.Column("rate / that at the largest head_dim", share)
    yield views.TableView("Attention of a layer, by head_dim", LAYER, (*columns, relative)).made(result)


DEFAULTS = SlidesSizes()
PEAK = views.value("peak_bytes", "peak memory", "bytes")
BOTH_WAYS = views.fact("tiles", "what"), views.fact("layers"), views.WHO, views.TIME, views.QUARTILES, views.SAMPLES, PEAK
BESIDE = views.value("peak_bytes", "memory beside weights and inputs", "bytes")
ONCE = views.label("what", "{passes}, {tiles}"), views.TIME, BESIDE, views.value("held_bytes", "weights and inputs", "bytes")
PEAKS = views.stored("peak_bytes"), (views.NAMES, Axis("peak memory", "bytes"))
RATES = views.gflops, (views.NAMES, Axis("GFLOP/s", "number"))
REPORT = views.Report(
    place=PLACE,
    tables=(
        views.TableView("One slide, and several", (ONE, SEVERAL), BOTH_WAYS),
        views.TableView("Long slides", LONG, ONCE),
        _by_head_dim,
    ),
    plots=(
        views.PlotView(f"Time of one slide, {DEFAULTS.model.depth} layers", ONE, "{tiles}"),
        views.PlotView(f"Time of several slides, {DEFAULTS.several_depth} layers", SEVERAL, "{tiles}"),
        views.PlotView("Peak memory beside weights and inputs", (ONE, LONG), "{tiles}", *PEAKS, where=dict(passes=FORWARD)),
        views.PlotView("Attention of a layer, nominal rate", LAYER, "{who}", *RATES, series="head_dim {head_dim}"),
    ),
    sentences={
        TARGETS[0].name: "GigaPath's slide encoder by its published procedure takes {} as long as by dilkit",
        TARGETS[1].name: "and {} of the memory",
        TARGETS[2].name: "a slide of 100,000 tiles needs {} in all",
    },
    method=f"{ARCHITECTURE} with random weights, fp32, forward without gradients. The published procedure is written out in "
    "plain PyTorch, with the same weights: for each branch tensors are padded to whole segments, kept rows gathered, attended to "
    "by torch's flash attention for CPUs, and scattered into zeros; every layer takes all rows at once. Embeddings are compared "
    "first. Times are medians of samples taken in turns; long slides and attention_mass are measured once. Peak memory is the "
    "most that a call held beside weights and inputs, by the high-water mark of the process. GFLOP/s "
    "count the pattern's nominal FLOPs; a backend that padded 48 numbers of a head to 64 would reach 0.75 of its rate at 64.",
)


@dataclass(frozen=True)
class SlidesSuite(Suite):
    """The shortest measurements first. `full`: with gradients too, which takes four times as long as all the rest."""

    NAME = "slides"
    SUMMARY = "GigaPath's slide encoder beside its published procedure"
    TARGETS = TARGETS

    full: bool = False
    sizes: SlidesSizes = field(default_factory=SlidesSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        for dim in self.sizes.head_dims:
            yield SuiteStep(LAYER, f"attention of a layer, head_dim {dim}", partial(self.head_dim, dim))
        yield SuiteStep(SEVERAL, "several slides, in one batch and one by one", self.several, 12)
        yield SuiteStep(ONE, "one slide, both ways", self.encoder, 24)
        yield SuiteStep(LONG, "attention_mass", self.mass, 8)
        yield SuiteStep(LONG, "a long slide, forward", partial(self.long, FORWARD), 40)
        if self.full:
            yield SuiteStep(LONG, "a long slide, with gradients and activation checkpointing", partial(self.long, TRAINED), 160)

    @property
    def config(self) -> SlideEncoderConfig:
        """The sizes of the model. --quick divides the lengths of segments too."""
        return shorter(self.sizes.model, self.divisor)

    def model(self, depth: int | None = None, checkpointing: bool = False) -> SlideEncoder:
        """A model of so many layers, or of all, with random weights, the same whenever it is made."""
        torch.manual_seed(0)
        return SlideEncoder(replace(self.config, depth=depth or self.config.depth), activation_checkpointing=checkpointing).eval()

    def head_dim(self, dim: int) -> list[Row]:
        """Backends on the attention of one layer, beside a matmul."""
        tiles = self.sizes.tiles // self.divisor
        problem = Problem(pattern=self.config.pattern, seq=tiles + 1, heads=self.config.num_heads, head_dim=dim)

        def admitted(one: Implementation, problem: Problem, inputs: Tensors) -> Entry:
            return admit(one, problem, inputs, self.budget, lambda: one.flops(problem) / GUESSED_FLOPS_PER_S)

        posed = {one.name: (one, problem) for one in backend_implementations(BACKENDS)}
        ceilings = partial(Ceilings, "float32", size=self.sizes.matmul // self.divisor)
        measured = compare(posed, partial(time_interleaved, repeats=self.rounds, warmup=0), ceilings, admitted)
        return rows_of(LAYER, dict(head_dim=dim, tiles=listed(tiles)), measured)

    def encoder(self) -> list[Row]:
        """One slide by the published procedure and by dilkit."""
        model, tiles = self.model(), self.sizes.tiles // self.divisor
        inputs = slide(tiles, self.config)
        calls = {PUBLISHED: lambda: published_embedding(model, *inputs), OURS: lambda: model(*inputs)[0]}
        return self.compared(ONE, calls, self.config.depth, tiles)

    def several(self) -> list[Row]:
        """Several slides in one batch and one by one."""
        tiles = [n // self.divisor for n in self.sizes.several]
        model, slides = self.model(self.sizes.several_depth), [slide(n, self.config) for n in tiles]
        features, coords = (pad_sequence([one[i][0] for one in slides], batch_first=True) for i in range(2))
        mask = torch.arange(features.shape[1]) >= torch.tensor(tiles)[:, None]
        calls = {
            ALONE: lambda: torch.cat([model(*one)[0] for one in slides]),
            BATCH: lambda: model(features, coords, mask)[0],
        }
        return self.compared(SEVERAL, calls, self.sizes.several_depth, *tiles)

    def compared(self, table: str, calls: Mapping[str, Callable[[], Tensor]], layers: int, *tiles: int) -> list[Row]:
        """Compare the embeddings of all calls with those of the first, then time the calls in turns."""
        case = dict(passes=FORWARD, tiles=listed(*tiles), layers=layers)
        with torch.no_grad():
            return rows_of(table, case, in_turns(agreeing(calls, max(tiles)), calls, self.rounds))

    def mass(self) -> list[Row]:
        """Measure `attention_mass` of a long slide, for queries and keys of one layer."""
        tiles, heads = self.sizes.long // self.divisor, self.config.num_heads
        dim = self.config.embed_dim // heads
        check = mass_check(self.config.pattern, heads, dim)
        query, key = torch.randn(2, 1, tiles + 1, heads, dim).unbind()
        call = partial(attention_mass, query, key, self.config.pattern)
        return self.once(MASS, tiles, call, query.nbytes + key.nbytes, check)

    def long(self, passes: str) -> list[Row]:
        """One long slide, once."""
        model, tiles = self.model(checkpointing=passes == TRAINED), self.sizes.long // self.divisor
        inputs = slide(tiles, self.config)

        def call() -> None:
            out = model(*inputs)[0]
            if passes == TRAINED:
                torch.autograd.backward(out.sum())

        with torch.set_grad_enabled(passes == TRAINED):
            return self.once(passes, tiles, call, sum(tensor.nbytes for tensor in (*model.parameters(), *inputs)))

    def once(self, passes: str, tiles: int, call: Call, held_bytes: int, *checks: Check) -> list[Row]:
        """Measure one call, once."""
        one = call_once(call)
        entry = one.remembered(checked(checks))
        if entry.verdict == "measured":
            entry = replace(entry, time=Samples.of([one.seconds]))
        return [row_of(LONG, dict(passes=passes, tiles=listed(tiles)), OURS, entry, held_bytes=held_bytes)]

    @property
    def rounds(self) -> int:
        """Samples of each call."""
        return min(self.repeats, MOST_ROUNDS)


def listed(*tiles: int) -> str:
    """Tiles of slides in words, such as "2,000, 5,000 tiles"."""
    return f"{', '.join(f'{n:,}' for n in tiles)} tiles"
