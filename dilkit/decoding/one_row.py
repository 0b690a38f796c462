"""Steps of one row: the backend that computes them, and the tables that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dilkit import registry
from dilkit.backend import Backend
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.decoding._tables import StepTables
from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.chunk import extend
from dilkit.decoding.layout import Layout
from dilkit.decoding.step import Step, resolved
from dilkit.decoding.stored import name_of
from dilkit.device import probe
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Pattern
from dilkit.pattern.heads import Heads
from dilkit.problem import Problem
from dilkit.selector import select


class StepFacts(NamedTuple):
    """What the choice of a backend depends on: equal facts, the same choice. `state`: that of the selector."""

    layout: Layout
    scale: float
    softcap: float
    bias: BiasForm | None
    asked: tuple[str, ...]
    state: tuple[object, ...]


class NewRow(NamedTuple):
    """The next row of each sequence, `(batch, 1, heads, head_dim)`, and what its scores have beside."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None
    bias: LoweredBias | None


@dataclass(frozen=True)
class PreparedStep:
    """What was chosen for steps with the same facts, and the tables of a cache."""

    facts: StepFacts
    backend: Backend
    problem: Problem
    tables: StepTables

    def attend(self, stores: list[BranchRows], seen: int, new: NewRow, once: Heads | None) -> Tensor:
        """Store the key and the value of the row after `seen`, and return what its query gets.

        `once`: the heads, where a key that several branches show counts once.
        """
        tables, number, by_slots = self.tables, 0, len(stores) if once is None else _apart(stores, seen)
        slots = [store.slots for store in stores]
        tables.begin()
        while (number := tables.go_on(slots, number, by_slots, seen)) < len(stores):
            if number >= by_slots or not (stores[number].make_room(seen) and tables.add(number, slots[number], seen)):
                for block in extend(stores, number, seen, (new.key, new.value), once):
                    unseen = None if block.unseen is None else block.unseen[:, 0, 0]
                    tables.see_part(number, block.stored, block.heads, seen, block.keys, unseen)
            number += 1
        sink = None if new.sink is None else resolved(new.sink).detach().to(lse_dtype(new.query.dtype)).contiguous()
        stored, further = tuple([one.rows for one in slots]), (tables.positions, tables.unseen)
        step = Step(
            new.query, stored, tables.spans, tables.writes, new.key, new.value, sink, new.bias, *further, by_position=True
        )
        return self.backend.attend_stored(step, self.problem)[0]


def _apart(stores: Sequence[BranchRows], seen: int) -> int:
    """Of how many first branches none shows the row after `seen` a key that one before it may show."""
    spans: list[range] = []
    for store in stores:
        span = store.span(seen)
        if not all(one.stop <= span.start or span.stop <= one.start for one in spans):
            break
        spans.append(span)
    return len(spans)


def prepare(facts: StepFacts, pattern: Pattern) -> PreparedStep | None:
    """Choose a backend; None where some were asked for, and none of them has steps. Raises `NoBackendError` if they refuse."""
    known = registry.backends()
    asked = [known.get(name) for name in facts.asked]
    if asked and not any(isinstance(backend, Backend) and backend.limits.stored for backend in asked):
        return None
    layout = facts.layout
    problem = Problem(
        pattern=pattern,
        seq=1,
        heads=layout.heads,
        head_dim=layout.head_dim,
        batch=layout.batch,
        kv_heads=layout.kv_heads,
        dtype=name_of(layout.dtype),
        device=probe(layout.device.type, layout.device.index or 0),
        is_causal=True,
        stored=name_of(layout.stored),
        softcap=facts.softcap,
        bias=facts.bias,
        scale=facts.scale,
    )
    return PreparedStep(facts, select(problem, facts.asked), problem, StepTables(len(pattern.branches)))
