"""Calls around torch's dispatcher, and what is read of tensors in C: only where dispatcher and checks have nothing to do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
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
from dilkit import Pattern, Problem, selector
from dilkit.backends.native.backend import Native
from dilkit.inputs import Inputs
from dilkit.op import prepared_call
from dilkit.op._facts import facts_undispatched, key_of, plain_facts, surely_fit, undispatched
from dilkit.op.arguments import _check_tensors
from dilkit.op.boundary import INPUTS
from dilkit.op.operators import attend as attend_inputs
from dilkit.op.operators import encode_call, forward_op
from dilkit.op.prepared_call import prepare

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


SHAPE = 1, 6, 4, 8
SHAPES = [SHAPE, (1, 6, 2, 8), (1, 6, 3, 8), (2, 6, 4, 8), (1, 5, 4, 8), (1, 6, 4, 1), (1, 6, 0, 8), (1, 0, 4, 8), (1, 6, 4, 0)]
DTYPES = torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.float8_e5m2
READS_IN_C = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: torch.zeros(1, 6, 8, 4).mT,
    lambda: torch.zeros(1, 4, 6, 8).transpose(1, 2),
    lambda: torch.zeros(1, 6, 4, 9)[..., ::9],
    lambda: torch.zeros(6, 4, 8),
    lambda: torch.nested.nested_tensor([torch.zeros(6, 4, 8)]),
    lambda: torch.nn.Parameter(torch.zeros(SHAPE)),
    lambda: None,
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_surely_fit_pass_every_check() -> None:
    makers = [partial(torch.zeros, shape) for shape in SHAPES] + [partial(torch.zeros, SHAPE, dtype=dtype) for dtype in DTYPES]
    made = [make() for make in (*makers, *OTHERS, *ODD.values())]
    for x, y in itertools.product(made, repeat=2):
        for three in ((x, y, y), (y, x, y), (y, y, x)):
            facts = plain_facts(*three)
            assert facts is None or (facts == key_of(INPUTS, three) and undispatched(three))
            if facts is not None or surely_fit(*three):
                _check_tensors(*three)


@pytest.mark.skipif(not READS_IN_C, reason="this torch does not describe its tensors to C")
def test_ordinary_tensors_surely_fit() -> None:
    query, key = torch.zeros(SHAPE), torch.zeros(1, 4, 6, 8).transpose(1, 2)
    assert surely_fit(query, key, key)
    assert surely_fit(query.requires_grad_(), key[:, :, :2], key[:, :, :2])
    assert surely_fit(*torch.zeros(3, *SHAPE, dtype=torch.bfloat16).unbind())
    assert not surely_fit(query, key[:, :, :3], key[:, :, :3])
    assert plain_facts(query, key, key) == facts_undispatched((query, key, key)) == key_of(INPUTS, (query, key, key))
    assert plain_facts(query, key[:, :, :3], key[:, :, :3]) is None


@pytest.mark.parametrize("at", range(3))
def test_the_kernel_refuses_what_is_no_tensor(at: int) -> None:
    problem = Problem.of(torch.zeros(SHAPE), torch.zeros(SHAPE), Pattern.dense())
    tensors: list[Any] = [torch.zeros(SHAPE)] * 3
    tensors[at] = [0.0]
    with pytest.raises((AttributeError, TypeError), match="list"):
        Native().forward(Inputs(*tensors), problem)


def test_a_backend_is_kept_under_the_environment_that_it_was_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change DILKIT_BACKEND while a call is being prepared."""
    rows = torch.randn(3, 1, 19, 2, 8).unbind()

    def state() -> Any:
        moment = selector.state()
        monkeypatch.setenv("DILKIT_BACKEND", "reference")
        return moment

    call = encode_call(Pattern([19], [1]), False, False, "")
    with monkeypatch.context() as patch:
        patch.setattr(prepared_call, "state", state)
        prepare(INPUTS, rows, key_of(INPUTS, rows), 1.0, call)
    monkeypatch.delenv("DILKIT_BACKEND")
    assert prepare(INPUTS, rows, key_of(INPUTS, rows), 1.0, call).backend.name != "reference"
