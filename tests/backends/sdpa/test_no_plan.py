"""Calls for which cuDNN has no execution plan."""

from dataclasses import replace

import pytest
import torch
from helpers.sdpa import agrees_with_the_oracle, problem, tensors

from dilkit import Pattern
from dilkit.backends.sdpa import backend as sdpa
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS
from dilkit.inputs import Inputs
from dilkit.problem import Problem

CPU = KERNELS[0]
NO_PLAN = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.\nmore of it")
NONE = "cudnn: execution plan missing: cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built."
PATTERN, HEADS = Pattern([8, 16], [1, 2]), (4, 4)


class Failing:
    """A kernel that computes as the CPU's does, but raises `error` in the second call of a pass."""

    def __init__(self, where, error=NO_PLAN):
        self.calls: list[str] = []
        kernel = replace(CPU, name="cudnn", **{name: self._counted(name, error if name == where else None) for name in PASSES})
        self.backend = SDPA((kernel, CPU))

    def _counted(self, name, error):
        def run(*arguments):
            self.calls.append(name)
            if error is not None and self.calls.count(name) == 2:
                raise error
            return getattr(CPU, name)(*arguments)

        return run


PASSES = "forward", "backward"


@pytest.mark.parametrize("where", PASSES)
@pytest.mark.parametrize("text", [str(NO_PLAN), "cuDNN Frontend error: No valid engine configs for Matmul_MUL_Reduction_SUB_"])
def test_the_next_kernel_computes_all_of_the_pass(where, text):
    failing = Failing(where, RuntimeError(text))
    assert agrees_with_the_oracle(failing.backend, PATTERN, 32, HEADS)
    assert failing.calls.count(where) == 2
    tried = len(failing.calls)
    assert agrees_with_the_oracle(failing.backend, PATTERN, 32, HEADS)
    assert len(failing.calls) == tried, "a kernel without a plan was tried again"
    assert agrees_with_the_oracle(failing.backend, PATTERN, 32, HEADS, is_causal=True)
    assert len(failing.calls) > tried, "another problem may have a plan"


def test_its_reason_is_shown():
    failing, (q, k, v, _) = Failing("forward"), tensors(32, HEADS)
    posed = Problem.of(q, k, PATTERN)
    assert failing.backend.detail(posed) == "cudnn kernel"
    failing.backend.forward(Inputs(q, k, v), posed)
    assert failing.backend.detail(posed) == f"cpu-flash kernel; {NONE}"
    assert failing.backend.refusals(posed) == ()


def test_without_another_kernel_the_error_is_raised_and_the_problem_refused():
    failing, (q, k, v, _) = Failing("forward"), tensors(32, HEADS)
    posed, alone = Problem.of(q, k, PATTERN), SDPA(failing.backend.kernels[:1])
    with pytest.raises(RuntimeError, match="No valid execution plans"):
        alone.forward(Inputs(q, k, v), posed)
    assert [str(reason) for reason in alone.refusals(posed)] == [NONE]


OTHERS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: CUDNN_BACKEND_OPERATION_GRAPH_DESCRIPTOR failed"),
]


@pytest.mark.parametrize(("error", "capturing"), [*((error, False) for error in OTHERS), (NO_PLAN, True)], ids=str)
def test_other_errors_are_raised_and_so_is_this_one_in_a_capture(monkeypatch, error, capturing):
    monkeypatch.setattr(sdpa, "capturing", lambda device: capturing)
    failing, (q, k, v, _) = Failing("forward", error), tensors(32, HEADS)
    posed = Problem.of(q, k, PATTERN)
    with pytest.raises(type(error)) as raised:
        failing.backend.forward(Inputs(q, k, v), posed)
    assert raised.value is error
    assert failing.backend.detail(posed) == "cudnn kernel"


def test_a_kernel_keeps_few_failures():
    kernel = replace(CPU, name="cudnn")
    for seq in range(1, 1000):
        kernel.remember_failure(problem(seq=seq), NO_PLAN)
        assert len(kernel.failures) <= 256
        assert kernel.refusals(problem(seq=seq))
