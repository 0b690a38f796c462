"""Steps over stored rows by the CPU kernel."""

import pytest
import torch
from helpers.pairwise import every_pair
from helpers.steps import FORMS, StepCase, agree, check_that_nothing_is_seen, expected, in_pages, make_step

from dilkit.backends.native import _native
from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.decoding.layout import encoded, width_of
from dilkit.decoding.protocol import Span, table
from dilkit.problem import DTYPES, STORED
from dilkit.threads import torch_threads

DTYPE_PAIRS = [(dtype, stored) for dtype in DTYPES for stored in ("", *STORED[dtype])]
SHAPES = {"grouped": (6, 3, 20), "as many": (3, 3, 64), "one": (4, 1, 33), "small": (2, 2, 3)}
LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.mark.parametrize(
    ("isa", "dtypes", "shape", "bias"), every_pair([*_native.instruction_sets(), "reference"], DTYPE_PAIRS, SHAPES, FORMS)
)
def test_a_step_is_the_softmax_over_its_spans(isa, dtypes, shape, bias, monkeypatch):
    if isa != "reference":
        monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    (dtype, stored), (heads, kv_heads, head_dim) = dtypes, SHAPES[shape]
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case = StepCase(dtype, stored, **sizes, bias=bias, softcap=1.5 * (head_dim == 20), sink=head_dim == 64)
    step, problem = make_step(case), case.problem
    backend = Reference() if isa == "reference" else Native()
    right = expected(step, problem)
    found = backend.attend_stored(step, problem)
    assert [x.dtype for x in found] == [step.query.dtype, torch.float64 if dtype == "float64" else torch.float32]
    agree(found, right, LIMITS[dtype])


@pytest.mark.parametrize(("dtype", "stored"), DTYPE_PAIRS)
def test_both_backends_store_the_same_bits(dtype, stored):
    case = StepCase(dtype, stored, seed=3)
    one, other = make_step(case), make_step(case)
    Native().attend_stored(one, case.problem)
    Reference().attend_stored(other, case.problem)
    for a, b in zip(one.stored, other.stored, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "stored"), DTYPE_PAIRS)
@pytest.mark.parametrize("backend", [Native(), Reference()], ids=lambda backend: backend.name)
def test_rows_in_pages_are_as_good(backend, dtype, stored):
    case = StepCase(dtype, stored, bias="table", seed=5)
    step = make_step(case)
    paged = in_pages(step, case.problem)
    for a, b in zip(backend.attend_stored(step, case.problem), backend.attend_stored(paged, case.problem), strict=True):
        assert torch.equal(a, b)


def shared(dtype, stored, bias=""):
    """A step whose spans show the same keys of 6 heads, each with a copy of its own, and the same where they are not one key.

    Tokens 0 to 299. In the first, the rows of a copy that a span before shows are NaN.
    """
    case = StepCase(dtype, stored, heads=6, kv_heads=6, head_dim=20, batch=1, seq=1, bias=bias)
    draw, tokens, given = torch.Generator().manual_seed(1), 300, make_step(case)
    kept, width = getattr(torch, stored or dtype), width_of(20, getattr(torch, stored or dtype))
    pool = encoded(torch.randn(2, 6, tokens, 20, generator=draw).to(getattr(torch, dtype)), kept)
    nothing = encoded(torch.full((20,), torch.nan), kept)
    spans, tensors, read = list[Span](), list[torch.Tensor](), list[torch.Tensor]()
    for heads, first, step, count, left_out in (  # of `count` tokens from the first on, so many are left out
        (range(6), 100, 1, 200, 0),
        (range(0, 6, 2), 1, 2, 150, 100),  # 100 .. 299 by two
        (range(0, 6, 4), 5, 6, 50, 50),  # in the first from 100 on, before that in the second
        (range(1, 6, 3), 2, 3, 100, 67),  # not of the heads of the second
        (range(6), 0, 1, 300, 200),
        (range(2, 3), 120, 4, 20, 20),  # ends within the first
        (range(2, 3), 50, 7, 30, 30),  # in the first from 106 on, before that in the one of all tokens
        (range(3, 4), 299, 1, 1, 1),
        (range(5, 6), 0, 1, 50, 50),
    ):
        whole = pool[:, heads.start : heads.stop : heads.step, first : first + step * count : step].clone()
        part = whole.clone()
        part[:, :, count - left_out :] = nothing
        numbers = whole[0].numel()
        strides = numbers, count * width, width
        place = (len(spans), 0, *strides, len(spans), numbers, *strides)
        spans.append(Span(0, 1, heads.start, heads.step, len(heads), count, *place, tokens - 1, first, step))
        tensors.append(whole.flatten())
        read.append(part.flatten())
    same = given._replace(spans=table(spans, len(Span._fields)), writes=given.writes[:0], unseen=())
    return same._replace(stored=tuple(read), by_position=True), same._replace(stored=tuple(tensors)), case.problem


@pytest.mark.parametrize(("dtype", "stored", "bias"), [("float32", "", ""), ("float64", "", "alibi"), ("bfloat16", "int8", "")])
def test_a_key_that_several_spans_show_is_read_once(dtype, stored, bias, monkeypatch):
    once, each, problem = shared(dtype, stored, bias)
    right = expected(each, problem)
    for isa in _native.instruction_sets():
        monkeypatch.setenv("DILKIT_CPU_ISA", isa)
        for step in (once, each):
            agree(Native().attend_stored(step, problem), right, LIMITS[dtype])


def test_copies_of_other_rows_heads_and_positions_are_read():
    case = StepCase(heads=4, kv_heads=4, batch=2, seq=1, bias="alibi")
    given, rows = make_step(case), torch.randn(2, 2, 4, 10, 20)  # keys and values, sequences, heads, tokens
    first = Span(0, 2, 0, 1, 4, 10, 0, 0, 800, 200, 20, 0, 1600, 800, 200, 20, 9, 0, 1)
    evenly, of_two = first._replace(position_step=2), first._replace(head_step=2, heads=2)
    for before, other in (
        (first, first._replace(row=1, rows=1, key_offset=800, value_offset=2400)),
        (first, first._replace(rows=1)),
        (first, first._replace(position=1)),
        (first, first._replace(position_step=0)),
        (first, first._replace(query_position=8)),
        (first, first._replace(unseen=0)),
        (first, evenly),
        (evenly, evenly._replace(position=1, seen=9)),  # the places between
        (of_two, first._replace(first_head=1, heads=1, key_offset=200, value_offset=1800)),  # the head between
        (of_two, first._replace(heads=3)),
    ):
        spans = table([before, other], len(Span._fields))
        hidden = ((torch.arange(10) % 2 == 0).expand(4, 1, 10),)
        step = given._replace(spans=spans, writes=given.writes[:0], stored=(rows.flatten(),), unseen=hidden)
        found = Native().attend_stored(step._replace(by_position=True), case.problem)
        agree(found, expected(step, case.problem), 2e-5)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_the_same_bits_with_any_number_of_threads(stored):
    case = StepCase(stored=stored, most=3000, spans=4)
    step, results = make_step(case), []
    for threads in (1, 2, 3, 4):
        with torch_threads(threads):
            results.append(Native().attend_stored(step, case.problem))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", [Native(), Reference()], ids=lambda backend: backend.name)
def test_a_row_that_sees_nothing(backend):
    check_that_nothing_is_seen(backend.attend_stored)
