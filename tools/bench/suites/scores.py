"""`dilkit bench --suite scores`: biases by position and softcaps, fp32, on a CPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dilkit.bias.form import BiasForm
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import Target, memory_ratio, time_ratio
from dilkit.tools.bench.workloads import ways
from dilkit.tools.bench.workloads.ways import PLACE, times
from dilkit.tools.report import views

PLAIN, ALIBI, COORDINATES, TABLE = "no bias", "ALiBi", "2-D ALiBi", "table"
OURS, MATRIX, EAGER = "dilkit", "torch, full matrix", "torch, eager"
FORWARD, TRAINED = "forward", "forward and backward"
PLANE = BiasForm(dims=2, metric="euclidean", placed=True)
LONG_ROUNDS = 3


@dataclass(frozen=True)
class ScoresSizes(SuiteSizes):
    """Biases by kind at `configuration`; a slide of `tiles`; a layer of `layer_seq` tokens with a `softcap` as in Gemma 2.

    Of the slide torch has room for `tile_heads` heads. `table`: entries of one by distance.
    """

    configuration: Configuration = CONFIGURATIONS["A"]
    head_dim: int = 64
    table: int = 257
    tiles: int = 20_000
    tile_heads: int = 2
    layer_seq: int = 8192
    layer_heads: int = 8
    layer_kv_heads: int = 4
    layer_head_dim: int = 256
    softcap: float = 50.0
    threads: int = field(default=4, kw_only=True)


def _costs(what: str, limits: Mapping[str, tuple[float, float]]) -> Iterator[Target]:
    for kind, (must, aim) in limits.items():
        read = time_ratio("biases", kind, PLAIN, "{what}", what=what)
        yield Target(f"{what}, {kind}: time over that without a bias", must, aim, read, lower=True)


SLIDE, LAYER = "a slide, dense with 2-D ALiBi", "a layer with a softcap"
TARGETS = (
    *_costs(FORWARD, {ALIBI: (1.08, 1.03), COORDINATES: (1.35, 1.2), TABLE: (1.25, 1.1)}),
    *_costs(TRAINED, {ALIBI: (1.1, 1.05), COORDINATES: (1.4, 1.25), TABLE: (1.4, 1.2)}),
    Target(f"{SLIDE}: time of torch with a matrix over dilkit's", 1.5, 2.5, time_ratio("a slide", MATRIX, OURS)),
    Target(f"{SLIDE}: memory of torch with a matrix over dilkit's", 50, 500, memory_ratio("a slide", MATRIX, OURS)),
    Target(f"{LAYER}: time of eager torch over dilkit's", 4.0, 8.0, time_ratio("a layer", EAGER, OURS)),
    Target(f"{LAYER}: memory of eager torch over dilkit's", 20, 100, memory_ratio("a layer", EAGER, OURS)),
)


MEMORY = views.value("peak_bytes", "memory", "bytes")
REPORT = views.Report(
    place=PLACE,
    tables=(
        times("Biases", "biases", PLAIN, MEMORY),
        times("A slide", "a slide", OURS, MEMORY),
        times("A layer", "a layer", OURS, MEMORY),
    ),
    plots=(views.PlotView("Time: biases", "biases", "{what}"),),
    sentences={
        TARGETS[6].name: "a slide with 2-D ALiBi by torch with a matrix takes {} as long as by dilkit",
        TARGETS[8].name: "a layer with a softcap by eager torch takes {} as long as by dilkit",
        TARGETS[0].name: "ALiBi costs {} the time without a bias",
    },
    method="fp32; times are medians of samples taken in turns. Before it is timed, every way is compared with the definition in "
    "fp64. Slopes and tables are learned where there is a backward pass. torch's matrix of all pairs is made in the call, as "
    "dilkit's distances are; it leaves memory for few heads. Eager torch multiplies, caps, masks and weighs in "
    "operators of their own. Memory is the most that a call held beside its inputs, the matrix counted.",
)


@dataclass(frozen=True)
class ScoresSuite(Suite):
    NAME = "scores"
    SUMMARY = "biases by position and softcaps, beside no bias and beside torch with a matrix of all pairs"
    TARGETS = TARGETS
    MAY_FAIL = (MATRIX, EAGER)

    sizes: ScoresSizes = field(default_factory=ScoresSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        sizes, kernel = self.sizes, ways.NATIVE
        heads: dict[str, Any] = dict(heads=sizes.layer_heads, kv_heads=sizes.layer_kv_heads, head_dim=sizes.layer_head_dim)
        seq = sizes.layer_seq // self.divisor
        problem = Problem(pattern=Pattern.dense(), seq=seq, is_causal=True, softcap=sizes.softcap, **heads)
        posed = {OURS: (kernel, problem), EAGER: (ways.EAGER, problem)}
        long = min(self.repeats, LONG_ROUNDS)
        yield ways.step("a layer", "a layer like Gemma 2's, with a softcap", f"{seq:,} tokens", posed, long, 1)
        seq = sizes.tiles // self.divisor
        problem = Problem(pattern=Pattern.dense(), bias=PLANE, seq=seq, heads=sizes.tile_heads, head_dim=sizes.head_dim)
        posed = {OURS: (kernel, problem), MATRIX: (ways.MATRIX, problem)}
        yield ways.step("a slide", "a slide with 2-D ALiBi, by torch with a matrix too", f"{seq:,} tiles", posed, long, 2)
        forms = {PLAIN: None, ALIBI: BiasForm(), COORDINATES: PLANE, TABLE: BiasForm(sizes=(sizes.table,))}
        for backward, what, weight, rounds in ((False, FORWARD, 3, min(self.repeats, 5)), (True, TRAINED, 8, long)):
            plain = sizes.configuration.problem(sizes.head_dim, self.divisor, requires_grad=backward)
            problems = {name: replace(plain, bias=form and replace(form, learned=backward)) for name, form in forms.items()}
            posed = {name: (kernel, problem) for name, problem in problems.items()}
            yield ways.step("biases", f"a bias of each kind, {what}", what, posed, rounds, weight)
