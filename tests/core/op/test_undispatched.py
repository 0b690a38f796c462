"""Calls around torch's dispatcher: only where it would have nothing to do, and with what it would have come to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from helpers.calls import Recorder, attend, gradients, tensors
from helpers.fakes import registered
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import dilkit
from dilkit.op._facts import facts_undispatched, plain_facts, undispatched
from dilkit.op.operators import attend as attend_inputs
from dilkit.op.operators import encode_call, forward_op

X = torch.zeros(1, 6, 4, 8)


class Mode(TorchDispatchMode):
    """Which operators torch's dispatcher is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass that changes nothing."""


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Mode,
    "fake tensors": FakeTensorMode,
    "a function mode": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward mode": forward_ad.dual_level,
    "a profiler": torch.autograd.profiler.profile,
}
ODD: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: X.as_subclass(Own),
    "no memory": lambda: X.to("meta"),
    "zeros without memory": lambda: torch._efficientzerotensor(X.shape),
    "a negated view": lambda: torch._neg_view(X),
    "functional": lambda: torch._to_functional_tensor(X),
    "sparse": X.to_sparse,
    "what is none": lambda: [X],
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_of_torch_are_left_to_the_dispatcher(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    assert undispatched((X, X, X, None, 0.5, "text"))
    with mode():
        assert not undispatched((X, X, X, None, 0.5, "text"))
        assert plain_facts(X, X, X) is facts_undispatched((X, X)) is None
    assert undispatched((X, X, X, None, 0.5, "text"))


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_tensors_are_left_to_the_dispatcher(make: Callable[[], Any]) -> None:
    inputs = X, make(), X
    assert not undispatched(inputs)
    assert plain_facts(*inputs) is facts_undispatched(inputs) is None


def test_what_needs_no_dispatcher() -> None:
    answers: list[bool] = []
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            answers.append(undispatched((X, torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), None, 1.0, "", 3)))
    torch.func.vmap(lambda x: answers.append(not undispatched((x,))) or x)(X)
    assert answers == [True] * 4


def test_a_dispatch_mode_sees_both_operators() -> None:
    inputs = tensors(requires_grad=True)
    with Mode() as mode:
        attend(*inputs).sum().backward()
    names = [str(func) for func in mode.seen if "dilkit" in str(func)]
    assert names == ["dilkit.dilated_attention.default", "dilkit.dilated_attention_backward.default"]


def test_the_profiler_sees_both_operators() -> None:
    inputs = tensors(requires_grad=True)
    with torch.autograd.profiler.profile() as profile:
        attend(*inputs).sum().backward()
    seen = {event.name for event in profile.function_events}
    assert {"dilkit::dilated_attention", "dilkit::dilated_attention_backward"} <= seen


def test_negated_views_are_read_as_what_they_show() -> None:
    inputs = tensors()
    seen = [torch._neg_view(x) for x in inputs]
    torch.testing.assert_close(attend(*seen), attend(*(-x for x in inputs)), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_both_ways_give_the_same_bits(backend: str) -> None:
    call = None, 0.3, encode_call(dilkit.Pattern([8, 20], [1, 2]), True, True, backend)
    inputs = tensors()
    ways = [gradients(lambda *x, way=way: way(*x, *call), inputs) for way in (attend_inputs, forward_op)]
    assert all(torch.equal(mine, its) for mine, its in zip(*ways, strict=True))


class Learned(Recorder):
    """A backend with a parameter of its own, which is no input of the operator."""

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(*arguments)
        return out * torch.ones((), requires_grad=True), lse


def test_a_backend_records_nothing_by_itself() -> None:
    with registered(Learned("learned", [])) as name:
        assert not attend(*tensors(), backend=name).requires_grad
        with torch._C._AutoDispatchBelowAutograd():
            assert not attend(*tensors(requires_grad=True), backend=name).requires_grad
