"""`dilkit bench --suite scores`: biases of each kind and softcaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dilkit.backends.native.backend import instruction_set
from dilkit.bias.form import BiasForm
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.scores import targets
from dilkit.tools.bench.scores.cases import PLANE, ScoresSizes
from dilkit.tools.bench.scores.record import (
    ALIBI,
    COORDINATES,
    EAGER,
    GIVEN,
    MATRIX,
    OURS,
    PLAIN,
    TABLE,
    ScoresCase,
    ScoresResult,
)
from dilkit.tools.bench.scores.ways import MakeWay, compared, eager, native, with_given_matrix, with_matrix
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite

LONG_ROUNDS = 3


@dataclass(frozen=True)
class ScoresSuite(Suite[ScoresResult]):
    """The shortest measurements first."""

    NAME = "scores"
    SUMMARY = "biases by position and softcaps, beside no bias and beside torch with a matrix of all pairs"
    RECORD = ScoresResult
    TARGETS = targets.TARGETS

    sizes: ScoresSizes = field(default_factory=ScoresSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        yield Step("layers", "a layer like Gemma 2's, with a softcap", self.layer)
        yield Step("tiles", "a slide with 2-D ALiBi, by torch with a matrix too", self.slide, 2)
        yield Step("kinds", "a bias of each kind, forward", partial(self.kinds, False), 3)
        yield Step("kinds", "a bias of each kind, forward and backward", partial(self.kinds, True), 8)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(min(self.sizes.threads, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count)

    def wrong(self, result: ScoresResult) -> bool:
        """Whether a check failed, or dilkit did; torch's matrices may be out of memory."""
        verdicts = [(name, entry.verdict) for case in result.cases() for name, entry in case.entries.items()]
        return any(
            verdict == "wrong" or (verdict == "failed" and name not in (MATRIX, GIVEN, EAGER)) for name, verdict in verdicts
        )

    def case(self, what: str, ways: Mapping[str, tuple[MakeWay, Problem]], rounds: int) -> ScoresCase:
        """The ways checked, then timed in turns."""
        problems = dict.fromkeys(str(problem) for _, problem in ways.values())
        return ScoresCase(what=what, problems=tuple(problems), **compared(ways, min(self.repeats, rounds)))

    def kinds(self, backward: bool) -> ScoresCase:
        """One problem without a bias, and with one of each kind."""
        plain = self.sizes.configuration.problem(self.sizes.head_dim, self.divisor, requires_grad=backward)
        forms = {PLAIN: None, ALIBI: BiasForm(), COORDINATES: PLANE, TABLE: BiasForm(sizes=(self.sizes.table,))}
        problems = {name: replace(plain, bias=form and replace(form, learned=backward)) for name, form in forms.items()}
        what = "forward and backward" if backward else "forward"
        return self.case(what, {name: (native, problem) for name, problem in problems.items()}, LONG_ROUNDS if backward else 5)

    def slide(self) -> ScoresCase:
        """All pairs of tiles, biased by their distance."""
        sizes: dict[str, Any] = dict(
            seq=self.sizes.tiles // self.divisor, heads=self.sizes.tile_heads, head_dim=self.sizes.head_dim
        )
        problem = Problem(pattern=Pattern.dense(), bias=PLANE, **sizes)
        ways = {OURS: native, MATRIX: with_matrix, GIVEN: with_given_matrix}
        return self.case(f"{problem.seq:,} tiles", {name: (make, problem) for name, make in ways.items()}, LONG_ROUNDS)

    def layer(self) -> ScoresCase:
        """The attention of a layer, causal over all tokens."""
        heads: dict[str, Any] = dict(
            heads=self.sizes.layer_heads, kv_heads=self.sizes.layer_kv_heads, head_dim=self.sizes.layer_head_dim
        )
        seq, softcap = self.sizes.layer_seq // self.divisor, self.sizes.softcap
        problem = Problem(pattern=Pattern.dense(), seq=seq, is_causal=True, softcap=softcap, **heads)
        return self.case(f"{seq:,} tokens", {OURS: (native, problem), EAGER: (eager, problem)}, LONG_ROUNDS)
