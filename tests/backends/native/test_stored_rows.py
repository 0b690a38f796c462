"""Steps over stored rows: each instruction set and the definition, of every dtype, bias and kind of span, against fp64."""

from __future__ import annotations

import pytest
import torch
from helpers.pairwise import every_pair
from helpers.steps import FORMS, StepCase, expected, in_pages, make_step

from dilkit.backends.native import _native
from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.problem import DTYPES, STORED

DTYPE_PAIRS = [(dtype, stored) for dtype in DTYPES for stored in ("", *STORED[dtype])]
SHAPES = {"grouped": (6, 3, 20), "as many": (3, 3, 64), "one": (4, 1, 33), "small": (2, 2, 3)}
LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.mark.parametrize(
    ("isa", "dtypes", "shape", "bias"), every_pair([*_native.instruction_sets(), "reference"], DTYPE_PAIRS, SHAPES, FORMS)
)
def test_a_step_is_the_softmax_over_its_spans(
    isa: str, dtypes: tuple[str, str], shape: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa != "reference":
        monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    (dtype, stored), (heads, kv_heads, head_dim) = dtypes, SHAPES[shape]
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case = StepCase(dtype, stored, **sizes, bias=bias, softcap=1.5 * (head_dim == 20), sink=head_dim == 64)
    step, problem = make_step(case), case.problem
    backend = Reference() if isa == "reference" else Native()
    right = expected(step, problem)
    found = backend.attend_stored(step, problem)
    for name, a, b in zip(("out", "lse"), found, right, strict=True):
        assert a.is_contiguous()
        assert a.dtype == (step.query.dtype if name == "out" else torch.float64 if dtype == "float64" else torch.float32)
        torch.testing.assert_close(
            a.double(), b, atol=LIMITS[dtype], rtol=LIMITS[dtype], msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("dtype", "stored"), DTYPE_PAIRS)
def test_both_backends_store_the_same_bits(dtype: str, stored: str) -> None:
    case = StepCase(dtype, stored, seed=3)
    one, other = make_step(case), make_step(case)
    Native().attend_stored(one, case.problem)
    Reference().attend_stored(other, case.problem)
    for a, b in zip(one.stored, other.stored, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "stored"), DTYPE_PAIRS)
@pytest.mark.parametrize("backend", [Native(), Reference()], ids=lambda backend: backend.name)
def test_rows_in_pages_are_as_good(backend: Native | Reference, dtype: str, stored: str) -> None:
    case = StepCase(dtype, stored, bias="table", seed=5)
    step = make_step(case)
    paged = in_pages(step, case.problem)
    for a, b in zip(backend.attend_stored(step, case.problem), backend.attend_stored(paged, case.problem), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_the_same_bits_with_any_number_of_threads(stored: str) -> None:
    case = StepCase(stored=stored, most=3000, spans=4)
    before, step, results = torch.get_num_threads(), make_step(case), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(Native().attend_stored(step, case.problem))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", [Native(), Reference()], ids=lambda backend: backend.name)
def test_a_row_that_sees_nothing(backend: Native | Reference) -> None:
    case = StepCase()
    step = make_step(case)
    out, lse = backend.attend_stored(step._replace(spans=step.spans[:0], writes=step.writes[:0]), case.problem)
    assert not out.any()
    assert (lse == -torch.inf).all()
    sink = torch.arange(6.0)
    out, lse = backend.attend_stored(step._replace(spans=step.spans[:0], writes=step.writes[:0], sink=sink), case.problem)
    assert not out.any()
    assert torch.equal(lse, sink[:, None].expand(2, 6, 2))
