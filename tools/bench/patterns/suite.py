"""The suite of patterns: kinds of branches beside what else computes them, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dilkit.pattern import BlockSparse, DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.cpu.suite import instruction_set
from dilkit.tools.bench.patterns import chosen, targets
from dilkit.tools.bench.patterns.cases import PatternsSizes
from dilkit.tools.bench.patterns.record import (
    FLEX,
    MASKED,
    OURS,
    RENEWED,
    SEGMENTS,
    THREE,
    WINDOW,
    PatternCase,
    PatternsResult,
)
from dilkit.tools.bench.patterns.ways import Way, compared, masked, native, one_by_one
from dilkit.tools.bench.patterns.window import compiled_window, no_compiler
from dilkit.tools.bench.scores.ways import compared as trained
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite

MOST_ROUNDS, LONG_ROUNDS = 5, 3


@dataclass(frozen=True)
class PatternsSuite(Suite[PatternsResult]):
    """The shortest measurements first."""

    NAME = "patterns"
    SUMMARY = "windows, global tokens and block lists, each beside what else computes them"
    RECORD = PatternsResult
    TARGETS = targets.TARGETS

    sizes: PatternsSizes = field(default_factory=PatternsSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        yield Step("rates", "the rate of a window and of segments", self.rates, 2)
        for length, rate in self.sizes.mixes:
            what = f"a window, global tokens and segments of {length} windows, one token in {rate}"
            yield Step("mixes", what, partial(self.mix, length, rate), 2)
        for causal in (True, False):
            yield Step("windows", f"a window{', causal' * causal}, by FlexAttention too", partial(self.window, causal), 6)
        yield Step("blocks", "BigBird, by torch with a mask too", self.bigbird, 8)
        yield Step("layouts", "blocks that each call gives, by torch with a mask too", self.layouts, 12)
        yield Step("lengths", "a long sequence", self.long, 8)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(min(self.sizes.threads, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count)

    def wrong(self, result: PatternsResult) -> bool:
        """Whether a check failed; FlexAttention need not compile everywhere, all else has to run."""
        verdicts = [(name, entry.verdict) for case in result.cases() for name, entry in case.entries.items()]
        return any(verdict == "wrong" or (verdict == "failed" and name != FLEX) for name, verdict in verdicts)

    @property
    def tokens(self) -> int:
        """Tokens of most sequences."""
        return self.sizes.tokens // self.divisor

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.sizes.window // self.divisor

    def problem(self, pattern: Pattern, seq: int = 0, heads: int = 0, **fields: Any) -> Problem:
        """A problem of so many tokens and heads; 0 are as many as most have."""
        seq, heads = seq or self.tokens, heads or self.sizes.heads
        return Problem(pattern=pattern, seq=seq, heads=heads, head_dim=self.sizes.head_dim, **fields)

    def case(self, what: str, ways: Mapping[str, Way], rounds: int = MOST_ROUNDS) -> PatternCase:
        """The ways checked, then timed in turns."""
        problems = dict.fromkeys(str(way.problem) for way in ways.values())
        return PatternCase(what=what, problems=tuple(problems), **compared(ways, min(self.repeats, rounds)))

    def rates(self) -> PatternCase:
        """A window, and whole segments in which a query sees as many keys."""
        seen = 2 * self.length - 1
        branches = {SEGMENTS: DilatedSegment(seen, 1), WINDOW: SlidingWindow(self.length)}
        problems = {name: self.problem(Pattern.of(one), self.tokens // seen * seen) for name, one in branches.items()}
        inputs = Tensors.random(problems[WINDOW])
        return self.case("the same work", {name: native(problem, inputs) for name, problem in problems.items()})

    def mix(self, length: int, rate: int) -> PatternCase:
        """Three kinds in one pass, and in a call each."""
        segments = DilatedSegment(length * self.length, rate)
        problem = self.problem(Pattern.of(SlidingWindow(self.length // 2), GlobalTokens(self.sizes.mixed_globals), segments))
        inputs = Tensors.random(problem)
        ways = {OURS: native(problem, inputs), THREE: one_by_one(problem, inputs)}
        return self.case(f"segments of {segments.segment_length:,}, 1 in {rate}", ways)

    def window(self, causal: bool) -> PatternCase:
        """A window by FlexAttention, compiled, and by the kernel."""
        problem = self.problem(Pattern.of(SlidingWindow(self.length)), is_causal=causal)
        ours = native(problem, Tensors.random(problem))
        refusals = no_compiler()
        flex = ours if refusals else replace(ours, attend=compiled_window(problem.seq, self.length, causal))
        return self.case("causal" if causal else "both sides", {OURS: ours, FLEX: replace(flex, refusals=refusals)})

    def bigbird(self) -> PatternCase:
        """BigBird's block list, and all pairs under its mask."""
        block = self.sizes.block
        problem = self.problem(Pattern.of(BlockSparse.bigbird(-(-self.tokens // block), block)), heads=self.sizes.masked_heads)
        inputs = Tensors.random(problem)
        return self.case(f"{problem.seq:,} tokens", {OURS: native(problem, inputs), MASKED: masked(problem, inputs)}, LONG_ROUNDS)

    def layouts(self) -> PatternCase:
        """Blocks that each call gives, forward and backward: the same ones, others, and all pairs under their mask."""
        block, share = self.sizes.block, self.sizes.chosen_share
        pattern = Pattern.of(chosen.random_blocks(-(-self.tokens // block), block, share))
        problem = self.problem(pattern, heads=self.sizes.chosen_heads, requires_grad=True)
        ways = {OURS: chosen.given, RENEWED: chosen.renewed, MASKED: chosen.masked}
        fields = trained({name: (make, problem) for name, make in ways.items()}, min(self.repeats, LONG_ROUNDS))
        return PatternCase(what=f"{problem.seq:,} tokens, 1 in {share}", problems=(str(problem),), **fields)

    def long(self) -> PatternCase:
        """A short and a long sequence in turns: whether time is linear."""
        pattern = Pattern.of(SlidingWindow(self.length), GlobalTokens(self.sizes.long_globals))
        problems = [self.problem(pattern, seq // self.divisor, heads=1) for seq in (self.sizes.short, self.sizes.long)]
        ways = {f"{problem.seq:,} tokens": native(problem, Tensors.random(problem)) for problem in problems}
        return self.case("window and global tokens", ways, LONG_ROUNDS)
