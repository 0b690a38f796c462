"""Tables that lead beyond the memory of their tensors are refused."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.fakes import Fake, registered
from helpers.on_host import FP32, OnHost
from helpers.steps import PAGED, StepCase, in_pages, make_step
from torch import Tensor

from dilkit import DilatedCache, Limits, Pattern, Problem
from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.backends.triton.backend import TritonTiles
from dilkit.decoding.protocol import Span, Step, Write

CASE = StepCase(bias="coordinates", seed=1)
BACKENDS = [Native(), Reference(), OnHost(FP32), TritonTiles()]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
LARGE = 2**62


def span(at: int = 0, **columns: int) -> Callable[[Step], Step]:
    return lambda step: step._replace(spans=_changed(step.spans, at, Span._fields, columns))


def write(**columns: int) -> Callable[[Step], Step]:
    return lambda step: step._replace(writes=_changed(step.writes, 0, Write._fields, columns))


def _changed(table, at: int, fields: tuple[str, ...], columns: dict[str, int]):
    table = table.copy()
    for name, number in columns.items():
        table[at, fields.index(name)] = number
    return table


def given(**tensors) -> Callable[[Step], Step]:
    return lambda step: step._replace(**tensors)


def without_memory(step: Step) -> Step:
    gone = step.stored[1].clone()
    gone.untyped_storage().resize_(8)
    return step._replace(stored=(step.stored[0], gone, *step.stored[2:]))


def positions(*numbers: int) -> Callable[[Step], Step]:
    def change(step):
        ours = step.positions[0].clone()
        ours[: len(numbers)] = torch.tensor(numbers)
        return step._replace(positions=(ours, *step.positions[1:]))

    return change


WRONG = {
    "one row more": (
        lambda step: span(seen=int(step.spans[0, 5]) + 1)(step),
        r"spans\[0\]: seen=\d+ values \d+ apart from offset \d+ .* beyond",
    ),
    "many rows": (span(seen=LARGE), r"spans\[0\]: seen=4611686018427387904 keys"),
    "a negative count": (span(seen=-1), r"spans\[0\]: seen=-1 must be at least 0"),
    "rows at one place": (span(key_row=0), r"spans\[0\]: key_row=0, value_row=\d+; at least 1"),
    "rows that go back": (span(value_row=-20), r"value_row=-20; at least 1"),
    "a key before the tensor": (span(key_offset=-1), "keys .* apart from offset -1"),
    "a value beyond the tensor": (span(value_offset=LARGE), "values .* apart from offset 4611686018427387904"),
    "a far head": (span(1, key_head=LARGE), r"spans\[1\]: .* beyond the \d+ elements of stored\[1\]"),
    "a sequence before": (span(3, value_sequence=-8), r"spans\[3\]: .* values"),
    "another tensor": (span(key=5), "from tensor 5, of 5 stored ones"),
    "no tensor": (span(value=-1), "from tensor -1"),
    "a row too many": (span(rows=5), r"spans\[0\]: row=\d, rows=5; some of the 4 rows"),
    "a row before": (span(row=-1), "row=-1"),
    "a head too many": (span(first_head=3), "first_head=3, .* some of the 3 key/value heads"),
    "heads beyond": (span(first_head=2, head_step=LARGE, heads=2), "first_head=2, head_step=4611686018427387904"),
    "one head twice": (span(first_head=0, head_step=0, heads=2), "head_step=0, heads=2"),
    "a token that there is not": (span(query_position=10_000), "query_position=10000; from 0 to 9999"),
    "positions beyond": (span(1, position=9_999), r"spans\[1\]: position=9999, position_step=3"),
    "positions that go back": (span(1, position_step=-3), "position_step=-3"),
    "positions that are not there": (span(positions=2), "positions=2; -1, or one of the 2 tensors"),
    "of another span": (span(3, positions=0), r"positions\[0\] is torch.int64"),
    "a position beyond": (positions(0, 10_000), r"positions\[0\] reach from 0 to 10000"),
    "a position before": (positions(-1), r"positions\[0\] reach from -1"),
    "a mask that is not there": (span(unseen=2), "unseen=2; -1, or one of the 2 tensors"),
    "a mask of another span": (span(3, unseen=0), r"unseen\[0\] is torch.bool"),
    "a write beyond": (write(key_offset=LARGE), r"writes\[0\] is to offset 4611686018427387904"),
    "a write to no tensor": (write(value=9), r"writes\[0\] is to tensor 9, of 5"),
    "a write of a row too many": (write(rows=9), r"writes\[0\]: row=\d, rows=9"),
    "nothing to write": (given(key=None, value=None), "no key and value to be written"),
    "a key alone": (given(value=None), "key and value of a step go together"),
    "a table of floats": (lambda step: step._replace(spans=step.spans.astype(float)), "spans is a ndarray: .*int64"),
    "a table that lacks a column": (lambda step: step._replace(spans=step.spans[:, :-1].copy()), "spans has 25 columns; 26"),
    "a table with gaps": (lambda step: step._replace(writes=step.writes[::2]), "writes is a ndarray: .*contiguous"),
    "memory that is gone": (without_memory, "a stored tensor has shape .* beyond the 8 bytes of its storage"),
    "other stored rows": (
        lambda step: step._replace(stored=(step.stored[0].double(), *step.stored[1:])),
        r"stored\[0\] is torch.float64",
    ),
    "a list": (lambda step: step._replace(stored=([], *step.stored[1:])), "a stored tensor is a list"),
    "another query": (lambda step: step._replace(query=step.query.mT), r"query has shape \(2, 2, 20, 6\)"),
    "another dtype": (lambda step: step._replace(query=step.query.double()), "query is torch.float64"),
    "other new rows": (lambda step: step._replace(key=step.key[:1]), r"key has shape \(1, 2, 3, 20\)"),
    "another sink": (given(sink=torch.zeros(5)), r"sink has shape \(5,\)"),
    "a half sink": (given(sink=torch.zeros(6).half()), "sink is torch.float16"),
    "no bias": (given(bias=None), "bias is missing"),
    "few positions": (
        lambda step: step._replace(bias=step.bias._replace(positions=torch.zeros(2, 9, 2))),
        "from 0 to 8 is needed",
    ),
    "positions of another batch": (
        lambda step: step._replace(bias=step.bias._replace(positions=torch.zeros(3, 9, 2))),
        "positions of the bias",
    ),
    "other weights": (lambda step: step._replace(bias=step.bias._replace(weights=torch.zeros(6, 2))), "weights of the bias"),
}


def paged(**columns: int) -> Callable[[Step], Step]:
    return lambda step: span(PAGED, **columns)(in_pages(step, CASE.problem))


def listed(pages) -> Callable[[Step], Step]:
    return lambda step: in_pages(step, CASE.problem)._replace(pages=pages)


WRONG |= {
    "a page beyond": (listed(np.full(99, 80)), r"spans\[3\]: keys of page 80, 7 rows"),
    "a page before": (listed(np.full(99, -1)), r"pages\[1\]=-1 must be at least 0"),
    "no pages": (listed(None), r"spans\[3\]: \d+ pages from pages\[1\] on; 0 are listed"),
    "few pages": (listed(np.zeros(3, np.int64)), "from pages.1. on; 3 are listed"),
    "pages of floats": (listed(np.zeros(99)), "pages is a ndarray: .*int64"),
    "pages from far on": (paged(pages=LARGE), r"from pages\[4611686018427387904\] on"),
    "pages of no rows": (paged(page_rows=0), "page_rows=0"),
    "pages of more rows": (paged(page_rows=8), "of page .* 8 rows"),
    "pages that go back": (paged(page=-1), "page=-1"),
    "far pages": (paged(page=LARGE), "4611686018427387904 from page to page"),
    "rows of pages that go back": (paged(page_step=0), "page_step=0"),
    "a row of pages before": (paged(page_first=-1), "page_first=-1"),
    "a far row of pages": (paged(page_first=LARGE), "page_first=4611686018427387904"),
    "values of pages beyond": (paged(value_offset=10**6), "values of page"),
}


@each_backend
@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_table_that_leads_astray_is_refused(backend, change, message):
    step = change(make_step(CASE))
    before = [x.clone() if isinstance(x, Tensor) and x.untyped_storage().nbytes() > 8 else None for x in step.stored]
    with pytest.raises((TypeError, ValueError), match=message):
        backend.attend_stored(step, CASE.problem)
    for x, was in zip(step.stored, before, strict=True):
        assert was is None or torch.equal(x.view(torch.int32), was.view(torch.int32))


def test_backends_say_which_stored_rows_they_attend_to():
    def refusals(limits, stored):
        return [str(refusal) for refusal in limits.refusals(replace(CASE.problem, stored=stored, bias=None))]

    assert refusals(Limits(), "float32") == ["stored rows float32: attends to no stored rows"]
    some = Limits(stored=frozenset({"float32"}))
    assert refusals(some, "int8") == ["stored rows int8: attends to stored rows of float32"]
    assert refusals(some, "float32") == []
    with pytest.raises(ValueError, match="stored='int8' is not known; choose from '', 'float64'"):
        Problem(pattern=CASE.problem.pattern, seq=1, heads=1, head_dim=8, dtype="float64", stored="int8")


def test_a_backend_that_states_stored_rows_has_steps():
    cache, row = DilatedCache(Pattern([4], [2]), kv_heads=1), torch.ones(1, 1, 1, 8)
    stating = Fake("stating", -1, Limits(stored=frozenset({"float32"})))
    with registered(stating), pytest.raises(NotImplementedError, match=r"'stating' states stored rows .* no attend_stored"):
        cache.attend(row, row, row, backend="stating")
    assert cache.seen == 0
