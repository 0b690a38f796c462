"""`dilkit bench --suite slides`: GigaPath's slide encoder with random weights, fp32, on a CPU."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, unflatten
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dilkit import attention_mass, attention_rows
from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig
from dilkit.integrations.gigapath.layers import EncoderLayer
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check
from dilkit.tools.bench.configuration import divided
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import GIB, Target, each, memory_ratio, stored, time_ratio
from dilkit.tools.bench.workloads.ways import PLACE
from dilkit.tools.measure.baselines import branch_attention, merged
from dilkit.tools.measure.case import agreeing, agreement, call_once, checked, in_turns
from dilkit.tools.measure.timing import Call
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis
from dilkit.tools.results.rows import ResultRow, row_of, rows_of

PUBLISHED, OURS, BATCH, ALONE = "published procedure", "dilkit", "one batch", "one by one"
ONE, SEVERAL, LONG = "one slide", "several slides", "long slides"
FORWARD, MASS = "forward", "attention_mass"
ARCHITECTURE = "gigapath_slide_enc12l768d"
MOST_ROUNDS = 3
CHECKED = 600
"""Tiles of the slide on which `attention_mass` is compared with the weights of all rows."""


@dataclass(frozen=True)
class SlidesSizes(SuiteSizes):
    """Slides of so many `tiles`, a `long` one, and `several` in one batch, for an encoder of `several_depth` layers."""

    model: SlideEncoderConfig = ARCHITECTURES[ARCHITECTURE]
    tiles: int = 10_000
    long: int = 100_000
    several: tuple[int, ...] = (2_000, 5_000, 9_000, 20_000)
    several_depth: int = 3
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
        "several slides: time of one batch over that of one by one", 1.1, 1.0,
        time_ratio(SEVERAL, BATCH, ALONE, "{tiles}"), lower=True,
    ),
    Target(
        "attention_mass: extra memory, in tensors as large as the queries", 4.0, 2.0,
        each(LONG, IN_QUERIES, "{tiles}", passes=MASS), unit="", lower=True,
    ),
)  # fmt: skip


PEAK = views.value("peak_bytes", "peak memory", "bytes")
BOTH_WAYS = views.fact("tiles", "what"), views.fact("layers"), views.WHO, views.TIME, views.QUARTILES, views.SAMPLES, PEAK
BESIDE = views.value("peak_bytes", "memory beside weights and inputs", "bytes")
PASSES = views.Column("what", lambda row, case: case.label("{passes}, {tiles}"))
ONCE = PASSES, views.TIME, BESIDE, views.value("held_bytes", "weights and inputs", "bytes")
PEAKS = views.stored("peak_bytes"), (views.NAMES, Axis("peak memory", "bytes"))
REPORT = views.Report(
    place=PLACE,
    tables=(
        views.ResultTable("One slide, and several", (ONE, SEVERAL), BOTH_WAYS),
        views.ResultTable("Long slides", LONG, ONCE),
    ),
    plots=(views.PlotView("Peak memory beside weights and inputs", (ONE, LONG), "{tiles}", *PEAKS, where=dict(passes=FORWARD)),),
    sentences={
        TARGETS[0].name: "GigaPath's slide encoder by its published procedure takes {} as long as by dilkit",
        TARGETS[1].name: "and {} of the memory",
        TARGETS[2].name: "a slide of 100,000 tiles needs {} in all",
    },
    method=f"{ARCHITECTURE} with random weights, fp32, forward without gradients. The published procedure is written out in "
    "plain PyTorch, with the same weights: for each branch tensors are padded to whole segments, kept rows gathered, attended to "
    "by torch's flash attention for CPUs, and scattered into zeros; every layer takes all rows at once. Embeddings are compared "
    "first. Times are medians of samples taken in turns; long slides and attention_mass are measured once. Peak memory is the "
    "most that a call held beside weights and inputs, by the high-water mark of the process.",
)


@dataclass(frozen=True)
class SlidesSuite(Suite):
    NAME = "slides"
    SUMMARY = "GigaPath's slide encoder beside its published procedure"
    TARGETS = TARGETS

    sizes: SlidesSizes = field(default_factory=SlidesSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        yield SuiteStep(SEVERAL, "several slides, in one batch and one by one", self.several, 12)
        yield SuiteStep(ONE, "one slide, both ways", self.encoder, 24)
        yield SuiteStep(LONG, "attention_mass", self.mass, 8)
        yield SuiteStep(LONG, "a long slide, forward", self.long, 40)

    @property
    def config(self) -> SlideEncoderConfig:
        """The sizes of the model. --quick divides the lengths of segments too."""
        return shorter(self.sizes.model, self.divisor)

    def model(self, depth: int | None = None) -> SlideEncoder:
        """Return a model of so many layers, or of all, whose random weights are the same every time."""
        torch.manual_seed(0)
        return SlideEncoder(replace(self.config, depth=depth or self.config.depth)).eval()

    def encoder(self) -> list[ResultRow]:
        model, tiles = self.model(), self.sizes.tiles // self.divisor
        inputs = slide(tiles, self.config)
        calls = {PUBLISHED: lambda: published_embedding(model, *inputs), OURS: lambda: model(*inputs)[0]}
        return self.compared(ONE, calls, self.config.depth, tiles)

    def several(self) -> list[ResultRow]:
        tiles = [n // self.divisor for n in self.sizes.several]
        model, slides = self.model(self.sizes.several_depth), [slide(n, self.config) for n in tiles]
        features, coords = (pad_sequence([one[i][0] for one in slides], batch_first=True) for i in range(2))
        mask = torch.arange(features.shape[1]) >= torch.tensor(tiles)[:, None]
        calls = {
            ALONE: lambda: torch.cat([model(*one)[0] for one in slides]),
            BATCH: lambda: model(features, coords, mask)[0],
        }
        return self.compared(SEVERAL, calls, self.sizes.several_depth, *tiles)

    def compared(self, table: str, calls: Mapping[str, Callable[[], Tensor]], layers: int, *tiles: int) -> list[ResultRow]:
        """Compare the embeddings of all calls with those of the first, then time the calls in turns."""
        case = dict(passes=FORWARD, tiles=listed(*tiles), layers=layers)
        with torch.no_grad():
            return rows_of(table, case, in_turns(agreeing(calls, max(tiles)), calls, min(self.repeats, MOST_ROUNDS)))

    def mass(self) -> list[ResultRow]:
        """Measure `attention_mass` of a long slide, for queries and keys of one layer."""
        tiles, heads = self.sizes.long // self.divisor, self.config.num_heads
        dim = self.config.embed_dim // heads
        check = mass_check(self.config.pattern, heads, dim)
        query, key = torch.randn(2, 1, tiles + 1, heads, dim).unbind()
        call = partial(attention_mass, query, key, self.config.pattern)
        return self.once(MASS, tiles, call, query.nbytes + key.nbytes, check)

    def long(self) -> list[ResultRow]:
        model, tiles = self.model(), self.sizes.long // self.divisor
        inputs = slide(tiles, self.config)
        with torch.no_grad():
            held_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *inputs))
            return self.once(FORWARD, tiles, lambda: model(*inputs), held_bytes)

    def once(self, passes: str, tiles: int, call: Call, held_bytes: int, *checks: Check) -> list[ResultRow]:
        entry = checked(checks, call_once(call)[1])
        return [row_of(LONG, dict(passes=passes, tiles=listed(tiles)), OURS, entry, held_bytes=held_bytes)]


def listed(*tiles: int) -> str:
    """Return slides by their tiles, such as "2,000, 5,000 tiles"."""
    return f"{', '.join(f'{n:,}' for n in tiles)} tiles"


def slide(tiles: int, config: SlideEncoderConfig) -> tuple[Tensor, Tensor]:
    """Return features `(1, tiles, in_chans)` and coordinates `(1, tiles, 2)` of a slide, the same every time."""
    generator = torch.Generator().manual_seed(tiles)
    features = torch.randn(1, tiles, config.in_chans, generator=generator)
    cells = torch.randperm(config.ngrids**2, generator=generator)[:tiles]
    return features, config.tile_size * torch.stack((cells // config.ngrids, cells % config.ngrids), dim=1)[None]


def shorter(config: SlideEncoderConfig, divisor: int) -> SlideEncoderConfig:
    """Return the sizes with so many times shorter segments, for --quick."""
    return replace(config, segment_lengths=divided(config.segment_lengths, config.dilation_rates, divisor))


def mass_check(pattern: Pattern, heads: int, head_dim: int) -> Check:
    """Compare `attention_mass` with the sum of all rows of weights, on a short slide."""
    query, key = torch.randn(2, 1, CHECKED, heads, head_dim).unbind()
    exact = attention_rows(query.double(), key.double(), pattern, range(CHECKED)).sum(dim=2)
    return agreement("attention_mass", attention_mass(query, key, pattern), exact, CHECKED)


def published_embedding(model: SlideEncoder, tiles: Tensor, coords: Tensor) -> Tensor:
    """Embed one slide, `(1, embed_dim)`, by the published procedure with a model's weights: all rows in every layer."""
    x, _ = model.packed(tiles, coords)
    for layer in model.layers():
        x = x + layer.self_attn.projected(_seen(layer, x, model.config.pattern))
        x = x + layer.ffn(layer.final_layer_norm(x))
    x = model.encoder["layer_norm"](x)
    out: Tensor = model.norm(x[1:].mean(dim=0, keepdim=True) if model.config.global_pool else x[:1])
    return out


