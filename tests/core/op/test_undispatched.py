"""Calls around torch's dispatcher."""

import contextlib
from typing import Any

import pytest
import torch
from helpers.calls import Recorder, attend, gradients, tensors
from helpers.fakes import registered
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import dilkit
from dilkit import Pattern, Problem, selector
from dilkit.backends.native.backend import Native
from dilkit.inputs import Inputs
from dilkit.op import prepared_call
from dilkit.op._facts import call_key, undispatched
from dilkit.op.call_options import CallOptions, forward_arguments
from dilkit.op.operators import attend as attend_inputs, forward_op
from dilkit.op.prepared_call import prepare

X = torch.zeros(1, 6, 4, 8)


class Mode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass that changes nothing."""


MODES = {
    "a dispatch mode": Mode,
    "fake tensors": FakeTensorMode,
    "a function mode": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward mode": forward_ad.dual_level,
    "a profiler": torch.autograd.profiler.profile,
}
ODD = {
    "a subclass": lambda: X.as_subclass(Own),
    "no memory": lambda: X.to("meta"),
    "zeros without memory": lambda: torch._efficientzerotensor(X.shape),
    "a negated view": lambda: torch._neg_view(X),
    "functional": lambda: torch._to_functional_tensor(X),
    "sparse": X.to_sparse,
    "what is none": lambda: [X],
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_of_torch_are_left_to_the_dispatcher(mode):
    assert undispatched((X, X, X, None, (0.5, X)))
    with mode():
        assert not undispatched((X, X, X, None, (0.5, X)))
        assert call_key((X, X, X)) is None
    assert undispatched((X, X, X, None, (0.5, X)))


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_tensors_are_left_to_the_dispatcher(make):
    inputs = X, make(), X
    assert not undispatched(inputs)
    assert call_key(inputs) is None


def test_what_needs_no_dispatcher():
    answers = []
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            answers.append(undispatched((X, torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), None, (1.0, X))))
    torch.func.vmap(lambda x: answers.append(not undispatched((x,))) or x)(X)
    assert answers == [True] * 4


def test_a_dispatch_mode_sees_both_operators():
    inputs = tensors(requires_grad=True)
    with Mode() as mode:
        attend(*inputs).sum().backward()
    names = [str(func) for func in mode.seen if "dilkit" in str(func)]
    assert names == ["dilkit.dilated_attention.default", "dilkit.dilated_attention_backward.default"]


def test_negated_views_are_read_as_what_they_show():
    inputs = tensors()
    seen = [torch._neg_view(x) for x in inputs]
    torch.testing.assert_close(attend(*seen), attend(*(-x for x in inputs)), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_both_ways_give_the_same_bits(backend):
    options, rows = CallOptions(dilkit.Pattern([8, 20], [1, 2]), True, True, (backend,), scale=0.3), tensors()
    direct = gradients(lambda *x: attend_inputs(Inputs(*x), options), rows)
    dispatched = gradients(lambda *x: forward_op(*forward_arguments(Inputs(*x), options)), rows)
    assert all(map(torch.equal, direct, dispatched))


class Learned(Recorder):
    def forward(self, *arguments):
        out, lse = super().forward(*arguments)
        return out * torch.ones((), requires_grad=True), lse


def test_a_backend_records_nothing_by_itself():
    with registered(Learned("learned", [])) as name:
        assert not attend(*tensors(), backend=name).requires_grad
        with torch._C._AutoDispatchBelowAutograd():
            assert not attend(*tensors(requires_grad=True), backend=name).requires_grad


SHAPE = 1, 6, 4, 8


def test_a_key_says_where_tensors_are():
    """A tensor in a tuple, and one that is missing, are others than one in place of the next."""
    placed = [(X, X, X, X, None), (X, X, X, None, X), (X, X, X, (X,), None), (X, X, X, (None, X)), (X, X, X, (X, None))]
    assert len({call_key(inputs) for inputs in placed}) == len(placed)
    assert call_key((X, X, X[..., :3])) is None  # which is filled up before
    assert call_key((X[..., :3], X, X)) is not None


@pytest.mark.parametrize("at", range(3))
def test_the_kernel_refuses_what_is_no_tensor(at):
    problem = Problem.of(torch.zeros(SHAPE), torch.zeros(SHAPE), Pattern.dense())
    tensors = [torch.zeros(SHAPE)] * 3
    tensors[at] = [0.0]
    with pytest.raises((AttributeError, TypeError), match="list"):
        Native().forward(Inputs(*tensors), problem)


def test_a_backend_is_kept_under_the_environment_that_it_was_chosen_by(monkeypatch):
    """Another thread may change DILKIT_BACKEND while a call is being prepared."""
    rows = torch.randn(3, 1, 19, 2, 8).unbind()

    def state():
        moment = selector.state()
        monkeypatch.setenv("DILKIT_BACKEND", "reference")
        return moment

    inputs, options = Inputs(*rows), CallOptions(Pattern([19], [1]))
    with monkeypatch.context() as patch:
        patch.setattr(prepared_call, "state", state)
        prepare(inputs, options, call_key(inputs))
    monkeypatch.delenv("DILKIT_BACKEND")
    assert prepare(inputs, options, call_key(inputs)).backend.name != "reference"
