"""Sequences that are decoded, each step against the oracle."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from fuzz.caches import OfDilatedCache, OfDilatedLayer, OfDynamicCache, OfKvCache, OfPagedCache, Rows, Slots
from fuzz.calls import Call, tensors_of
from fuzz.checks import require
from fuzz.rounding import SEVERAL, distances, rounding
from torch import Tensor

from dilkit import PoolFullError
from dilkit.decoding.layout import decoded as decoded_rows, encoded
from dilkit.selector import NoBackendError
from dilkit.testing import accuracy
from dilkit.testing.tensors import Tensors

Action = tuple[str, int, int]


def decoded(
    world,
    call: dict[str, Any],
    actions: Sequence[Action],
    page_rows: int,
    rollback: int = 3,
    stored: str | None = None,
    pages: int | None = None,
):
    """Decode a batch in every kind of cache by the same `actions`: a name, a slot and a number.

    "rows": add rows to the slot. "steps": add a few one by one. "segment": first add rows up to the start of all segments.
    "draft": add rows, and take wrong ones back. "back": take rows back, if the cache can. "move": permute or copy slots.
    """
    one = Call.from_data(call)
    one = replace(one, case=replace(one.case, is_causal=True, mask="none", values="normal", dropout_p=0.0), through_lse=False)
    tensors = tensors_of(one)
    kept = tensors
    if stored is not None:
        wide = torch.promote_types(tensors.query.dtype, torch.float32)
        key, value = (decoded_rows(encoded(x, getattr(torch, stored)), wide) for x in (tensors.key, tensors.value))
        kept = replace(tensors, key=key, value=value)
    exact, rounded = _Whole(one, tensors), _Whole(one, kept)
    for slots in _caches(one, tensors, page_rows, rollback, stored, pages):
        rounds = stored is not None and isinstance(slots, (OfDilatedCache, OfPagedCache))
        run = _Run(slots, rounded if rounds else exact)
        for action in actions:
            run.act(*action)
        run.finish()
        world.compared += run.compared


def _caches(one: Call, tensors: Tensors, page_rows: int, rollback: int, stored: str | None, pages: int | None) -> Iterator[Slots]:
    if any(branch.is_of_whole_sequences for branch in one.case.pattern.branches):
        return  # a grid, of which sequences that grow are none
    case, own = one.case, dict(scale=one.case.scale, sink=tensors.sink, softcap=one.case.softcap or None)
    options = dict(own, backend=one.backend)
    yield OfKvCache(case, tensors, options, side_by_side=page_rows % 2 == 0)
    with_transformers = importlib.util.find_spec("transformers") is not None
    if with_transformers:
        yield OfDynamicCache(case, tensors, own)
    yield OfDilatedCache(case, tensors, options, rollback, stored)
    if with_transformers and tensors.bias is None and not case.softcap:
        yield OfDilatedLayer(case, tensors, own, rollback)
    if tensors.bias is None or not tensors.bias.by_row:
        yield OfPagedCache(case, tensors, options, rollback, stored, page_rows, pages)


class _Whole:
    """The whole sequences, computed by the oracle, and how far a result may be from them."""

    def __init__(self, one: Call, tensors: Tensors):
        self.problem = replace(one.case, gradients=True).problem(requires_grad=False)
        self.tensors = replace(tensors, dlse=None)
        self.expected = accuracy.expected(self.problem, self.tensors)
        self.bounds: Tensor | None = None

    def check(self, text: int, start: int, out: Tensor, what: str):
        own = text, slice(start, start + len(out))
        exact = self.expected.exact["out"][own]
        error = accuracy.distance(out, exact) if out.numel() else 0.0
        if error <= accuracy.LIMITS["out"] * self.expected.error["out"] and out.dtype == self.tensors.query.dtype:
            return
        if self.bounds is None:
            self.bounds = rounding(self.problem, self.tensors)["out"]
        near = bool((distances(out, exact) <= SEVERAL * self.bounds[own]).all())
        require(near and out.dtype == self.tensors.query.dtype, f"{what}: {out.dtype}, error {error:.2g}")


class _Run:
    """Actions on one cache. `longest`: each slot's most tokens so far, from which rollback counts."""

    def __init__(self, slots: Slots, whole: _Whole):
        self.slots, self.whole, self.compared = slots, whole, 0
        self.rows: Rows = tuple(x.detach() for x in slots.tensors.qkv)
        self.seq, self.longest = slots.case.seq, [0] * len(slots.texts)
        self.period = math.lcm(*(branch.forgets_every for branch in slots.case.pattern.branches))

    def act(self, name: str, slot: int, number: int):
        slot %= len(self.longest)
        if name == "segment" and self.period < self.seq:
            self._attend(self._counts(slot, self.period - self.slots.seen[slot] % self.period))
        if name == "steps":
            for _ in range(min(number, 5)):
                self._attend(self._counts(slot, 1))
        elif name in ("rows", "segment"):
            self._attend(self._counts(slot, number))
        elif name == "draft":
            self._draft(slot, number)
        elif name == "back":
            self._back(slot, number)
        else:
            self._move(number)

    def finish(self):
        counts = [self.seq - seen for seen in self.slots.seen]
        if self._attend(counts) is None:
            for slot, count in enumerate(counts):
                self._attend([count if i == slot else 0 for i in range(len(counts))])
        self.slots.close()

    def _counts(self, slot: int, number: int) -> list[int]:
        """Return row counts: so many of a slot and at most one of others; equal counts at one pace."""
        left = [self.seq - seen for seen in self.slots.seen]
        return [min(number if i == slot or self.slots.at_one_pace else 1, rest) for i, rest in enumerate(left)]

    def _attend(self, counts: list[int], rows: Rows | None = None, right: int | None = None) -> list[int] | None:
        """`counts`, once the next rows have been compared, `right` of them; None where the pool was too full."""
        if not any(counts):
            return counts
        try:
            outs = self._attended(self.rows if rows is None else rows, counts)
        except PoolFullError:
            return None
        before = self.slots.seen[:]
        for i, (out, count) in enumerate(zip(outs, counts, strict=True)):
            require(len(out) == count, f"{type(self.slots).__name__}: {len(out)} rows for {count}")
            what = f"{type(self.slots).__name__}, slot {i}, {count} rows after {before[i]}"
            self.whole.check(self.slots.texts[i], before[i], out[:right], what)
            self.slots.seen[i] += count
            self.longest[i] = max(self.longest[i], self.slots.seen[i])
        self.compared += 1
        return counts

    def _attended(self, rows: Rows, counts: list[int]) -> list[Tensor]:
        try:
            with torch.inference_mode(self.compared % 3 == 2):
                return self.slots.attend(rows, counts)
        except NoBackendError:  # that of the call does not decode
            require(self.slots.options.get("backend") is not None, "no backend decodes")
            self.slots.options = dict(self.slots.options, backend=None)
            return self.slots.attend(rows, counts)

    def _draft(self, slot: int, number: int):
        """Draft rows: all NaN of an odd number, half right and half wrong of an even one. The wrong ones are taken back.

        NaN lies in calls of its own: rows before one in the same call may get NaN, as docs/definition.md says.
        """
        most = number if self.slots.rollback is None else min(number, self.slots.rollback)
        counts = self._counts(slot, most)
        if not self.slots.at_one_pace:
            counts = [count if i == slot else 0 for i, count in enumerate(counts)]
        if not (count := counts[slot]):
            return
        right = 0 if count % 2 else count // 2
        end = self.slots.seen[slot] + right
        wrong = tuple(x.clone(memory_format=torch.contiguous_format) for x in self.rows)
        for x in wrong:
            x[:, end:] = 3 - 2 * x[:, end:] if right else torch.nan
        if self._attend(counts, wrong, right) is not None:
            self._crop(slot, end)

    def _back(self, slot: int, number: int):
        length, most = max(0, self.slots.seen[slot] - number), self.slots.rollback
        if most is None or not length or length >= self.longest[slot] - most:
            self._crop(slot, length)
            return
        try:
            self._crop(slot, length)
        except ValueError as error:
            require("length" in str(error), str(error))

    def _crop(self, slot: int, length: int):
        self.slots.crop(slot, length)
        for i in range(len(self.longest)) if self.slots.at_one_pace else (slot,):
            self.slots.seen[i], self.longest[i] = length, self.longest[i] if length else 0

    def _move(self, number: int):
        size = len(self.longest)
        order = [(i + number) % size for i in range(size)]
        if number % 2:
            order[0] = order[-1]
        self.slots.move(order, number)
        self.slots.texts, self.slots.seen, self.longest = (
            [of_slots[i] for i in order] for of_slots in (self.slots.texts, self.slots.seen, self.longest)
        )