def _seen(layer: EncoderLayer, x: Tensor, pattern: Pattern) -> Tensor:
    """Compute a layer's attention with `tail="zeros"`: short segments are filled with rows of zeros."""
    query, key, value = (one.unsqueeze(0) for one in layer.self_attn.heads(layer.self_attn_layer_norm(x)))
    pairs = [(min(branch.segment_length, query.shape[1]), branch.dilation_rate) for branch in pattern.segments]
    branches = [_padded_branch(query, key, value, pattern, length, rate) for length, rate in pairs]
    return merged([out for out, _ in branches], [lse for _, lse in branches]).flatten(2).squeeze(0)


def _padded_branch(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, length: int, rate: int) -> tuple[Tensor, Tensor]:
    """Compute `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, heads, seq)` of a branch."""
    seq, whole = query.shape[1], length + -length % rate
    query, key, value = (_filled(x, length, whole) for x in (query, key, value))
    out, lse = branch_attention(query, key, value, Problem.of(query, key, pattern), whole, rate)
    rows = unflatten(out, 1, (-1, whole))[:, :, :length].flatten(1, 2)[:, :seq]
    return rows, unflatten(lse, 2, (-1, whole))[..., :length].flatten(2)[..., :seq]


def _filled(x: Tensor, length: int, whole: int) -> Tensor:
    """Return `x` in segments of `length` rows, each padded with zeros to `whole` rows."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % length))
    return F.pad(unflatten(x, 1, (-1, length)), (0, 0, 0, 0, 0, whole - length)).flatten(1, 2)
