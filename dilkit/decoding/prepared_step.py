"""Steps of a `DilatedCache`: the backend that was chosen for rows of the same facts, and the tables that it gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from dilkit import registry
from dilkit.backend import Backend
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.decoding._streams import Ring
from dilkit.decoding.layout import Layout, name_of
from dilkit.decoding.protocol import DecodingBackend, decoding_backend
from dilkit.decoding.sequence_rows import SequenceRows, StepSpans, once_branches
from dilkit.op.scores import Scores
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.selector import select

Rows = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, `(batch, rows, heads, head_dim)`."""


class ScoreOptions(NamedTuple):
    scale: float
    changed: Scores
    sink: Tensor | None


class StepFacts(NamedTuple):
    """Facts that the choice of a backend depends on: equal facts, the same choice. `state`: that of the selector."""

    layout: Layout
    scale: float
    softcap: float
    bias: BiasForm | None
    asked: tuple[str, ...]
    state: tuple[object, ...]


@dataclass(frozen=True)
class PreparedStep:
    """The backend and the problem of steps with the same facts, and the tables of a cache."""

    facts: StepFacts
    backend: DecodingBackend
    problem: Problem
    spans: StepSpans

    def attend(self, sequence: SequenceRows[Ring], rows: Rows, sink: Tensor | None, bias: LoweredBias | None) -> Tensor:
        """Store keys and values of the next rows of a batch, `at_once` at most, and return the attention of their queries."""
        query, key, value = rows
        seen, spans = sequence.seen, self.spans
        spans.clear()
        try:
            spans.add(sequence, query.shape[1], batch=query.shape[0])
            out = self.backend.attend_stored(spans.step(query, key, value, sink, bias), self.problem)[0]
        except BaseException:
            sequence.go_back(seen)
            raise
        sequence.forget()
        return out


def prepare(facts: StepFacts, query: Tensor, key: Tensor, pattern: Pattern) -> PreparedStep:
    """Choose a backend: plain torch where none of those asked for has steps. Raises `NoBackendError` if they refuse."""
    known = registry.backends()
    candidates = [known.get(name) for name in facts.asked]
    has_steps = not candidates or any(isinstance(backend, Backend) and backend.limits.stored for backend in candidates)
    layout, scores = facts.layout, dict[str, Any](scale=facts.scale, softcap=facts.softcap, bias=facts.bias)
    problem = replace(Problem.of(query, key, pattern, is_causal=True, stored=name_of(layout.stored), **scores), seq=1)
    backend = decoding_backend(select(problem, facts.asked if has_steps else ("reference",)))
    heads = pattern.among(layout.heads, layout.kv_heads)
    return PreparedStep(facts, backend, problem, StepSpans(heads, once_branches(pattern), layout.device))
