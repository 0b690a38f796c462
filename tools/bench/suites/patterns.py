"""`dilkit bench --suite patterns`: windows, global tokens and block lists beside other ways to compute them, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from dilkit.pattern import BlockSparse, DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.suite import NO_OPTION, Sizes, Step, Suite, on_threads
from dilkit.tools.bench.target import GIB, Target, Values, memory_ratio, rate_ratio, time_ratio
from dilkit.tools.bench.workloads.ways import MakeWay, Way, block_list, blocks_seen, case_rows, flex, masked, native, one_by_one
from dilkit.tools.report.document import Axis
from dilkit.tools.report.views import (
    GFLOPS,
    NAMES,
    QUARTILES,
    SAMPLES,
    TIME,
    WHO,
    PlotView,
    Report,
    TableView,
    fact,
    gflops,
    over,
    stored,
    value,
)
from dilkit.tools.results.rows import Row, RowsResult

OURS, THREE = "dilkit", "three calls, merged"
FLEX, MASKED, RENEWED = "FlexAttention", "torch, masked", "dilkit, a new layout each call"
WINDOW, SEGMENTS = "window", "segments"
MOST_ROUNDS, LONG_ROUNDS = 5, 3


@dataclass(frozen=True)
class PatternsSizes(Sizes):
    """Most cases are of `tokens`, `heads`, `head_dim` and a `window` of so many tokens; `long` and `short` sequences of one head.

    `mixes`: lengths, in windows, and dilation rates of the segments that are mixed with a window and `mixed_globals` global
    tokens. `block`: tokens of a block of BigBird; `masked_heads`: so many fit in memory with a mask of all pairs.
    `chosen_heads`: heads where each call gives the blocks, one in `chosen_share`.
    """

    tokens: int = 32_768
    heads: int = 8
    head_dim: int = 64
    window: int = 1024
    mixes: tuple[tuple[int, int], ...] = ((2, 1), (8, 8))
    mixed_globals: int = 16
    block: int = 64
    masked_heads: int = 2
    chosen_heads: int = 4
    chosen_share: int = 16
    long: int = 1_000_000
    short: int = 65_536
    long_globals: int = 64
    threads: int = 4


def _held(result: RowsResult) -> Values:
    """Memory of the longest sequence with its inputs, in GiB."""
    longest = [list(case.rows.values())[-1] for case in result.cases("lengths")]
    return {row.who: row.values["memory_bytes"] / GIB for row in longest if row.values.get("memory_bytes")}


def _linear(result: RowsResult) -> Values:
    """Rate of the longest sequence over that of the shortest."""
    rates = {}
    for case in result.cases("lengths"):
        short, long = [who for who in case.rows if who.endswith("tokens")]
        if case.timed(short, long):
            rates[f"{long} and {short}"] = case.rows[long].gflops / case.rows[short].gflops
    return rates


BLOCKS, BY_TORCH = "blocks of each call, forward and backward", "of torch's attention with a mask over dilkit's"
THREE_KINDS = "window, global tokens and segments"
TARGETS = (
    Target("a window: time of FlexAttention, compiled, over dilkit's", 2.0, 4.0, time_ratio("windows", FLEX, OURS)),
    Target(f"{THREE_KINDS}: time of three calls, merged, over one pass", 1.2, 1.5, time_ratio("mixes", THREE, OURS)),
    Target("rate of a window over that of whole segments of the same work", 0.7, 0.9, rate_ratio("rates", WINDOW, SEGMENTS)),
    Target(f"BigBird: time {BY_TORCH}", 10.0, 20.0, time_ratio("BigBird", MASKED, OURS)),
    Target(f"BigBird: memory {BY_TORCH}", 20.0, 50.0, memory_ratio("BigBird", MASKED, OURS)),
    Target(f"{BLOCKS}: time {BY_TORCH}", 8.0, 14.0, time_ratio("layouts", MASKED, OURS)),
    Target(f"{BLOCKS}: memory {BY_TORCH}", 20.0, 100.0, memory_ratio("layouts", MASKED, OURS)),
    Target(
        "blocks of each call: time with a new layout over time with the same", 1.05, 1.01, time_ratio("layouts", RENEWED, OURS),
        lower=True,
    ),
    Target("a window and global tokens: memory of a million tokens", 4.0, None, _held, unit=" GiB", lower=True),
    Target("a window and global tokens: rate of a million tokens over that of 65,536", 0.9, None, _linear),
)  # fmt: skip
BESIDE_INPUTS = NAMES, Axis("memory beside the inputs", "bytes")
MEMORY = value("peak_bytes", "memory", "bytes"), value("memory_bytes", "with inputs", "bytes")
COLUMNS = (fact("what"), WHO, TIME, QUARTILES, SAMPLES, over(OURS), GFLOPS, *MEMORY)
TITLES = {
    "windows": "A sliding window",
    "mixes": "A window, global tokens and segments",
    "BigBird": "BigBird",
    "layouts": "Blocks of each call, forward and backward",
    "rates": "A window beside segments",
    "lengths": "A short and a long sequence",
}
REPORT = Report(
    place="{device_name}, instruction set {isa}, {thread_count} threads of {cores} cores",
    tables=tuple(TableView(title, table, COLUMNS, note="{what}: {problem}") for table, title in TITLES.items()),
    plots=(
        PlotView("Time: a sliding window", "windows", "{what}"),
        PlotView("Time: window, global tokens, segments", "mixes", "{what}"),
        PlotView("Time: BigBird", "BigBird", "{what}"),
        PlotView(
            "Memory: BigBird",
            "BigBird",
            "{what}",
            stored("peak_bytes"),
            BESIDE_INPUTS,
        ),
        PlotView("Time: blocks of each call, forward and backward", "layouts", "{what}"),
        PlotView(
            "Nominal rate", ("rates", "lengths"), "{who}", gflops, (NAMES, Axis("GFLOP/s", "number", log=False)), series=OURS
        ),
    ),
    sentences={
        TARGETS[0].name: "a sliding window by FlexAttention takes {} as long as by dilkit",
        TARGETS[1].name: "window, global tokens and segments in three calls take {} as long as in one pass",
        TARGETS[3].name: "BigBird by torch with a mask takes {} as long as by dilkit",
        TARGETS[8].name: "a million tokens of a window with global tokens hold {}",
    },
    method="fp32, forward but where it says more; times are medians of samples taken in turns. Before it is timed, every way is "
    "compared with the definition in fp64, in the first row and random others. FlexAttention is compiled for the one shape, and "
    "looks only at blocks in which the window lies; what compiling takes is not counted. Three calls: one for each kind of "
    "branch, by the same kernel, merged by their logsumexps with torch. Rates are nominal FLOPs, four times head_dim for each "
    "pair of query and key that is seen, over time; the segments are as long as the span of the window, and at the ends of the "
    "sequence the window has less. torch's attention with a mask computes all pairs; its mask takes so much memory and time "
    "that there are few heads. The mask is made before it is timed. Blocks of each call: each block of queries is given so many "
    "blocks at random, all heads the same; a new layout has the same blocks in another order, in a tensor of other numbers. "
    "Memory is the most that a call held beside its inputs, by the high-water mark of the process, with the mask where there is "
    "one.",
)


@dataclass(frozen=True)
class PatternsSuite(Suite):
    """The shortest measurements first."""

    NAME = "patterns"
    SUMMARY = "windows, global tokens and block lists, each beside what else computes them"
    TARGETS = TARGETS
    MAY_FAIL = (FLEX,)

    sizes: PatternsSizes = field(default_factory=PatternsSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        yield Step("rates", "the rate of a window and of segments", self.rates, 2)
        for length, rate in self.sizes.mixes:
            what = f"a window, global tokens and segments of {length} windows, one token in {rate}"
            yield Step("mixes", what, partial(self.mix, length, rate), 2)
        for causal in (True, False):
            yield Step("windows", f"a window{', causal' * causal}, by FlexAttention too", partial(self.window, causal), 6)
        yield Step("BigBird", "BigBird, by torch with a mask too", self.bigbird, 8)
        yield Step("layouts", "blocks that each call gives, by torch with a mask too", self.layouts, 12)
        yield Step("lengths", "a long sequence", self.long, 8)

    def prepared(self) -> AbstractContextManager[dict[str, Any]]:
        return on_threads(self.sizes.threads)

    @property
    def tokens(self) -> int:
        """Tokens of most sequences."""
        return self.sizes.tokens // self.divisor

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.sizes.window // self.divisor

    def problem(self, pattern: Pattern, seq: int = 0, heads: int = 0, **fields: Any) -> Problem:
        """A problem of so many tokens and heads; 0 stands for the default."""
        seq, heads = seq or self.tokens, heads or self.sizes.heads
        return Problem(pattern=pattern, seq=seq, heads=heads, head_dim=self.sizes.head_dim, **fields)

    def case(self, table: str, what: str, ways: Mapping[str, Way], rounds: int = MOST_ROUNDS) -> list[Row]:
        """Check the ways, then time them in turns."""
        return case_rows(table, what, ways, min(self.repeats, rounds))

    def rates(self) -> list[Row]:
        """A window, and whole segments in which a query sees as many keys."""
        seen = 2 * self.length - 1
        branches = {SEGMENTS: DilatedSegment(seen, 1), WINDOW: SlidingWindow(self.length)}
        problems = {name: self.problem(Pattern.of(one), self.tokens // seen * seen) for name, one in branches.items()}
        inputs = Tensors.random(problems[WINDOW])
        return self.case("rates", "the same work", {name: native(problem, inputs) for name, problem in problems.items()})

    def mix(self, length: int, rate: int) -> list[Row]:
        """Three kinds in one pass, and in a call each."""
        segments = DilatedSegment(length * self.length, rate)
        problem = self.problem(Pattern.of(SlidingWindow(self.length // 2), GlobalTokens(self.sizes.mixed_globals), segments))
        inputs = Tensors.random(problem)
        ways = {OURS: native(problem, inputs), THREE: one_by_one(problem, inputs)}
        return self.case("mixes", f"segments of {segments.segment_length:,}, 1 in {rate}", ways)

    def window(self, causal: bool) -> list[Row]:
        """A window by FlexAttention, compiled, and by the kernel."""
        problem = self.problem(Pattern.of(SlidingWindow(self.length)), is_causal=causal)
        inputs = Tensors.random(problem)
        ways = {OURS: native(problem, inputs), FLEX: flex(problem, inputs)}
        return self.case("windows", "causal" if causal else "both sides", ways)

    def bigbird(self) -> list[Row]:
        """BigBird's block list, and all pairs under its mask."""
        block = self.sizes.block
        problem = self.problem(Pattern.of(BlockSparse.bigbird(-(-self.tokens // block), block)), heads=self.sizes.masked_heads)
        inputs = Tensors.random(problem)
        ways = {OURS: native(problem, inputs), MASKED: masked(problem, inputs)}
        return self.case("BigBird", f"{problem.seq:,} tokens", ways, LONG_ROUNDS)

    def layouts(self) -> list[Row]:
        """Blocks that each call gives, forward and backward: the same ones, others, and all pairs under their mask."""
        block, share = self.sizes.block, self.sizes.chosen_share
        pattern = Pattern.of(_random_blocks(-(-self.tokens // block), block, share))
        problem = self.problem(pattern, heads=self.sizes.chosen_heads, requires_grad=True)
        makers: dict[str, MakeWay] = {OURS: partial(_given, renew=False), RENEWED: partial(_given, renew=True), MASKED: masked}
        ways = {name: make(problem, Tensors.random(problem)) for name, make in makers.items()}
        return self.case("layouts", f"{problem.seq:,} tokens, 1 in {share}", ways, LONG_ROUNDS)

    def long(self) -> list[Row]:
        """A short and a long sequence in turns: whether time is linear."""
        pattern = Pattern.of(SlidingWindow(self.length), GlobalTokens(self.sizes.long_globals))
        problems = [self.problem(pattern, seq // self.divisor, heads=1) for seq in (self.sizes.short, self.sizes.long)]
        ways = {f"{problem.seq:,} tokens": native(problem, Tensors.random(problem)) for problem in problems}
        return self.case("lengths", "window and global tokens", ways, LONG_ROUNDS)


def _random_blocks(blocks: int, block_size: int, share: int) -> BlockSparse:
    """For each block of queries its own and others at random, one in `share` in all, the same each time."""
    scores = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).fill_diagonal_(2.0)
    chosen = scores.topk(max(1, blocks // share)).indices
    return BlockSparse(torch.zeros(blocks, blocks, dtype=torch.bool).scatter(-1, chosen, True).tolist(), block_size)


def _given(problem: Problem, inputs: Tensors, renew: bool) -> Way:
    """The CPU kernel, given the blocks at every call: the same tensor, or with `renew` another with the blocks in a new order."""
    way = native(replace(problem, pattern=Pattern.of(BlockSparse(None, block_list(problem).block_size))), inputs)
    seen = blocks_seen(problem)
    numbers = torch.arange(len(seen)).where(seen, -1).sort(-1, descending=True).values[None, None, :, : int(seen.sum(-1).max())]

    def attend(*rows: Any) -> Any:
        layout = numbers[..., torch.randperm(numbers.shape[-1])] if renew else numbers
        return way.attend(*rows, block_layout=layout)

    return replace(way, problem=problem, attend=attend, make=partial(_given, renew=renew))
