"""Steps over stored rows on the kernel `attend_stored`, on the CPU: of every dtype, bias and kind of span, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, OnHost
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

from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.steps import kernel_of
from dilkit.backends.reference import Reference
from dilkit.bias.form import BiasForm
from dilkit.decoding.placed import place
from dilkit.decoding.step import Span, Step
from dilkit.device import Device
from dilkit.pattern import Pattern
from dilkit.problem import Problem

slow = pytest.mark.slow


class Launcher(HostLauncher):
    """Says that so many blocks run at once that a row's work is divided among several."""

    def resident(self, kernel: Any, device: object = None) -> int:
        return 64


def on_host(workers: int = 1, order: str = "random", checked: bool = False) -> OnHost:
    own = OnHost(FP32)
    own.launcher = Launcher(order, workers=workers, checked=checked)
    return own


def all_but(quick: set[tuple[Any, ...]], rows: list[Any]) -> list[Any]:
    """Rows of parameters, of which the default run takes those alone."""
    return [pytest.param(*row.values, marks=[] if row.values in quick else [slow]) for row in rows]


QUICK: set[tuple[Any, ...]] = {(("float32", ""), "grouped", "coordinates"), (("bfloat16", "int8"), "many", "")}


@pytest.mark.parametrize(("dtypes", "shape", "bias"), all_but(QUICK, every_pair(GPU_DTYPES, GPU_SHAPES, GPU_BIASES)))
def test_a_step_is_the_softmax_over_its_spans(dtypes: tuple[str, str], shape: str, bias: str) -> None:
    case = gpu_case(dtypes, shape, bias)
    step, problem = make_step(case), case.problem
    right = expected(step, problem)
    agree(on_host().attend_stored(step, problem), right, GPU_LIMITS[case.dtype])


@pytest.mark.parametrize(
    ("dtype", "stored"), [pytest.param(*pair, marks=[] if pair[1] == "int8" else [slow]) for pair in GPU_DTYPES[:3]]
)
def test_it_stores_the_same_bits_as_the_definition(dtype: str, stored: str) -> None:
    case = StepCase(dtype, stored, seed=3)
    one, other = make_step(case), make_step(case)
    on_host().attend_stored(one, case.problem)
    Reference().attend_stored(other, case.problem)
    for a, b in zip(one.stored, other.stored, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "stored"), [pytest.param(*pair, marks=[slow] * (pair != ("float32", ""))) for pair in GPU_DTYPES]
)
def test_rows_in_pages_are_as_good(dtype: str, stored: str) -> None:
    case = StepCase(dtype, stored, bias="table", seed=5)
    step = make_step(case)
    paged = in_pages(step, case.problem)
    for a, b in zip(on_host().attend_stored(step, case.problem), on_host().attend_stored(paged, case.problem), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stored", ["float32", pytest.param("int8", marks=slow)])
def test_the_same_bits_in_any_order(stored: str) -> None:
    """Blocks take turns, and threads run in other orders."""
    case = StepCase(stored=stored, most=3000, spans=4, batch=1)
    step = make_step(case)
    results = [
        on_host(workers, order).attend_stored(step, case.problem)
        for workers, order in ((1, "forward"), (2, "reverse"), (2, "random"))
    ]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_row_that_sees_nothing() -> None:
    check_that_nothing_is_seen(on_host().attend_stored)


def test_tables_that_have_changed_on_the_device_are_what_it_goes_by() -> None:
    case = StepCase()
    step = make_step(case)._replace(writes=make_step(case).writes[:0])
    fewer = step.spans.copy()
    fewer[4, Span._fields.index("seen")] //= 2  # it has neither positions nor a mask, which are as long
    fewer[2, Span._fields.index("rows")] = 0
    placed = place(step._replace(spans=fewer), case.problem, most=1000)
    own = on_host()
    agree(own.attend_placed(placed), expected(step._replace(spans=fewer), case.problem), 2e-5)
    placed.spans.copy_(torch.from_numpy(step.spans))
    agree(own.attend_placed(placed), expected(step, case.problem), 2e-5)


@pytest.mark.parametrize(("name", "number"), [pytest.param(*one, marks=[] if one in FEW_ASTRAY else [slow]) for one in ASTRAY])
def test_tables_that_lead_astray_touch_nothing_beyond(name: str, number: int) -> None:
    """Of tables that change on the device, which nobody checks; the launcher notices what is touched beyond the tensors."""
    case = StepCase(bias="coordinates", seed=1)
    step = in_pages(make_step(case), case.problem)
    on_host().attend_placed(led_astray(step, case.problem, name, number))


def test_a_page_that_is_none_is_not_seen() -> None:
    case = StepCase(seed=5)
    step = in_pages(make_step(case), case.problem)
    placed = place(step, case.problem)
    own = on_host()
    before = own.attend_placed(placed)
    placed.pages[2:] = torch.tensor([-1, LARGE, 10**6]).repeat(len(placed.pages))[: len(placed.pages) - 2]
    after = own.attend_placed(placed)
    assert after[0].isfinite().all()
    assert not after[1].isnan().any()
    assert not torch.equal(before[1], after[1])


@slow
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_no_thread_reads_what_another_writes_without_a_barrier(stored: str) -> None:
    case = StepCase(stored=stored, heads=2, kv_heads=1, bias="table", most=300)
    step = make_step(case)
    right = expected(step, case.problem)
    agree(on_host(checked=True).attend_stored(step, case.problem), right, 2e-5)


def test_what_is_compiled_and_what_is_refused() -> None:
    def problem(**fields: Any) -> Problem:
        own: dict[str, Any] = dict(seq=1, heads=6, kv_heads=1, head_dim=64, is_causal=True, stored="float32") | fields
        return Problem(pattern=Pattern.dense(), device=Device("cuda", "GPU", (9, 0)), **own)

    macros = kernel_of(problem(stored="int8"), (9, 0)).macros
    assert (macros["GROUP"], macros["STORED"], macros["STORAGE"]) == (8, 3, 0)
    assert kernel_of(problem(heads=100), (9, 0)).macros["GROUP"] == 8
    assert CupyRaw.limits.refusals(problem()) == ()
    (wide,) = CupyRaw.limits.refusals(problem(head_dim=200))
    assert str(wide) == "head_dim 200: at most 128"
    (other,) = CupyRaw.limits.refusals(problem(bias=BiasForm(2, placed=True, apart=True)))
    assert other.code == "bias"
    assert "attend_stored" in CupyRaw().detail(problem())


def test_a_step_without_rows() -> None:
    case = StepCase()
    step = make_step(case)
    none = {name: getattr(step, name)[:0] for name in ("query", "key", "value", "spans", "writes")}
    out, lse = on_host().attend_stored(Step(**{**step._asdict(), **none}), case.problem)
    assert out.shape == (0, 2, 6, 20)
    assert lse.shape == (0, 6, 2)
