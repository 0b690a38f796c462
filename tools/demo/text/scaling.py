"""Time and memory of dilated against dense attention, forward and backward, as the sequence grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilkit import Pattern, Problem, dilated_attention, explain
from dilkit.tools.measure.memory import MeasureError, peak_memory
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.kinds.demo import Computed, Length, Measured, Scaling
from dilkit.tools.results.record import Samples

TIME_BUDGET = 25.0
"""Seconds that one forward and backward may take."""
_ONCE_FROM = 2.0
"""Seconds: a call that is expected to take this long is made once."""


class LengthSweep:
    """Measures `problem`'s pattern and dense attention, each by the backend that the selector picks, length by length.

    `rows` is up to date whenever it is interrupted.
    """

    def __init__(self, problem: Problem, lengths: Sequence[int]) -> None:
        self.problem, self.lengths = problem, tuple(lengths)
        self.patterns = {"dilated": problem.pattern, "dense": Pattern.dense()}
        self.backends = {kind: explain(replace(problem, pattern=pattern)).picked for kind, pattern in self.patterns.items()}
        self.rows: list[Length] = []
        self.memory_note = ""

    def run(self, after_row: Callable[[Length], Any]) -> None:
        """Measure length by length, leaving out what would take too long."""
        for tokens in self.lengths:
            self.rows.append(self._row(tokens))
            after_row(self.rows[-1])

    def scaling(self) -> Scaling:
        """What there is so far."""
        problem = self.problem
        return Scaling(
            batch=problem.batch,
            heads=problem.heads,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            pattern=str(problem.pattern),
            backends=Computed(**self.backends),
            time_budget_s=TIME_BUDGET,
            memory_note=self.memory_note,
            rows=tuple(self.rows),
        )

    def _row(self, tokens: int) -> Length:
        """Short calls are timed in turns, so that what disturbs the machine disturbs both kinds alike; long ones once."""
        expected = {kind: self._expected(kind, tokens) for kind in self.patterns}
        notes = [
            f"{kind} left out: about {seconds:,.0f} s expected, {TIME_BUDGET:.0f} s allowed"
            for kind, seconds in expected.items()
            if seconds > TIME_BUDGET
        ]
        able = [kind for kind, seconds in expected.items() if seconds <= TIME_BUDGET]
        calls = {kind: _call(self.problem, self.patterns[kind], tokens) for kind in able}
        short = {kind: call for kind, call in calls.items() if expected[kind] < _ONCE_FROM}
        samples = time_interleaved(short, repeats=5) if short else {}
        measured = {kind: self._with_peak(call, samples.get(kind)) for kind, call in calls.items()}
        dilated, dense = measured.get("dilated"), measured.get("dense")
        speedup = dense.seconds / dilated.seconds if dense and dilated else None
        return Length(tokens, dilated, dense, "; ".join(notes), speedup)

    def _expected(self, kind: str, tokens: int) -> float:
        """Seconds of a call: those of the last length measured, times the square of the growth. 0 at first."""
        for row in reversed(self.rows):
            last = row.dilated if kind == "dilated" else row.dense
            if last is not None:
                return (tokens / row.tokens) ** 2 * last.seconds
        return 0.0

    def _with_peak(self, call: Callable[[], Any], samples: Samples | None) -> Measured:
        """With the peak memory of a further call, which is also the one that is timed where there are no samples yet."""
        taken = [] if samples is None else [samples]

        def timed() -> None:
            taken.append(time_interleaved({"": call}, repeats=1, warmup=0)[""])

        try:
            peak = peak_memory(timed)
        except MeasureError as error:
            peak, self.memory_note = None, str(error)
            timed()
        return Measured(taken[0].median_s, taken[0].samples_s, peak)


def _call(problem: Problem, pattern: Pattern, tokens: int) -> Callable[[], Any]:
    """A function that computes `problem` with this pattern and length, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    shape = (problem.batch, tokens, problem.heads, problem.head_dim)
    query, key, value, grad = (torch.randn(shape, generator=generator, dtype=getattr(torch, problem.dtype)) for _ in range(4))
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def call() -> Any:
        out = dilated_attention(inputs[0], inputs[1], inputs[2], pattern, is_causal=problem.is_causal)
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, inputs, grad)

    return call
