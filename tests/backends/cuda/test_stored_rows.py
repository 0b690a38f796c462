"""Steps over stored rows on the kernel `attend_stored`, on the CPU."""

from typing import Any

import pytest
import torch
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, OnHost
from helpers.step_checks import checks
from helpers.steps import StepCase, agree, expected, make_step

from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.steps import kernel_of
from dilkit.bias.form import BiasForm
from dilkit.device import Device
from dilkit.pattern import Pattern
from dilkit.problem import Problem

slow = pytest.mark.slow


class Launcher(HostLauncher):
    """Says that so many blocks run at once that a row's work is divided among several."""

    def resident(self, kernel, device=None) -> int:
        return 64


def on_host(workers: int = 1, order: str = "random", checked: bool = False) -> OnHost:
    return OnHost(FP32, Launcher(order, workers=workers, checked=checked))


QUICK = {
    *("softmax float32  grouped coordinates", "softmax bfloat16 int8 many ", "bits float32 int8", "bits bfloat16 int8"),
    "pages float32 ",
}


def chosen() -> list[Any]:
    found = []
    for name, check, usual in checks():
        is_quick = name in QUICK or (usual and name.split()[0] not in ("softmax", "bits", "pages"))
        found.append(pytest.param(check, marks=[] if is_quick else slow if usual else pytest.mark.kernels, id=name))
    return found


@pytest.mark.parametrize("check", chosen())
def test_the_kernel_of_steps(check):
    check(on_host())


@pytest.mark.parametrize("stored", ["float32", pytest.param("int8", marks=slow)])
def test_the_same_bits_in_any_order(stored):
    case = StepCase(stored=stored, most=3000, spans=4, batch=1)
    step = make_step(case)
    ways = ((1, "forward"), (2, "reverse"), (2, "random"))
    first, *others = (on_host(*way).attend_stored(step, case.problem) for way in ways)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@slow
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_no_thread_reads_what_another_writes_without_a_barrier(stored):
    case = StepCase(stored=stored, heads=2, kv_heads=1, bias="table", most=300)
    step = make_step(case)
    right = expected(step, case.problem)
    agree(on_host(checked=True).attend_stored(step, case.problem), right, 2e-5)


def test_what_is_compiled_and_what_is_refused():
    def problem(**fields):
        own = dict(seq=1, heads=6, kv_heads=1, head_dim=64, is_causal=True, stored="float32") | fields
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
