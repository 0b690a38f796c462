"""`dilkit bench --suite patterns`: windows, global tokens and block lists on a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dilkit.pattern import BlockSparse, DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import GIB, Target, Values, memory_ratio, rate_ratio, time_ratio
from dilkit.tools.bench.workloads import ways
from dilkit.tools.bench.workloads.ways import LAYOUT, NATIVE, NEW_LAYOUT, ONE_BY_ONE, PLACE, times
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.report import views
from dilkit.tools.results.rows import RowsResult

OURS, THREE = "dilkit", "three calls, merged"
FLEX, MASKED, RENEWED = "FlexAttention", "torch, masked", "dilkit, a new layout each call"
WINDOW, SEGMENTS = "window", "segments"
ROUNDS = 5, 3
"""Samples of short and of long cases at most."""


@dataclass(frozen=True)
class PatternsSizes(SuiteSizes):
    """Most cases are of `tokens`, `heads`, `head_dim` and a `window` of so many tokens; `long` and `short` sequences of one head.

    `mixes`: lengths, in windows, and dilation rates of segments. `masked_heads`: so many fit in memory with a mask of all pairs.
    `chosen_heads`: heads where each call gives the blocks of `block` tokens, one in `chosen_share`.
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
    threads: int = field(default=4, kw_only=True)


def _held(result: RowsResult) -> Values:
    longest = [list(case.rows.values())[-1] for case in result.cases("lengths")]
    return {row.who: row.values["memory_bytes"] / GIB for row in longest if row.values.get("memory_bytes")}


def _linear(result: RowsResult) -> Values:
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
TITLES = {
    "windows": "A sliding window",
    "mixes": "A window, global tokens and segments",
    "BigBird": "BigBird",
    "layouts": "Blocks of each call, forward and backward",
    "rates": "A window beside segments",
    "lengths": "A short and a long sequence",
}
MEMORY = views.value("peak_bytes", "memory", "bytes"), views.value("memory_bytes", "with inputs", "bytes")
REPORT = views.Report(
    place=PLACE,
    tables=tuple(times(title, table, OURS, views.GFLOPS, *MEMORY) for table, title in TITLES.items()),
    plots=(views.PlotView("Time: a sliding window", "windows", "{what}"),),
    sentences={
        TARGETS[0].name: "a sliding window by FlexAttention takes {} as long as by dilkit",
        TARGETS[1].name: "window, global tokens and segments in three calls take {} as long as in one pass",
        TARGETS[3].name: "BigBird by torch with a mask takes {} as long as by dilkit",
        TARGETS[8].name: "a million tokens of a window with global tokens hold {}",
    },
    method="fp32, forward but where it says more; times are medians of samples taken in turns. Before it is timed, every way is "
    "compared with the definition in fp64. FlexAttention is compiled for the one shape before. Three calls: one for each kind of "
    "branch, by the same kernel, merged by their logsumexps. Rates are nominal FLOPs over time; the segments are as long as the "
    "span of the window. torch's attention with a mask computes all pairs; the mask is made before, and leaves memory for few "
    "heads. Blocks of each call: each block of queries is given so many blocks at random; a new layout has them in another "
    "order. Memory is the most that a call held beside its inputs, by the high-water mark of the process, the mask counted.",
)


@dataclass(frozen=True)
class PatternsSuite(Suite):
    NAME = "patterns"
    SUMMARY = "windows, global tokens and block lists, each beside what else computes them"
    TARGETS = TARGETS
    MAY_FAIL = (FLEX,)

    sizes: PatternsSizes = field(default_factory=PatternsSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        sizes, window = self.sizes, self.sizes.window // self.divisor
        short, long = (min(self.repeats, most) for most in ROUNDS)
        tokens, seen = sizes.tokens // self.divisor, 2 * window - 1
        pairs = {SEGMENTS: DilatedSegment(seen, 1), WINDOW: SlidingWindow(window)}
        posed = {name: (NATIVE, self.problem(Pattern.of(one), tokens // seen * seen)) for name, one in pairs.items()}
        yield ways.step("rates", "the rate of a window and of segments", "the same work", posed, short, 2)
        for length, rate in sizes.mixes:
            segments = DilatedSegment(length * window, rate)
            problem = self.problem(Pattern.of(SlidingWindow(window // 2), GlobalTokens(sizes.mixed_globals), segments), tokens)
            words = f"a window, global tokens and segments of {length} windows, one token in {rate}"
            what = f"segments of {segments.segment_length:,}, 1 in {rate}"
            yield ways.step("mixes", words, what, {OURS: (NATIVE, problem), THREE: (ONE_BY_ONE, problem)}, short, 2)
        for causal, what in ((True, "causal"), (False, "both sides")):
            problem = self.problem(Pattern.of(SlidingWindow(window)), tokens, is_causal=causal)
            words, posed = f"a window{', causal' * causal}, by FlexAttention too", {OURS: (NATIVE, problem)}
            yield ways.step("windows", words, what, posed | {FLEX: (BASELINES["flex"], problem)}, short, 6)
        blocks, share = -(-tokens // sizes.block), sizes.chosen_share
        problem = self.problem(Pattern.of(BlockSparse.bigbird(blocks, sizes.block)), tokens, sizes.masked_heads)
        posed = {OURS: (NATIVE, problem), MASKED: (ways.MASKED, problem)}
        yield ways.step("BigBird", "BigBird, by torch with a mask too", f"{tokens:,} tokens", posed, long, 8)
        scores = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).fill_diagonal_(2.0)
        chosen = scores.topk(max(1, blocks // share)).indices  # for each block of queries its own, and others at random
        layout = torch.zeros(blocks, blocks, dtype=torch.bool).scatter(-1, chosen, True).tolist()
        problem = self.problem(Pattern.of(BlockSparse(layout, sizes.block)), tokens, sizes.chosen_heads, requires_grad=True)
        words, what = "blocks that each call gives, by torch with a mask too", f"{tokens:,} tokens, 1 in {share}"
        posed = {OURS: (LAYOUT, problem), RENEWED: (NEW_LAYOUT, problem), MASKED: (ways.MASKED, problem)}
        yield ways.step("layouts", words, what, posed, long, 12)
        pattern = Pattern.of(SlidingWindow(window), GlobalTokens(sizes.long_globals))
        problems = [self.problem(pattern, seq // self.divisor, heads=1) for seq in (sizes.short, sizes.long)]
        posed = {f"{problem.seq:,} tokens": (NATIVE, problem) for problem in problems}
        yield ways.step("lengths", "a long sequence", "window and global tokens", posed, long, 8)

    def problem(self, pattern: Pattern, seq: int, heads: int = 0, **fields: Any) -> Problem:
        """Make a problem of so many tokens and heads; 0 stands for the default."""
        return Problem(pattern=pattern, seq=seq, heads=heads or self.sizes.heads, head_dim=self.sizes.head_dim, **fields)
