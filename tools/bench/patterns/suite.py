"""The suite of patterns: kinds of branches beside what else computes them, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dilkit.pattern import BlockSparse, DilatedSegment, GlobalTokens, Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.cpu.suite import instruction_set
from dilkit.tools.bench.patterns.record import FLEX, MASKED, OURS, SEGMENTS, THREE, WINDOW, PatternCase, PatternsResult
from dilkit.tools.bench.patterns.targets import TARGETS
from dilkit.tools.bench.patterns.ways import Way, compared, masked, native, one_by_one
from dilkit.tools.bench.patterns.window import compiled_window, no_compiler
from dilkit.tools.bench.suite import Step, Suite
from dilkit.tools.bench.target import Target

TOKENS, HEADS, HEAD_DIM, WINDOW_LENGTH, THREADS, MOST_ROUNDS = 32_768, 8, 64, 1024, 4, 5
SEGMENTS_OF_MIXES = ((2, 1), (8, 8))
"""Lengths, in windows, and dilation rates of the segments that are mixed with a window and global tokens."""
MIXED_GLOBALS, BLOCK, MASKED_HEADS = 16, 64, 2
"""Global tokens of the mixes; tokens of a block of BigBird; heads that fit in memory with a mask of all pairs."""
LONG, SHORT, LONG_GLOBALS, LONG_ROUNDS = 1_000_000, 65_536, 64, 3


@dataclass(frozen=True)
class PatternsSuite(Suite[PatternsResult]):
    """The shortest measurements first."""

    NAME = "patterns"
    SUMMARY = "windows, global tokens and block lists, each beside what else computes them"
    RECORD = PatternsResult
    DIVISOR = 32

    def steps(self) -> Iterator[Step]:
        yield Step("rates", "the rate of a window and of segments", self.rates, 2)
        for length, rate in SEGMENTS_OF_MIXES:
            what = f"a window, global tokens and segments of {length} windows, one token in {rate}"
            yield Step("mixes", what, partial(self.mix, length, rate), 2)
        for causal in (True, False):
            yield Step("windows", f"a window{', causal' * causal}, by FlexAttention too", partial(self.window, causal), 6)
        yield Step("blocks", "BigBird, by torch with a mask too", self.bigbird, 8)
        yield Step("lengths", "a long sequence", self.long, 8)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(min(THREADS, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count)

    def targets(self) -> tuple[Target[PatternsResult], ...]:
        return TARGETS

    def wrong(self, result: PatternsResult) -> bool:
        """Whether a check failed; FlexAttention need not compile everywhere, all else has to run."""
        verdicts = [(name, entry.verdict) for case in result.cases() for name, entry in case.entries.items()]
        return any(verdict == "wrong" or (verdict == "failed" and name != FLEX) for name, verdict in verdicts)

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return WINDOW_LENGTH // self.divisor

    def problem(self, pattern: Pattern, seq: int = 0, heads: int = 0, **fields: Any) -> Problem:
        """A problem of so many tokens and heads; 0 are as many as most have."""
        sizes: dict[str, Any] = dict(seq=seq or TOKENS // self.divisor, heads=heads or HEADS, head_dim=HEAD_DIM)
        return Problem(pattern=pattern, **sizes, **fields)

    def case(self, what: str, ways: Mapping[str, Way], rounds: int = MOST_ROUNDS) -> PatternCase:
        """The ways checked, then timed in turns."""
        problems = dict.fromkeys(str(way.problem) for way in ways.values())
        return PatternCase(what=what, problems=tuple(problems), **compared(ways, min(self.repeats, rounds)))

    def rates(self) -> PatternCase:
        """A window, and whole segments in which a query sees as many keys."""
        seen = 2 * self.length - 1
        problems = {
            SEGMENTS: self.problem(Pattern.of(DilatedSegment(seen, 1)), TOKENS // self.divisor // seen * seen),
            WINDOW: self.problem(Pattern.of(SlidingWindow(self.length)), TOKENS // self.divisor // seen * seen),
        }
        inputs = Tensors.random(problems[WINDOW])
        return self.case("the same work", {name: native(problem, inputs) for name, problem in problems.items()})

    def mix(self, length: int, rate: int) -> PatternCase:
        """Three kinds in one pass, and in a call each."""
        segments = DilatedSegment(length * self.length, rate)
        problem = self.problem(Pattern.of(SlidingWindow(self.length // 2), GlobalTokens(MIXED_GLOBALS), segments))
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
        blocks = -(-TOKENS // self.divisor // BLOCK)
        problem = self.problem(Pattern.of(BlockSparse.bigbird(blocks, BLOCK)), heads=MASKED_HEADS)
        inputs = Tensors.random(problem)
        return self.case(f"{problem.seq:,} tokens", {OURS: native(problem, inputs), MASKED: masked(problem, inputs)}, LONG_ROUNDS)

    def long(self) -> PatternCase:
        """A short and a long sequence in turns: whether time is linear."""
        pattern = Pattern.of(SlidingWindow(self.length), GlobalTokens(LONG_GLOBALS))
        problems = [self.problem(pattern, seq // self.divisor, heads=1) for seq in (SHORT, LONG)]
        ways = {f"{problem.seq:,} tokens": native(problem, Tensors.random(problem)) for problem in problems}
        return self.case("window and global tokens", ways, LONG_ROUNDS)
