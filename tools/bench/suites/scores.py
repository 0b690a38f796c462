"""`dilkit bench --suite scores`: biases by position and softcaps, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dilkit.bias.form import BiasForm
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import NO_OPTION, Sizes, Step, Suite, on_threads
from dilkit.tools.bench.target import Target, memory_ratio, time_ratio
from dilkit.tools.bench.workloads.ways import Way, case_rows, eager, native, with_given_matrix, with_matrix
from dilkit.tools.report.document import Axis
from dilkit.tools.report.views import (
    NAMES,
    QUARTILES,
    SAMPLES,
    TIME,
    WHO,
    PlotView,
    Report,
    TableView,
    fact,
    over,
    stored,
    value,
)
from dilkit.tools.results.rows import Row

PLAIN, ALIBI, COORDINATES, TABLE = "no bias", "ALiBi", "2-D ALiBi", "table"
OURS, MATRIX, GIVEN, EAGER = "dilkit", "torch, full matrix", "torch, matrix made before", "torch, eager"
FORWARD, TRAINED = "forward", "forward and backward"
PLANE = BiasForm(dims=2, metric="euclidean", placed=True)
LONG_ROUNDS = 3


@dataclass(frozen=True)
class ScoresSizes(Sizes):
    """Biases by kind at `configuration`; a slide of `tiles`, of which torch has room for so many `tile_heads`; a layer of
    `layer_seq` tokens with `layer_heads`, `layer_kv_heads` and a `softcap` as in Gemma 2. `table`: entries of one by distance.
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
    threads: int = 4


def _columns(base: str) -> Any:
    return fact("what"), WHO, TIME, QUARTILES, SAMPLES, over(base), value("peak_bytes", "memory", "bytes")


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
BESIDE_INPUTS = NAMES, Axis("memory beside the inputs", "bytes")
REPORT = Report(
    place="{device_name}, instruction set {isa}, {thread_count} threads of {cores} cores",
    tables=(
        TableView("Biases", "biases", _columns(PLAIN), note="{what}: {problem}"),
        TableView("A slide", "a slide", _columns(OURS), note="{what}: {problem}"),
        TableView("A layer", "a layer", _columns(OURS), note="{what}: {problem}"),
    ),
    plots=(
        PlotView("Time: biases", "biases", "{what}"),
        PlotView("Time: beside torch", ("a slide", "a layer"), "{what}"),
        PlotView("Memory: beside torch", ("a slide", "a layer"), "{what}", stored("peak_bytes"), BESIDE_INPUTS),
    ),
    sentences={
        TARGETS[6].name: "a slide with 2-D ALiBi by torch with a matrix takes {} as long as by dilkit",
        TARGETS[8].name: "a layer with a softcap by eager torch takes {} as long as by dilkit",
        TARGETS[0].name: "ALiBi costs {} the time without a bias",
    },
    method="fp32; times are medians of samples taken in turns. Before it is timed, every way is compared with the definition in "
    "fp64: all results at a short length, and random rows at full length. Slopes and tables are learned where there is a "
    "backward pass. torch's matrix of all pairs is made from slopes and coordinates in the call, as dilkit's distances are, "
    "or before; it takes so much memory that there are few heads. Eager torch multiplies, caps, masks and weighs in operators"
    " of their own. Memory is the most that a call held beside its inputs, by the high-water mark of the process, with the "
    "matrix where there is one.",
)


@dataclass(frozen=True)
class ScoresSuite(Suite):
    """The shortest measurements first."""

    NAME = "scores"
    SUMMARY = "biases by position and softcaps, beside no bias and beside torch with a matrix of all pairs"
    TARGETS = TARGETS
    MAY_FAIL = (MATRIX, GIVEN, EAGER)

    sizes: ScoresSizes = field(default_factory=ScoresSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        yield Step("a layer", "a layer like Gemma 2's, with a softcap", self.layer)
        yield Step("a slide", "a slide with 2-D ALiBi, by torch with a matrix too", self.slide, 2)
        yield Step("biases", "a bias of each kind, forward", partial(self.kinds, False), 3)
        yield Step("biases", "a bias of each kind, forward and backward", partial(self.kinds, True), 8)

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        return on_threads(self.sizes.threads)

    def case(self, table: str, what: str, ways: Mapping[str, Way], rounds: int) -> list[Row]:
        """Check the ways, then time them in turns."""
        return case_rows(table, what, ways, min(self.repeats, rounds))

    def kinds(self, backward: bool) -> list[Row]:
        """One problem without a bias, and with one of each kind."""
        plain = self.sizes.configuration.problem(self.sizes.head_dim, self.divisor, requires_grad=backward)
        forms = {PLAIN: None, ALIBI: BiasForm(), COORDINATES: PLANE, TABLE: BiasForm(sizes=(self.sizes.table,))}
        problems = {name: replace(plain, bias=form and replace(form, learned=backward)) for name, form in forms.items()}
        ways = {name: native(problem, Tensors.random(problem)) for name, problem in problems.items()}
        return self.case("biases", TRAINED if backward else FORWARD, ways, LONG_ROUNDS if backward else 5)

    def slide(self) -> list[Row]:
        """All pairs of tiles, biased by their distance."""
        seq = self.sizes.tiles // self.divisor
        sizes: dict[str, Any] = dict(seq=seq, heads=self.sizes.tile_heads, head_dim=self.sizes.head_dim)
        problem = Problem(pattern=Pattern.dense(), bias=PLANE, **sizes)
        makers = {OURS: native, MATRIX: with_matrix, GIVEN: with_given_matrix}
        ways = {name: make(problem, Tensors.random(problem)) for name, make in makers.items()}
        return self.case("a slide", f"{seq:,} tiles", ways, LONG_ROUNDS)

    def layer(self) -> list[Row]:
        """The attention of a layer, causal over all tokens."""
        heads: dict[str, Any] = dict(
            heads=self.sizes.layer_heads, kv_heads=self.sizes.layer_kv_heads, head_dim=self.sizes.layer_head_dim
        )
        seq, softcap = self.sizes.layer_seq // self.divisor, self.sizes.softcap
        problem = Problem(pattern=Pattern.dense(), seq=seq, is_causal=True, softcap=softcap, **heads)
        inputs = Tensors.random(problem)
        ways = {OURS: native(problem, inputs), EAGER: eager(problem, inputs)}
        return self.case("a layer", f"{seq:,} tokens", ways, LONG_ROUNDS)
