"""Checks of kernels for GPUs that attend stored rows."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from helpers.pairwise import every_pair
from helpers.steps import (
    ASTRAY,
    FEW_ASTRAY,
    GPU_BIASES,
    GPU_DTYPES,
    GPU_LIMITS,
    GPU_SHAPES,
    LARGE,
    StepCase,
    agree,
    check_that_nothing_is_seen,
    expected,
    gpu_case,
    in_pages,
    led_astray,
    make_step,
)

from dilkit.backends.reference import Reference
from dilkit.backends.tiles.backend import StepBackend
from dilkit.decoding.protocol import Span, place

Check = Callable[[StepBackend], object]


def is_the_softmax(dtypes: tuple[str, str], shape: str, bias: str, own: StepBackend):
    case = gpu_case(dtypes, shape, bias)
    step = make_step(case)
    right = expected(step, case.problem)
    agree(own.attend_stored(step, case.problem), right, GPU_LIMITS[case.dtype])


def stores_the_same_bits(dtype: str, stored: str, own: StepBackend):
    """Compare with the definition. Some writes are NaN, infinite, or 0."""
    case = StepCase(dtype, stored, seed=3)
    one, other = make_step(case), make_step(case)
    for step in (one, other):
        assert step.key is not None
        step.key[0, 0, 0, 1], step.key[0, 0, 1, 1], step.key[0, 1] = torch.nan, -torch.inf, 0.0
    Reference().attend_stored(other, case.problem)
    with np.errstate(all="ignore"):  # of infinite scores
        own.attend_stored(one, case.problem)
    for a, b in zip(one.stored, other.stored, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def rows_in_pages_are_as_good(dtype: str, stored: str, own: StepBackend):
    case = StepCase(dtype, stored, bias="table", seed=5)
    step = make_step(case)
    paged = in_pages(step, case.problem)
    for a, b in zip(*(own.attend_stored(x, case.problem) for x in (step, paged)), strict=True):
        assert torch.equal(a, b)


def sees_nothing(own: StepBackend):
    check_that_nothing_is_seen(own.attend_stored)
    case = StepCase()
    step = make_step(case)
    none = {name: getattr(step, name)[:0] for name in ("query", "key", "value", "spans", "writes")}
    out, lse = own.attend_stored(step._replace(**none), case.problem)
    assert (out.shape, lse.shape) == ((0, 2, 6, 20), (0, 6, 2))


def goes_by_tables_that_have_changed(own: StepBackend):
    case = StepCase()
    step = make_step(case)._replace(writes=make_step(case).writes[:0])
    fewer = step.spans.copy()
    fewer[4, Span._fields.index("seen")] //= 2  # it has neither positions nor a mask, which are as long
    fewer[2, Span._fields.index("rows")] = 0
    placed = place(step._replace(spans=fewer), case.problem, most=1000)
    agree(own.attend_placed(placed), expected(step._replace(spans=fewer), case.problem), 2e-5)
    placed.spans.copy_(torch.from_numpy(step.spans))
    agree(own.attend_placed(placed), expected(step, case.problem), 2e-5)


def sees_no_page_that_is_none(own: StepBackend):
    case = StepCase(seed=5)
    placed = place(in_pages(make_step(case), case.problem), case.problem)
    before = own.attend_placed(placed)
    placed.pages[2:] = torch.tensor([-1, LARGE, 10**6]).repeat(len(placed.pages))[: len(placed.pages) - 2]
    out, lse = own.attend_placed(placed)
    assert out.isfinite().all()
    assert not lse.isnan().any()
    assert not torch.equal(before[1], lse)


def touches_nothing_beyond(name: str, number: int, own: StepBackend):
    """Change checked tables on the device; substitutes for devices notice accesses beyond."""
    case = StepCase(bias="coordinates", seed=1)
    step = in_pages(make_step(case), case.problem)
    own.attend_placed(led_astray(step, case.problem, name, number))


def writes_no_row_that_there_is_not(own: StepBackend):
    """A step without new rows whose table says that there are some."""
    case = StepCase(bias="coordinates", seed=1)
    step = make_step(case)
    placed = place(step._replace(key=None, value=None, writes=np.zeros_like(step.writes)), case.problem)
    placed.writes.copy_(torch.from_numpy(step.writes))
    before = [x.clone() for x in step.stored]
    own.attend_placed(placed)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, step.stored, strict=True))


def checks() -> Iterator[tuple[str, Check, bool]]:
    """Yield each check's name, and True if it is in the small choice of every two values."""
    for row in every_pair(GPU_DTYPES, GPU_SHAPES, GPU_BIASES):
        (dtype, stored), shape, bias = row.values
        yield f"softmax {dtype} {stored} {shape} {bias}", partial(is_the_softmax, *row.values), not row.marks
    for dtype, stored in GPU_DTYPES:
        yield f"bits {dtype} {stored}", partial(stores_the_same_bits, dtype, stored), True
        few = (dtype, stored) in (("float32", ""), ("float16", "int8"))
        yield f"pages {dtype} {stored}", partial(rows_in_pages_are_as_good, dtype, stored), few
    for name, number in ASTRAY:
        yield f"astray {name} {number}", partial(touches_nothing_beyond, name, number), (name, number) in FEW_ASTRAY
    for check in (sees_nothing, goes_by_tables_that_have_changed, sees_no_page_that_is_none, writes_no_row_that_there_is_not):
        yield check.__name__.replace("_", " "), check, True
