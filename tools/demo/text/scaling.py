"""Time and memory of dilated against dense attention, forward and backward, as the sequence grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dilkit import Pattern, Problem, explain
from dilkit.testing.memory import MeasureError, check_peak_memory, peak_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.demo.text.record import Length, Measured, Scaling
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.timing import time_interleaved

LONGEST = 1.0
"""Seconds of a call beyond which there is no longer sequence: dense attention would take four times as long."""


class LengthSweep:
    """Measures `problem`'s pattern and dense attention, each by the backend that the selector picks, length by length.

    `rows` is up to date whenever it is interrupted.
    """

    def __init__(self, problem: Problem, lengths: Sequence[int]) -> None:
        self.lengths, self.memory_note = lengths, ""
        self.rows: list[Length] = []
        self.problems = {"dilated": problem, "dense": replace(problem, pattern=Pattern.dense())}
        self.backends = {kind: explain(one).picked or "" for kind, one in self.problems.items()}
        try:
            check_peak_memory()
        except MeasureError as error:
            self.memory_note = str(error)

    def run(self) -> None:
        """Measure until calls take too long."""
        for tokens in self.lengths:
            kinds = self._measured(tokens)
            self.rows.append(Length(tokens, **kinds))
            if max(kind.seconds for kind in kinds.values()) > LONGEST:
                break

    def scaling(self) -> Scaling:
        """What there is so far."""
        return Scaling(backends={**self.backends}, memory_note=self.memory_note, rows=tuple(self.rows))

    def _measured(self, tokens: int) -> dict[str, Measured]:
        """Calls are timed in turns, so that what disturbs the machine disturbs both kinds alike."""
        problems = {kind: replace(problem, seq=tokens) for kind, problem in self.problems.items()}
        inputs = Tensors.random(problems["dilated"])
        backends = dict(zip(problems, backend_implementations(list(self.backends.values())), strict=True))
        calls = {kind: partial(backends[kind].once, inputs, problem) for kind, problem in problems.items()}
        samples = time_interleaved(calls, repeats=5)
        peaks = {kind: None if self.memory_note else peak_memory(call) for kind, call in calls.items()}
        return {kind: Measured(taken.median_s, taken.samples_s, peaks[kind]) for kind, taken in samples.items()}
